"""Solutions of labs 13, 14 and 21. The first dimension of every parameter is a multiple of the number of ranks."""

import math
from collections import deque
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# ---- lab 13: an all-reduce after backward, during backward, and in buckets; ZeRO with Adam, in which every rank
# updates a shard of each parameter, and in stage 2 keeps only that shard of its gradient; and one unit of FSDP, which
# gathers its parameters, computes, frees them, and reduce-scatters their gradients


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


# ---- lab 14: an MLP split by columns and rows, the same with sequence parallelism, a cross-entropy over a split
# vocabulary, the 1F1B schedule of a pipeline, and causal attention in a ring


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x):
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    all_gather(out, x.contiguous())
    return out


def scattered(x):
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    reduce_scatter(out, x.contiguous())
    return out


class F(torch.autograd.Function):  # before the column-parallel layer
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class G(torch.autograd.Function):  # after the row-parallel layer
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ParallelMLP(nn.Module):
    def __init__(self, w1, b1, w2, b2):
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.w1, self.b1 = nn.Parameter(w1.chunk(ranks)[rank].clone()), nn.Parameter(b1.chunk(ranks)[rank].clone())
        self.w2, self.b2 = nn.Parameter(w2.chunk(ranks, dim=1)[rank].clone()), nn.Parameter(b2.clone())

    def forward(self, x):
        hidden = torch.relu(F.apply(x) @ self.w1.T + self.b1)
        return G.apply(hidden @ self.w2.T) + self.b2


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scattered(x)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient)


class SequenceParallelMLP(ParallelMLP):
    def forward(self, x):
        hidden = torch.relu(Gather.apply(x) @ self.w1.T + self.b1)
        return Scatter.apply(hidden @ self.w2.T) + F.apply(self.b2)  # the tokens of all ranks use b2


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        most = logits.max(dim=1).values
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        exponentials = (logits - most[:, None]).exp()
        first = dist.get_rank() * logits.shape[1]
        mine = (targets >= first) & (targets < first + logits.shape[1])
        index = (targets - first).clamp(0, logits.shape[1] - 1)[:, None]
        of_target = torch.where(mine, logits.gather(1, index)[:, 0] - most, 0.0)
        sums = torch.stack([exponentials.sum(dim=1), of_target])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials / sums[0][:, None], mine, index)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, mine, index = ctx.saved_tensors
        of_logits = softmax.scatter_add(1, index, -mine[:, None].to(softmax.dtype))
        return gradient * of_logits / len(softmax), None


def cross_entropy(logits, targets):
    return CrossEntropy.apply(logits, targets)


def one_f_one_b(stage, count, shape, inputs, loss_of):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    waiting, sends = deque(), []

    def received(source):
        x = torch.empty(shape)
        dist.recv(x, source)
        return x

    def forward(number):
        x = inputs[number] if rank == 0 else received(rank - 1).requires_grad_()
        y = stage(x)
        if loss_of is not None:
            y = loss_of(y, number)
        else:
            sends.append(dist.isend(y.detach(), rank + 1))
        waiting.append((x, y))

    def backward():
        x, y = waiting.popleft()
        y.backward(None if loss_of is not None else received(rank + 1))
        if rank > 0:
            sends.append(dist.isend(x.grad, rank - 1))

    warm_up = min(ranks - rank - 1, count)
    for number in range(warm_up):
        forward(number)
    for number in range(warm_up, count):
        forward(number)
        backward()
    for _ in range(warm_up):
        backward()
    for send in sends:
        send.wait()


def passed_on(block):
    """Sends a block to the next rank, and returns that of the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(block)
    works = [dist.isend(block, (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]
    for work in works:
        work.wait()
    return arrived


def pairs(rank, source, zigzag):
    """The chunks of queries of `rank` and of keys of `source` that see each other: (query, key, whether on the
    diagonal), as indices of the chunks of a rank."""
    last = 2 * dist.get_world_size() - 1
    queries, keys = ([rank, last - rank], [source, last - source]) if zigzag else ([rank], [source])
    return [(i, j, a == b) for i, a in enumerate(queries) for j, b in enumerate(keys) if b <= a]


def scores_of(q, k, diagonal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf) if diagonal else scores


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, zigzag):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out, total = torch.zeros_like(q), torch.full_like(q[..., :1], -math.inf)
        block = torch.stack([k, v])
        for hop in range(ranks):
            for i, j, diagonal in pairs(rank, (rank - hop) % ranks, zigzag):
                query, result, before = (x.chunk(1 + zigzag, dim=1)[i] for x in (q, out, total))  # views
                key, value = block.chunk(1 + zigzag, dim=2)[j]
                scores = scores_of(query, key, diagonal)
                after = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
                result.mul_((before - after).exp()).add_((scores - after).exp() @ value)
                before.copy_(after)
            if hop < ranks - 1:
                block = passed_on(block)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.zigzag = zigzag
        return out

    @staticmethod
    def backward(ctx, gradient):
        rank, ranks, (q, k, v, out, total) = dist.get_rank(), dist.get_world_size(), ctx.saved_tensors
        of_q, mean = torch.zeros_like(q), (gradient * out).sum(-1, keepdim=True)
        block = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
        for hop in range(ranks):
            for i, j, diagonal in pairs(rank, (rank - hop) % ranks, ctx.zigzag):
                query, of_query, of_out, sums, means = (
                    x.chunk(1 + ctx.zigzag, dim=1)[i] for x in (q, of_q, gradient, total, mean)
                )
                key, value, of_key, of_value = block.chunk(1 + ctx.zigzag, dim=2)[j]
                weights = (scores_of(query, key, diagonal) - sums).exp()
                of_scores = weights * (of_out @ value.mT - means) / math.sqrt(q.shape[-1])
                of_query += of_scores @ key
                of_key += of_scores.mT @ query
                of_value += weights.mT @ of_out
            block = passed_on(block)  # after the last hop it is at home, with the gradients of all ranks
        return of_q, block[2], block[3], None


def ring_attention(q, k, v):
    return RingAttention.apply(q, k, v, False)


def balanced_ring_attention(q, k, v):
    return RingAttention.apply(q, k, v, True)


# ---- lab 21: a plan for a block of attention whose input and output are sharded along the positions


def parallelize(block, mesh):
    sequence = 1  # the dimension of the positions in x
    plan = {
        "norm": SequenceParallel(sequence_dim=sequence),
        "attention": PrepareModuleInput(input_layouts=Shard(sequence), desired_input_layouts=Replicate()),
        "attention.w1": ColwiseParallel(),  # query, key and value
        "attention.w2": ColwiseParallel(),
        "attention.w3": ColwiseParallel(),
        "attention.w4": RowwiseParallel(output_layouts=Shard(sequence)),  # the output
    }
    parallelize_module(block, mesh, plan)
