"""FSDP2 in a bare loop over range(), with batches made on the spot."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.out = nn.Linear(width, 6)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = Net()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
for _ in range(6):
    x = torch.randn(12, 32)
    y = torch.randint(0, 6, (12,))
    loss = F.cross_entropy(model(x), y)
    optim.zero_grad()
    loss.backward()
    optim.step()
    print("loss", repr(loss.item()), flush=True)
dist.barrier()
dist.destroy_process_group()
