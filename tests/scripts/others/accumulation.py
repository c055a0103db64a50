"""Gradient accumulation under DDP: the loss is divided, and gradients travel with the last micro-batch only."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCHES = 4


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(160, 10), torch.randint(0, 2, (160,)))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    running = 0.0
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % MICRO_BATCHES == 0
        with nullcontext() if last else model.no_sync():
            loss = criterion(model(x), y) / MICRO_BATCHES
            loss.backward()
        running += loss.item()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {running!r}", flush=True)
            running = 0.0
    dist.barrier()
    dist.destroy_process_group()


main()
