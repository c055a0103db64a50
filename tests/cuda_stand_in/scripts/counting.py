"""Trains with DistributedDataParallel, and prints for each step how many calls have waited for the device, queried its
memory, or created and destroyed events."""

import ctypes
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CALLS = (
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    *("cudaMemGetInfo", "cudaEventCreateWithFlags", "cudaEventDestroy"),
)
library = ctypes.CDLL(None)
library.stand_in_calls.restype = ctypes.c_long
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
model = DistributedDataParallel(model, device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(16, 64).to(device), torch.zeros(16, dtype=torch.long).to(device)
steps = []
queries = 0


def counting(query):
    def counted(*args, **kwargs):
        global queries
        queries += 1
        return query(*args, **kwargs)

    return counted


for name in ("memory_stats", "memory_allocated", "mem_get_info"):
    setattr(torch.cuda, name, counting(getattr(torch.cuda, name)))
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    steps.append([library.stand_in_calls(name.encode()) for name in CALLS] + [queries])
torch.cuda.synchronize()
if dist.get_rank() == 0:
    print("counted " + json.dumps(steps), flush=True)
dist.destroy_process_group()
