"""Every way of splitting the work over two CPU ranks, one after the other; each tells its name before it begins."""

import datetime
import gc
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.monitor import Event, log_event
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH, WIDTH = 4, 8, 64


def log(name, **data):
    log_event(Event(name, datetime.datetime.now(), data))


def mlp():
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4))


def data():
    return TensorDataset(torch.randn(2 * STEPS * BATCH, 16), torch.randint(0, 4, (2 * STEPS * BATCH,)))


def train(model, optimizer):
    everything = data()
    for x, y in DataLoader(everything, batch_size=BATCH, sampler=DistributedSampler(everything)):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log("true", true_loss=loss.item())


def ddp():
    model = DistributedDataParallel(mlp())
    train(model, torch.optim.Adam(model.parameters()))


def zero():
    model = DistributedDataParallel(mlp())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))


def fsdp1():
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    train(model, torch.optim.Adam(model.parameters()))


def fsdp2():
    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    train(model, torch.optim.Adam(model.parameters()))


def tensor_parallel():
    torch.manual_seed(0)
    model = parallelize_module(mlp(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in DataLoader(data(), batch_size=2 * BATCH):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log("true", true_loss=loss.item())


def pipeline(schedule_of):
    rank = dist.get_rank()
    mine = mlp()[:2] if rank == 0 else mlp()[2:]  # the other part is not kept
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    schedule = schedule_of(stage, 4, loss_fn=F.cross_entropy)
    optimizer = torch.optim.Adam(stage.submod.parameters())
    for _ in range(STEPS):
        x, y, losses = torch.randn(BATCH, 16), torch.randint(0, 4, (BATCH,)), []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            log("true", true_loss=torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()


def gpipe():
    pipeline(ScheduleGPipe)


def one_f_one_b():
    pipeline(Schedule1F1B)


STYLES = [ddp, zero, fsdp1, fsdp2, tensor_parallel, gpipe, one_f_one_b]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for style in STYLES:
        if len(sys.argv) < 2 or style.__name__ in sys.argv[1:]:
            log("style", style=style.__name__)
            style()
            gc.collect()
            dist.barrier()
            print("done", style.__name__)
    dist.destroy_process_group()
