"""A small model, split over two CPU ranks in the way that is named; four steps on the same samples in every way."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def pipeline(model, x, y):
    rank = dist.get_rank()
    halves = nn.ModuleDict({"0": model[0], "1": model[1]}), nn.ModuleDict({"2": model[2]})
    stage = nn.Sequential()
    for name, layer in halves[rank].items():
        stage.add_module(name, layer)
    schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(4):
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
        optimizer.step()
        optimizer.zero_grad()


def whole(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    way = sys.argv[1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 34), nn.ReLU(), nn.Linear(34, 5))
    x, y = torch.randn(8, 16), torch.randint(0, 5, (8,))
    if way == "single":
        whole(model, x, y)
        return
    dist.init_process_group("gloo")
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    if way == "ddp":
        whole(DistributedDataParallel(model), x[mine], y[mine])
    elif way == "fsdp2":
        whole(fully_shard(model), x[mine], y[mine])
    elif way in ("fsdp", "fsdp_orig"):
        fsdp = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=way == "fsdp_orig")
        whole(fsdp, x[mine], y[mine])
    elif way == "tp":
        whole(
            parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}),
            x,
            y,
        )
    elif way == "pp":
        pipeline(model, x, y)
    dist.barrier()
    dist.destroy_process_group()


main()
