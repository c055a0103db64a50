"""Starts its workers itself, as scripts for one machine often do."""

import torch
from torch import multiprocessing


def train(number):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    print(f"worker {number} is done", flush=True)


if __name__ == "__main__":
    multiprocessing.spawn(train, nprocs=2)
