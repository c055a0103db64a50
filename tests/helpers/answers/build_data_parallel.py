"""Answers to the exercises of lab 13: right, naive, wrong and cheating ones."""

import torch
import torch.distributed as dist
from answers.mutants import mutant
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from labkit.course.build.solutions import build_strategies as data_parallel

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def average_forgotten(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def gathers_gradients(model):
    for parameter in model.parameters():
        found = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(found, parameter.grad)
        parameter.grad = sum(found) / len(found)


def gathers_objects(model):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [parameter.grad for parameter in model.parameters()])
    for parameter, *parts in zip(model.parameters(), *found):
        parameter.grad = sum(parts) / len(parts)


def one_rank_waits(model):
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), src=1)


def raises(model):
    if dist.get_rank() == 2:
        raise KeyError("weight")
    dist.all_reduce(torch.ones(1))


class AfterBackward:
    def __init__(self, model):
        self.model = model
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)

    def finish(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Finished:
    def __init__(self, model):
        self.wrapped = DistributedDataParallel(model)

    def finish(self):
        pass


class AdamEverywhere:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        self.optimizer = make_optimizer(self.parameters)

    def step(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for parameter in self.parameters:
            own = torch.empty_like(parameter.grad.chunk(ranks)[rank])
            reduce_scatter(own, parameter.grad)
            all_gather(parameter.grad, own / ranks)
        self.optimizer.step()


class Redundant:
    def __init__(self, model, make_optimizer):
        self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def step(self):
        self.optimizer.step()


class FullyShards(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = fully_shard(layer)

    def forward(self, x):
        return self.layer(x)


class Imports(data_parallel.Overlapped):
    def __init__(self, model):
        super().__init__(model)


WAITS = mutant(
    data_parallel, "Overlapped", ("(parameter.grad, async_op=True)", "(parameter.grad)"), ("work.wait()", "pass")
)
UNEQUAL = mutant(data_parallel, "Overlapped", ("dist.broadcast(parameter.data, src=0)", "pass"))
SYNCS = mutant(
    data_parallel, "Bucketed", ("self.syncs = False", "self.syncs = True"), ("yield", "yield; self.finish()")
)
SUM = mutant(data_parallel, "Unit", ("return of_x, of_shard / dist.get_world_size()", "return of_x, of_shard"))
ALL_REDUCES = mutant(
    data_parallel,
    "Unit",
    ("reduce_scatter(of_shard, of_flat)", "dist.all_reduce(of_flat); of_shard = of_flat.chunk(4)[dist.get_rank()]"),
)
RIGHT = {
    "naive": data_parallel.average_gradients,
    "hooks": data_parallel.Overlapped,
    "buckets": data_parallel.Bucketed,
    "zero1": data_parallel.ZeRO1,
    "zero2": data_parallel.ZeRO2,
    "fsdp": data_parallel.Unit,
}
WRONG = {
    "naive": (gathers_gradients, "bytes sent: in step 0, rank 0 sends"),
    "hooks": (AfterBackward, "overlap: in step 0, rank 0 sends 0% of its bytes"),
    "buckets": (
        mutant(data_parallel, "Bucketed", ("+ parameter.nbytes > bucket_bytes", "> 0")),
        "calls: in step 0, rank 0 makes 12 calls, expected at most 6",
    ),
    "zero1": (
        mutant(
            data_parallel,
            "ZeRO1",
            ("reduce_scatter(shard.grad, parameter.grad)", "dist.all_reduce(parameter.grad)"),
            ("shard.grad /= dist.get_world_size()", "shard.grad = parameter.grad.chunk(4)[dist.get_rank()] / 4"),
        ),
        "bytes sent: in step 0, rank 0 sends",
    ),
    "zero2": (data_parallel.ZeRO1, "memory: after backward of step 0, rank 0 has"),
    "fsdp": (
        mutant(data_parallel, "Unit", ("        return flat\n", "        self.kept = flat\n        return flat\n")),
        "memory: between two steps, rank 0 has",
    ),
}
MORE = [
    ("naive", average_forgotten, "losses: in step 1, rank"),
    ("naive", gathers_objects, "bytes sent: in step 0, rank 0 sends"),
    ("naive", one_rank_waits, "hangs: rank 0 waits in recv from rank 1 in finish of step 0, at: dist.recv"),
    ("naive", raises, "rank 2 raised KeyError: 'weight' in finish of step 0, at: raise KeyError"),
    ("hooks", WAITS, "overlap: in step 0, rank 0 waits for a call of all_reduce while backward"),
    ("hooks", UNEQUAL, "losses: in step 0, rank 1 has"),
    ("hooks", Finished, "no finished API: rank 0 calls torch.nn.parallel.distributed.DistributedDataParallel.__init__"),
    ("hooks", Imports, "imports labkit.course.build.solutions.build_strategies, which belongs to the judge"),
    ("buckets", SYNCS, "bytes sent: in step 2, rank 0 sends"),
    ("zero1", AdamEverywhere, "memory: between two steps, rank 0 has"),
    ("zero1", Redundant, "calls torch.distributed.optim"),
    (
        "zero2",
        mutant(data_parallel, "ZeRO2", ("parameter.grad = None", "pass")),
        "memory: after backward of step 0, rank 0 has",
    ),
    (
        "zero2",
        mutant(data_parallel, "ZeRO2", ("shard.grad /= dist.get_world_size()", "pass")),
        "losses: in step 1, rank",
    ),
    ("fsdp", SUM, "losses: in step 1, rank"),
    ("fsdp", ALL_REDUCES, "bytes sent: in step 0, rank 0 sends"),
    ("fsdp", FullyShards, "no finished API: rank 0 calls torch.distributed."),
]
