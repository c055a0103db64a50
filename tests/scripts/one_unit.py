"""FSDP1 with a size-based policy whose threshold no part of the model reaches, and a loss that is a module, on two
ranks."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

dist.init_process_group("gloo")
blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100_000)
model = FullyShardedDataParallel(
    nn.Sequential(*blocks, nn.Linear(16, 4)), auto_wrap_policy=policy, device_id=torch.device("cpu")
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    optimizer.zero_grad()
    criterion(model(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    optimizer.step()
dist.destroy_process_group()
