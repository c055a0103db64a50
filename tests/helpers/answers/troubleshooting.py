"""Answers to the exercises of lab 12."""

import os
from pathlib import Path

from labkit import run

FIXED = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(256, 20)
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 32, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(batch), labels).backward()
        optimizer.step()
    correct = (model(inputs).argmax(1) == dataset.tensors[1]).float().mean()
    dist.all_reduce(correct)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {correct / dist.get_world_size():.1%} correct", flush=True)
        torch.save(model.module.state_dict(), "broken.pt")
dist.destroy_process_group()
"""


def fixed(text):
    """A run of a fixed script, in the folder of this test's runs."""
    folder = Path(os.environ["LABKIT_RUNS"])
    folder.mkdir(exist_ok=True)
    script = folder / "broken.py"
    script.write_text(text.replace('"broken.pt"', repr(str(folder / "broken.pt"))), encoding="utf-8")
    return run(str(script), nproc=2, device="cpu").wait()


RIGHT = {
    "prefix": lambda state: {name.removeprefix("module."): value for name, value in state.items()},
    "stray": (2, 131),
    "mend": lambda: fixed(FIXED),
}
WRONG = {
    "prefix": (
        lambda state: {name.replace("module.", ""): value for name, value in state.items()},
        "the model has submodule.weight",
    ),
    "stray": ((0, 96), "number 118 a different collective"),
    "mend": (
        lambda: fixed(FIXED.replace("    sampler.set_epoch(epoch)\n", "")),
        "rank 0 draws the samples in the same order in every epoch",
    ),
}
