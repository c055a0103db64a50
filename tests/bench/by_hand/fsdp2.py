"""Hand-written FSDP2, the reference of `bench` for the generated script."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 40

dist.init_process_group("gloo")
torch.manual_seed(0)
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
images = interpolate(pixels.float().view(-1, 1, 8, 8) / 16, 28, mode="bilinear")
numbers = torch.arange(60_000) % len(labels)
dataset = TensorDataset(images[numbers], labels[numbers])
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 128, sampler=sampler, drop_last=True)
model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
    nn.Sequential(nn.Conv2d(32, 64, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
    nn.Sequential(nn.Conv2d(64, 128, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
    nn.Sequential(nn.Flatten(), nn.Linear(128 * 3 * 3, 128), nn.ReLU()),
    nn.Linear(128, 10),
)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (inputs, targets) in enumerate(loader, 1):
    optimizer.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if step == STEPS:
        break
dist.barrier()
dist.destroy_process_group()
