"""Tensor parallelism: an MLP split by columns and rows, the same with sequence parallelism, and a cross-entropy over a
split vocabulary."""

import torch
import torch.distributed as dist
from torch import nn

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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
