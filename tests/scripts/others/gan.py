"""A generator and a discriminator, each with an optimizer of its own, both under DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(7)
netG = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)))
netD = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), broadcast_buffers=False)
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
dataset = TensorDataset(torch.randn(80, 6))
sampler = DistributedSampler(dataset, shuffle=True)
dataloader = DataLoader(dataset, batch_size=8, sampler=sampler)

for (real,) in dataloader:
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    fake = netG(torch.randn(len(real), 4))

    optD.zero_grad()
    lossD = bce(netD(torch.cat([real, fake.detach()])), torch.cat([ones, zeros]))
    lossD.backward()
    optD.step()

    optG.zero_grad()
    lossG = bce(netD(fake), ones)
    lossG.backward()
    optG.step()
    print(f"loss {lossD.item()!r} {lossG.item()!r}", flush=True)

dist.barrier()
dist.destroy_process_group()
