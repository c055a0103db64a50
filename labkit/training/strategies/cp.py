"""Context parallelism: each rank holds a chunk of every window; attention all-gathers the keys and values of the other
chunks.

As in the training of Llama 3: one all-gather of keys and values per layer, and a reduce-scatter of their gradients in
backward. `attend`, `positions` and `windows`, which the modules of GPT and of the text define for whole windows, are
defined for a chunk here.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import TensorDataset

from labkit.training.strategies.ddp import gradient_sync, parallelize
from labkit.training.strategies.fsdp2_tp import evaluate
from labkit.training.workloads.gpt import CONTEXT

__all__ = ["attend", "evaluate", "gradient_sync", "parallelize", "positions", "windows"]


def windows(data: torch.Tensor, count: int) -> TensorDataset:
    """This rank's chunk of windows of CONTEXT bytes; targets are shifted by one byte."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, count).long()
    length = CONTEXT // dist.get_world_size()
    first = dist.get_rank() * length
    window = data[starts[:, None] + torch.arange(first, first + length + 1)]
    return TensorDataset(window[:, :-1], window[:, 1:])


def positions(tokens: torch.Tensor) -> torch.Tensor:
    """The position of each byte in the whole window."""
    length = tokens.shape[1]
    return torch.arange(length, device=tokens.device) + dist.get_rank() * length


class AllGather(torch.autograd.Function):
    """All-gather along the sequence dimension; backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx, chunk: torch.Tensor) -> torch.Tensor:
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
        dist.all_gather(chunks, chunk)
        return torch.cat(chunks, dim=2)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        chunks = gradient.chunk(dist.get_world_size(), dim=2)
        own = torch.empty_like(chunks[0]).contiguous()
        dist.reduce_scatter(own, [chunk.contiguous() for chunk in chunks])
        return own


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of this chunk to the window: (batch, head, position, head width)."""
    keys, values = (AllGather.apply(chunk.contiguous()) for chunk in (key, value))
    length, context = query.shape[2], keys.shape[2]
    mask = torch.ones(length, context, dtype=torch.bool, device=query.device)
    mask = mask.tril(dist.get_rank() * length)  # this position and earlier ones
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask)
