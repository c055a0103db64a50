"""Recipes of torch.compile: the optimizer's step, a whole training step, and what stands between; prints losses and
what Dynamo counts."""

import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1]


def pieces():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(48, 8))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), DataLoader(data, batch_size=8)


def optimizer_alone():
    model, optimizer, loader = pieces()

    @torch.compile(fullgraph=False, backend=BACKEND)
    def step():
        optimizer.step()

    for (x,) in loader:
        loss = model(x).square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
        print("optimizer_alone", loss.item())


def whole_step():
    model, optimizer, loader = pieces()

    @torch.compile(backend=BACKEND)
    def step(x):
        loss = model(x.to("cpu")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for (x,) in loader:
        print("whole_step", step(x).item())


def forward_and_backward():
    """The step itself is not compiled, so that hooks report it."""
    model, optimizer, loader = pieces()
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    @torch.compile(backend=BACKEND)
    def gradients(x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        return loss

    for (x,) in loader:
        loss = gradients(x)
        optimizer.step()
        optimizer.zero_grad()
        print("forward_and_backward", loss.item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for recipe in (optimizer_alone, whole_step, forward_and_backward):
        recipe()
        breaks = sum(counters["graph_break"].values())
        print(
            json.dumps({"recipe": recipe.__name__, "breaks": breaks} | counters["stats"] | counters["recompile_limit"])
        )
        counters.clear()
        torch._dynamo.reset()
