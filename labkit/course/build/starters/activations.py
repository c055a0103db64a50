"""Trains four blocks on one CPU rank, and treats their activations in one of four ways.

torchrun --nproc-per-node=1 activations.py stored|full|selective|offload
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BLOCKS, WIDTH, INNER, TOKENS, STEPS = 4, 128, 512, 2048, 4
SMALL = 1 << 20  # bytes: smaller tensors stay


class Block(nn.Module):
    """An MLP that is added to its input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


# ---- four ways to treat the activations of a block


def stored(block, x):
    """Autograd stores what backward needs."""
    return block(x)


def full(block, x):
    """Stores the input of the block, and runs the block again in backward."""
    return checkpoint(block, x, use_reentrant=False)


def selective(block, x):
    """Stores the outputs of matrix products, and recomputes everything else from them."""
    contexts = partial(create_selective_checkpoint_contexts, products_only)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def products_only(context, operator, *args, **kwargs):
    """Which operators of a block are expensive to run again."""
    if operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def offload(block, x):
    """Moves what backward needs out of the memory of the device. On a GPU this is `save_on_cpu`, and the host's memory
    is on the other side of PCIe. A CPU rank has nothing beyond its memory but files: they stand in for the host."""
    with saved_tensors_hooks(to_file, from_file):
        return block(x)


folder = tempfile.TemporaryDirectory()
files = 0


def to_file(tensor):
    """Writes a tensor; what stays is the path, with its shape."""
    global files
    if tensor.nbytes < SMALL:
        return tensor
    files += 1
    path = Path(folder.name, str(files))
    tensor.detach().numpy().tofile(path)
    return path, tensor.shape


def from_file(packed):
    """The tensor that was written; its file is deleted."""
    if isinstance(packed, torch.Tensor):
        return packed
    path, shape = packed
    tensor = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(shape)
    path.unlink()
    return tensor


def main(way):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    optimizer = torch.optim.Adam(blocks.parameters())
    inputs = torch.randn(TOKENS, WIDTH)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = inputs
        for block in blocks:
            x = way(block, x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    folder.cleanup()


if __name__ == "__main__":
    main({"stored": stored, "full": full, "selective": selective, "offload": offload}[sys.argv[1]])
