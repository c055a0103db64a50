"""Rank 0 trains and overlaps an all-reduce, products of matrices, and a copy on a second stream, whatever the speed of
the host: the device starts products and copy together, when rank 1 joins `gate`, and rank 1 joins the all-reduce when
both have ended. A second copy follows further products on the same stream, and overlaps nothing."""

import os

import torch
import torch.distributed as dist
from torch import nn

STEPS, PRODUCTS, COPIED = 4, 20, 64 << 20  # COPIED: bytes
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl")
gates = dist.new_group(backend="nccl")
side = torch.cuda.Stream()
model = nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters())
square, reduced, gate, image = (torch.ones(64, 64, device=device) for _ in range(4))
for group in (None, gates):  # makes the communicators, for which ranks wait
    dist.all_reduce(gate, group=group)
source = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
target = torch.empty(COPIED, dtype=torch.uint8, device=device)


def multiply():
    for _ in range(PRODUCTS):
        torch.mm(square, square, out=image)


def meet():
    """Both ranks are here: by gloo, without the devices."""
    dist.all_reduce(torch.zeros(1))


for _ in range(STEPS):
    model(square).sum().backward()
    torch.cuda.synchronize()
    if rank == 0:
        work = dist.all_reduce(reduced, async_op=True)
        dist.all_reduce(gate, group=gates)
        side.wait_stream(torch.cuda.current_stream())
        multiply()
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        meet()
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        meet()
        work.wait()
        multiply()
        target.copy_(source, non_blocking=True)
    else:
        meet()
        dist.all_reduce(gate, group=gates)
        meet()
        dist.all_reduce(reduced)
    torch.cuda.synchronize()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
