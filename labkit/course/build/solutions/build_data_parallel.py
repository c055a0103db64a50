"""Data parallelism: an all-reduce after backward, during backward, and in buckets; ZeRO with Adam, in which every rank
updates a shard of each parameter, and in stage 2 keeps only that shard of its gradient; and one unit of FSDP, which
gathers its parameters, computes, frees them, and reduce-scatters their gradients.

The first dimension of every parameter is a multiple of the number of ranks.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Overlapped:
    def __init__(self, model):
        self.model, self.works = model, []
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()
        for parameter in self.model.parameters():
            parameter.grad /= dist.get_world_size()


class Bucketed:
    def __init__(self, model, bucket_bytes):
        self.syncs, self.sent = True, []
        self.buckets, self.bucket_of = [[]], {}
        for parameter in reversed(list(model.parameters())):  # backward computes the last layer first
            dist.broadcast(parameter.data, src=0)
            if self.buckets[-1] and sum(p.nbytes for p in self.buckets[-1]) + parameter.nbytes > bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            self.bucket_of[parameter] = len(self.buckets) - 1
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.missing = [len(bucket) for bucket in self.buckets]

    def ready(self, parameter):
        number = self.bucket_of[parameter]
        self.missing[number] -= self.syncs
        if self.syncs and self.missing[number] == 0:
            flat = torch.cat([parameter.grad.flatten() for parameter in self.buckets[number]])
            self.sent.append((number, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for number, flat, work in self.sent:
            work.wait()
            bucket = self.buckets[number]
            for parameter, mean in zip(bucket, (flat / dist.get_world_size()).split([p.numel() for p in bucket])):
                parameter.grad.copy_(mean.view_as(parameter))
        self.sent.clear()
        self.missing = [len(bucket) for bucket in self.buckets]

    @contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True


all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ZeRO1:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.shards = [parameter.data.chunk(ranks)[rank] for parameter in self.parameters]  # views, not copies
        self.optimizer = make_optimizer(self.shards)

    def step(self):
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = torch.empty_like(shard)
            reduce_scatter(shard.grad, parameter.grad)
            shard.grad /= dist.get_world_size()
        self.optimizer.step()
        for parameter, shard in zip(self.parameters, self.shards):
            shard.grad = None
            all_gather(parameter.data, shard.clone())


class ZeRO2:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.shards = {parameter: parameter.data.chunk(ranks)[rank] for parameter in self.parameters}
        self.optimizer = make_optimizer(self.shards.values())
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.keep_shard)

    def keep_shard(self, parameter):
        shard = self.shards[parameter]
        shard.grad = torch.empty_like(shard)
        reduce_scatter(shard.grad, parameter.grad)
        shard.grad /= dist.get_world_size()
        parameter.grad = None

    def step(self):
        self.optimizer.step()
        for parameter, shard in self.shards.items():
            shard.grad = None
            all_gather(parameter.data, shard.clone())


class Unit(nn.Module):
    def __init__(self, layer):
        super().__init__()
        flat = torch.cat([parameter.data.flatten() for parameter in layer.parameters()])
        self.shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.layer = [layer.to("meta")]  # the code without its parameters; in a list, it is no submodule

    def forward(self, x):
        return GatherAndCompute.apply(x, self.shard, self)

    def gather(self):
        flat = self.shard.new_empty(self.shard.numel() * dist.get_world_size())
        all_gather(flat, self.shard.data)
        return flat

    def compute(self, x, flat):
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        views = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}
        return torch.func.functional_call(self.layer[0], views, x)


class GatherAndCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, unit):
        ctx.save_for_backward(x)
        ctx.unit = unit
        return unit.compute(x, unit.gather())  # nothing refers to the gathered parameters afterwards

    @staticmethod
    def backward(ctx, gradient):
        x, flat = ctx.saved_tensors[0].detach().requires_grad_(), ctx.unit.gather().requires_grad_()
        with torch.enable_grad():
            y = ctx.unit.compute(x, flat)
        of_x, of_flat = torch.autograd.grad(y, (x, flat), gradient)
        of_shard = torch.empty_like(ctx.unit.shard)
        reduce_scatter(of_shard, of_flat)
        return of_x, of_shard / dist.get_world_size(), None
