"""A model that torch.distributed.pipelining traces and cuts in two; the last rank knows the loss."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 48)
        self.first = nn.Sequential(nn.Linear(48, 48), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        return self.head(self.second(self.first(self.embed(x))))


def main():
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    chunks, batch = 4, 32
    pipe = pipeline(Model(), mb_args=(torch.randn(batch // chunks, 12),), split_spec={"second": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, device)
    del pipe  # and with it the stages of the other ranks
    schedule = ScheduleGPipe(stage, chunks, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        x, y = torch.randn(batch, 12), torch.randint(0, 3, (batch,))
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=y, losses=losses)
            print(f"loss {torch.stack(losses).mean().item()!r}", flush=True)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
