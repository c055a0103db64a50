"""Answers to the exercises of lab 14: right, naive, wrong and cheating ones."""

import math

import torch
import torch.distributed as dist
from answers.mutants import mutant
from torch import nn
from torch.distributed.nn.functional import all_reduce

from labkit.course.build.solutions import build_strategies as model_parallel


class WholeMLP(nn.Module):
    """Every rank stores and computes everything."""

    def __init__(self, w1, b1, w2, b2):
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = map(nn.Parameter, (w1, b1, w2, b2))

    def forward(self, x):
        return torch.relu(x @ self.w1.T + self.b1) @ self.w2.T + self.b2


class Differentiates(nn.Module):
    """Uses the all-reduce of torch that autograd differentiates."""

    def __init__(self, w1, b1, w2, b2):
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.w1, self.b1 = nn.Parameter(w1.chunk(ranks)[rank].clone()), nn.Parameter(b1.chunk(ranks)[rank].clone())
        self.w2, self.b2 = nn.Parameter(w2.chunk(ranks, dim=1)[rank].clone()), nn.Parameter(b2.clone())

    def forward(self, x):
        return all_reduce(torch.relu(x @ self.w1.T + self.b1) @ self.w2.T) + self.b2


def gathers_logits(logits, targets):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    parts[dist.get_rank()] = logits
    return nn.functional.cross_entropy(torch.cat(parts, dim=1), targets)


def gathers_keys(q, k, v):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = [torch.empty_like(torch.stack([k, v])) for _ in range(ranks)]
    dist.all_gather(found, torch.stack([k, v]).detach())
    found[rank] = torch.stack([k, v])
    keys, values = torch.cat(found[: rank + 1], dim=2)
    scores = q @ keys.mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
    return scores.masked_fill(later, -math.inf).softmax(-1) @ values


def gathers_with_operators(q, k, v):
    found = torch.ops._c10d_functional.all_gather_into_tensor(torch.stack([k, v]), dist.get_world_size(), "0")
    return q + torch.ops._c10d_functional.wait_tensor(found).mean()


ONCE = ("return summed(gradient)", "return gradient")
TWICE = ("        return gradient\n", "        return summed(gradient)\n")
UNSTABLE = ("most = logits.max(dim=1).values", "most = torch.zeros(len(logits))")
GPIPE = mutant(model_parallel, "one_f_one_b", ("min(ranks - rank - 1, count)", "count"))
STOPS = mutant(model_parallel, "one_f_one_b", ("if rank > 0:", "if rank > 1:"))
BACKWARDS = mutant(
    model_parallel,
    "ring_attention",
    ("dist.isend(block, (rank + 1)", "dist.isend(block, (rank - 1)"),
    ("arrived, (rank - 1)", "arrived, (rank + 1)"),
    ("(rank - hop)", "(rank + hop)"),
)
ALL_PAIRS = mutant(
    model_parallel,
    "balanced_ring_attention",
    ("if b <= a]", "]"),
    ("a == b)", "a - b)"),
    (".triu(1)", ".triu(1 + diagonal * 16)"),
    ("if diagonal else scores", ""),
)
KEEPS_ALL = mutant(
    model_parallel,
    "ring_attention",
    (
        "            if hop < ranks - 1:\n                block = passed_on(block)\n",
        "            ctx.kept = [*getattr(ctx, 'kept', []), block]\n            block = passed_on(block)\n",
    ),
)
RIGHT = {
    "column_row": model_parallel.ParallelMLP,
    "sequence": model_parallel.SequenceParallelMLP,
    "cross_entropy": model_parallel.cross_entropy,
    "two_stages": model_parallel.one_f_one_b,
    "four_stages": model_parallel.one_f_one_b,
    "ring_attention": model_parallel.ring_attention,
    "balanced": model_parallel.balanced_ring_attention,
}
WRONG = {
    "column_row": (mutant(model_parallel, "ParallelMLP", ONCE), "losses: in step 1, rank 0 has"),
    "sequence": (
        mutant(model_parallel, "SequenceParallelMLP", ("F.apply(self.b2)", "self.b2")),
        "losses: in step 1, rank 0 has",
    ),
    "cross_entropy": (mutant(model_parallel, "cross_entropy", UNSTABLE), "losses: in step 2, rank 0 has"),
    "two_stages": (GPIPE, "order: in step 0, rank 0 of 2 computes F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5 with 6 live"),
    "four_stages": (STOPS, "hangs: rank 0 waits in recv from rank 1 in schedule of step 0, at: dist.recv(x, source)"),
    "ring_attention": (gathers_keys, "results: rank 0 has a gradient of step 0: k that differs by"),
    "balanced": (ALL_PAIRS, "computation: in forward of step 0, the matrix products of rank 0 take"),
}
MORE = [
    ("column_row", WholeMLP, "bytes sent: in step 0, rank 0 sends 0 B"),
    ("column_row", Differentiates, "no finished API: rank 0 calls torch.distributed.nn.functional.all_reduce"),
    (
        "column_row",
        mutant(model_parallel, "ParallelMLP", (".clone())", ")")),
        "memory: after the construction, rank 0 has",
    ),
    ("column_row", mutant(model_parallel, "ParallelMLP", TWICE), "losses: in step 1, rank 0 has"),
    ("cross_entropy", gathers_logits, "bytes sent: in step 0, rank 0 sends"),
    ("ring_attention", gathers_with_operators, "no finished API: rank 0 calls torch.ops._c10d_functional.all_gather"),
    ("ring_attention", BACKWARDS, "neighbours: in forward of step 0, rank 0 calls send with rank 3, expected rank 1"),
    ("ring_attention", KEEPS_ALL, "memory: after forward of step 0, rank 0 has"),
]
