"""A Trainer class around DDP, with a scheduler, clipping and an evaluation after each epoch."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, valid_data, optimizer, epochs):
        self.rank = int(os.environ["RANK"])
        self.model = DDP(model)
        self.loader = DataLoader(train_data, batch_size=16, sampler=DistributedSampler(train_data))
        self.valid = DataLoader(valid_data, batch_size=16)
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.criterion = nn.MSELoss()
        self.epochs = epochs

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.criterion(self.model(source), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        print(f"loss {loss.item()!r}", flush=True)

    def _validate(self):
        self.model.eval()
        with torch.inference_mode():
            total = sum(self.criterion(self.model.module(x), y).item() for x, y in self.valid)
        print(f"valid {total / len(self.valid):.4f}")
        self.model.train()

    def train(self):
        for epoch in range(self.epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self._run_batch(source, targets)
            self.scheduler.step()
            self._validate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    everything = TensorDataset(torch.randn(128, 20), torch.randn(128, 1))
    train_data, valid_data = random_split(everything, [96, 32])
    net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    Trainer(net, train_data, valid_data, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), args.epochs).train()
    dist.barrier()
    dist.destroy_process_group()
