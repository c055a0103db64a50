"""Other right answers than the reference solutions, and honest mistakes with the words that name them."""

import torch
import torch.distributed as dist
from answers.mutants import mutant
from torch import nn

from labkit.course.build.solutions import build_strategies as solutions

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def divides_first(model):
    for parameter in model.parameters():
        parameter.grad.div_(dist.get_world_size())
        dist.all_reduce(parameter.grad)


def one_flat_tensor(model):
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters])):
        parameter.grad = part.view_as(parameter).clone()


def in_two_halves(model):
    ranks = dist.get_world_size()
    for parameter in model.parameters():
        flat = parameter.grad.flatten()
        shard = flat.new_empty(flat.numel() // ranks)
        reduce_scatter(shard, flat)
        all_gather(flat, shard / ranks)
        parameter.grad.copy_(flat.view_as(parameter))


class FlatZeRO1:
    def __init__(self, model, make_optimizer):
        self.parameters = list(model.parameters())
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        flat = torch.cat([parameter.data.flatten() for parameter in self.parameters])
        self.shard = nn.Parameter(flat.chunk(self.ranks)[rank].clone())
        self.optimizer = make_optimizer([self.shard])

    def step(self):
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.shard.grad = torch.empty_like(self.shard)
        reduce_scatter(self.shard.grad, flat / self.ranks)
        self.optimizer.step()
        self.shard.grad = None
        all_gather(flat, self.shard.data)
        for parameter, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
            parameter.data.copy_(part.view_as(parameter))


class PerParameter(nn.Module):
    """A unit of FSDP that shards the rows of each parameter, and computes the gradients of a linear layer itself."""

    def __init__(self, layer):
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(layer.weight.data.chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(layer.bias.data.chunk(ranks)[rank].clone())

    def forward(self, x):
        return Linear.apply(x, self.weight, self.bias)


def whole(shard):
    out = shard.new_empty(len(shard) * dist.get_world_size(), *shard.shape[1:])
    all_gather(out, shard.detach())
    return out


def own_mean(gradient):
    out = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
    reduce_scatter(out, gradient)
    return out / dist.get_world_size()


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, whole(weight), whole(bias))

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ whole(weight)
        return of_x, own_mean(gradient.T @ x), own_mean(gradient.sum(0))


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        rank, size = dist.get_rank(), logits.shape[1]
        own = logits.logsumexp(1)
        most = own.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        total = (own - most).exp()
        dist.all_reduce(total)
        lse = most + total.log()
        here = (targets // size) == rank
        picked = torch.where(here, logits[torch.arange(len(targets)), targets % size], 0.0)
        dist.all_reduce(picked)
        ctx.save_for_backward(
            (logits - lse[:, None]).exp(), nn.functional.one_hot(targets % size, size) * here[:, None]
        )
        return (lse - picked).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, picked = ctx.saved_tensors
        return gradient * (softmax - picked) / len(softmax), None


def three_all_reduces(logits, targets):
    return LogSumExp.apply(logits, targets)


BY_PARITY = (  # blocking sends and receives
    "    works = [dist.isend(block, (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]\n"
    "    for work in works:\n        work.wait()\n",
    "    if rank % 2:\n        dist.recv(arrived, (rank - 1) % ranks)\n        dist.send(block, (rank + 1) % ranks)\n"
    "    else:\n        dist.send(block, (rank + 1) % ranks)\n        dist.recv(arrived, (rank - 1) % ranks)\n",
)
DIVIDED_FIRST = (
    ("flat = torch.cat([parameter.grad.flatten() for parameter in self.buckets[number]])",
     "flat = torch.cat([parameter.grad.flatten() for parameter in self.buckets[number]]) / dist.get_world_size()"),
    ("(flat / dist.get_world_size()).split", "flat.split"),
)  # fmt: skip
HOOK_DIVIDES = ("self.works.append(", "parameter.grad /= dist.get_world_size(); self.works.append(")
FINISH_ONLY = ("        self.works.clear()\n        for", "        self.works.clear()\n        return\n        for")
EINSUM = (("F.apply(x) @ self.w1.T", "torch.einsum('ti,hi->th', F.apply(x), self.w1)"),)
RIGHT = [
    ("naive", divides_first),
    ("naive", one_flat_tensor),
    ("naive", in_two_halves),
    ("hooks", mutant(solutions, "Overlapped", HOOK_DIVIDES, FINISH_ONLY)),
    ("buckets", mutant(solutions, "Bucketed", *DIVIDED_FIRST)),
    ("zero1", FlatZeRO1),
    ("zero1", solutions.ZeRO2),
    ("fsdp", PerParameter),
    ("column_row", mutant(solutions, "ParallelMLP", *EINSUM)),
    ("cross_entropy", three_all_reduces),
    ("four_stages", mutant(solutions, "one_f_one_b", ("dist.recv(x, source)", "dist.irecv(x, source).wait()"))),
    ("ring_attention", mutant(solutions, "ring_attention", BY_PARITY)),
    ("balanced", mutant(solutions, "balanced_ring_attention", BY_PARITY)),
]
LAST_BUCKET = ("self.missing[number] == 0:", "self.missing[number] == 0 and number < len(self.buckets) - 1:")
NEXT_SHARD = ("parameter.data.chunk(ranks)[rank] for", "parameter.data.chunk(ranks)[(rank + 1) % ranks] for")
MISTAKES = [
    ("naive", mutant(solutions, "average_gradients", ("parameter.grad /= dist.get_world_size()", "pass")),
     "are the sum over the ranks, not the mean: divide by the number of ranks"),
    ("buckets", mutant(solutions, "Bucketed", LAST_BUCKET),
     "the gradients of 0.weight, 0.bias, 2.weight and 1 more are those of the rank's own samples"),
    ("zero1", mutant(solutions, "ZeRO1", NEXT_SHARD), "are in the wrong places: rank r has the r-th shard"),
    ("zero1", mutant(solutions, "ZeRO1", ("shard.grad /= dist.get_world_size()", "pass")),
     "divide by the number of ranks"),
    ("column_row", mutant(solutions, "ParallelMLP", ("return summed(gradient)", "return gradient")), "f in backward"),
    ("cross_entropy", mutant(solutions, "cross_entropy", (" / len(softmax)", "")), "divided by the number of tokens"),
    ("ring_attention", mutant(solutions, "ring_attention",
     ("for hop in range(ranks):\n            for i, j, diagonal in"
     " pairs(rank, (rank - hop) % ranks, zigzag)", "for hop in range(ranks - 1):\n            for i, j, diagonal in"
     " pairs(rank, (rank - hop) % ranks, zigzag)")), "the ring makes one hop too few"),
]  # fmt: skip
