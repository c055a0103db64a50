"""Causal attention in a ring, for contiguous and for balanced chunks of positions."""

import math

import torch
import torch.distributed as dist


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
