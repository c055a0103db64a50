"""Trials of ring attention: causal attention over a sequence whose positions are split over the ranks.

A rank is given its own positions only: the keys and values of the others reach it by communication or not at all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import Expected, Given

HEADS, CHUNK, DIMENSION, STEPS = 2, 16, 32, 2
MISSES = "the output lacks one block of keys: the ring makes one hop too few, or starts with the wrong source rank"
NOT_CAUSAL = "the output uses later positions: mask them, also inside the block on the diagonal"


def _chunks(trial: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """The chunks of positions of a rank, and how many there are."""
    return ([rank], ranks) if trial == "contiguous" else ([rank, 2 * ranks - 1 - rank], 2 * ranks)


def _own(whole: Tensor, mine: list[int], chunks: int) -> Tensor:
    return torch.cat([whole.chunk(chunks, dim=1)[chunk] for chunk in mine], dim=1)


def draw(trial: str, ranks: int) -> list[Given]:
    """q, k, v and the targets of each rank's positions: (steps, heads, positions, dimension) each."""
    _, chunks = _chunks(trial, 0, ranks)
    whole = torch.randn(4, STEPS, HEADS, chunks * CHUNK, DIMENSION)
    given = []
    for rank in range(ranks):
        mine, _ = _chunks(trial, rank, ranks)
        parts = [torch.stack([_own(step, mine, chunks) for step in tensor]) for tensor in whole]
        given.append(dict(zip(("q", "k", "v", "target"), parts)))
    return given


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """The losses, outputs and gradients of each rank's positions, in the whole sequence on a single device."""
    ranks, expected = len(given), [Expected() for _ in given]
    places = [_chunks(trial, rank, ranks) for rank in range(ranks)]
    chunks = places[0][1]
    order = [chunk for mine, _ in places for chunk in mine]

    def whole(name: str, step: int) -> Tensor:
        parts = [part for rank in given for part in rank[name][step].chunk(chunks // ranks, dim=1)]
        return torch.cat([parts[order.index(chunk)] for chunk in range(chunks)], dim=1)

    for step in range(STEPS):
        q, k, v = (whole(name, step).requires_grad_() for name in "qkv")
        target = whole("target", step)
        out = _attention(q, k, v)
        gradients = torch.autograd.grad(nn.functional.mse_loss(out, target), (q, k, v))
        for (mine, _), rank in zip(places, expected):
            rank.losses.append(nn.functional.mse_loss(_own(out, mine, chunks), _own(target, mine, chunks)).item())
            rank.expects(f"output of step {step}", _own(out, mine, chunks))
            for name, gradient in zip("qkv", gradients):
                rank.expects(f"gradient of step {step}: {name}", _own(gradient, mine, chunks))
        if step == 0:
            _mistakes_of_masks(places, expected, (q.detach(), k.detach(), v.detach()), chunks)
    return expected


def _mistakes_of_masks(
    places: list[tuple[list[int], int]], expected: list[Expected], qkv: tuple[Tensor, Tensor, Tensor], chunks: int
) -> None:
    """The outputs of step 0 for wrong masks: without the block that arrives last, without any mask, and others."""
    q, k, v = qkv
    ranks, name = len(places), "output of step 0"
    owner = [next(rank for rank, (mine, _) in enumerate(places) if chunk in mine) for chunk in range(chunks)]
    for rank, (mine, _) in enumerate(places):
        lacks = torch.tensor([owner[position // CHUNK] == (rank + 1) % ranks for position in range(k.shape[1])])
        expected[rank].mistake(MISSES, name, _own(_attention(q, k, v, without=lacks), mine, chunks))
        expected[rank].mistake(NOT_CAUSAL, name, _own(_attention(q, k, v, causal=False), mine, chunks))


# ---- what runs on the ranks


def contiguous(answer: Any, recorder: Recorder, given: Given) -> None:
    """Rank r has the r-th of n chunks of positions."""
    _try(answer, recorder, given, "contiguous")


def balanced(answer: Any, recorder: Recorder, given: Given) -> None:
    """Rank r has the r-th and the r-th from the end of 2n chunks of positions."""
    _try(answer, recorder, given, "balanced")


def _try(answer: Any, recorder: Recorder, given: Given, trial: str) -> None:
    """`answer(q, k, v)` with this rank's positions, (heads, positions, dimension) each."""
    record, figures, ranks = recorder.record, recorder.record.figures, dist.get_world_size()
    mine, chunks = _chunks(trial, dist.get_rank(), ranks)
    block = HEADS * CHUNK * len(mine) * DIMENSION * 4
    figures |= {"block": 2 * block, "out": block}
    figures["flops"] = 4 * HEADS * CHUNK * CHUNK * DIMENSION  # of one chunk of queries and one of keys, in forward
    for step in range(STEPS):
        parts = [given[name][step].clone().requires_grad_() for name in "qkv"]
        before = recorder.live_at_rest()
        with recorder.during("forward", step):
            out = answer(*parts)
        recorder.remember("after forward", recorder.live_at_rest() - before)
        errors = (out - given["target"][step]) ** 2
        record.losses.append(errors.mean().item())
        recorder.results[f"output of step {step}"] = out.detach()
        with recorder.during("backward", step):
            (errors.sum() / (HEADS * chunks * CHUNK * DIMENSION)).backward()
        recorder.keep_gradients(f"step {step}", zip("qkv", parts))


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, without: Tensor | None = None) -> Tensor:
    """Attention on a single device; `without` is true for the positions of keys that are left out."""
    scores = q @ k.mT / math.sqrt(DIMENSION)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if without is not None:
        scores = scores.masked_fill(without, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v
