"""Trains on a GPU while every synchronisation is an error: whoever watches must not force one."""

import torch
import torch.nn.functional as F
from torch import nn

device = torch.device("cuda", 0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(32, 64, device=device), torch.randint(0, 8, (32,), device=device)
model(x)
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
torch.cuda.set_sync_debug_mode("default")
print(torch.stack(losses).tolist())
