"""Trials of ring attention: causal attention over a sequence whose positions are split over the ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder

HEADS, CHUNK, DIMENSION, STEPS = 2, 16, 32, 2


def contiguous(answer: Any, recorder: Recorder) -> None:
    """Rank r has the r-th of n chunks of positions."""
    _try(answer, recorder, [dist.get_rank()], dist.get_world_size())


def balanced(answer: Any, recorder: Recorder) -> None:
    """Rank r has the r-th and the r-th from the end of 2n chunks of positions."""
    rank, chunks = dist.get_rank(), 2 * dist.get_world_size()
    _try(answer, recorder, [rank, chunks - 1 - rank], chunks)


def _try(answer: Any, recorder: Recorder, mine: list[int], chunks: int) -> None:
    """`answer(q, k, v)` with this rank's positions, (heads, positions, dimension) each; the losses are those of these
    positions, and the gradients are compared in each step."""
    record, figures = recorder.record, recorder.record.figures
    block = HEADS * CHUNK * len(mine) * DIMENSION * 4
    figures |= {"block": 2 * block, "out": block, "gradients": []}
    figures["flops"] = 4 * HEADS * CHUNK * CHUNK * DIMENSION  # of one chunk of queries and one of keys, in forward

    def own(whole: Tensor) -> Tensor:
        return torch.cat([whole.chunk(chunks, dim=1)[chunk] for chunk in mine], dim=1)

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        *whole, target = torch.randn(4, HEADS, chunks * CHUNK, DIMENSION, generator=generator)
        whole = [tensor.requires_grad_() for tensor in whole]
        loss = nn.functional.mse_loss(own(_attention(*whole)), own(target))
        record.expected.append(loss.item())
        expected = torch.autograd.grad(nn.functional.mse_loss(_attention(*whole), target), whole)
        parts = [own(tensor.detach()).requires_grad_() for tensor in whole]
        del loss
        before = recorder.live_at_rest()
        with recorder.during("forward", step):
            out = answer(*parts)
        recorder.remember("after forward", recorder.live_at_rest() - before)
        errors = (out - own(target)) ** 2
        record.losses.append(errors.mean().item())
        with recorder.during("backward", step):
            (errors.sum() / target.numel()).backward()
        zero = torch.zeros_like(parts[0])
        figures["gradients"].append(
            {
                name: ((zero if part.grad is None else part.grad) - own(want)).abs().max().item()
                for name, part, want in zip("qkv", parts, expected)
            }
        )


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on a single device."""
    scores = q @ k.mT / math.sqrt(DIMENSION)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v
