"""Model parallelism: an MLP split by columns and rows, the same with sequence parallelism, a cross-entropy over a split
vocabulary, the 1F1B schedule of a pipeline, and causal attention in a ring."""

import math
from collections import deque

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
