"""Trials of tensor parallelism: an MLP split by columns and rows, with a replicated layer before it, and a
cross-entropy over a split vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import OUTSIDE

TOKENS, WIDTH, HIDDEN, STEPS, RATE = 16, 32, 128, 4, 0.5
VOCABULARY = 512


def column_row(answer: Any, recorder: Recorder) -> None:
    """`answer(w1, b1, w2, b2)` gets the whole parameters; every rank has all tokens, before and after it."""
    _train(answer, recorder, part=lambda tokens: tokens, combine=lambda gradient: None)


def sequence(answer: Any, recorder: Recorder) -> None:
    """As `column_row`, but every rank has its own tokens before and after it."""
    _train(answer, recorder, lambda tokens: tokens.chunk(dist.get_world_size())[dist.get_rank()], dist.all_reduce)


def cross_entropy(answer: Any, recorder: Recorder) -> None:
    """`answer(logits, targets)` gets the logits of this rank's part of the vocabulary; one step per scale of logits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    figures = recorder.record.figures | {"token": TOKENS * 4, "gradients": []}
    recorder.record.figures = figures
    for step, scale in enumerate((1.0, 10.0, 1_000.0)):
        generator = torch.Generator().manual_seed(step)
        whole = (scale * torch.randn(TOKENS, VOCABULARY, generator=generator)).requires_grad_()
        targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        loss = nn.functional.cross_entropy(whole, targets)
        (expected,) = torch.autograd.grad(loss, whole)
        recorder.record.expected.append(loss.item())
        logits = whole.detach().chunk(ranks, dim=1)[rank].clone().requires_grad_()
        with recorder.during("forward", step):
            found = answer(logits, targets)
        recorder.record.losses.append(float(found))
        with recorder.during("backward", step):
            found.backward()
        gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
        difference = (gradient - expected.chunk(ranks, dim=1)[rank]).abs().max().item()
        figures["gradients"].append({"logits": difference})


class Whole(nn.Module):
    """The MLP on a single device."""

    def __init__(self, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = map(nn.Parameter, (w1, b1, w2, b2))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) to (tokens, width)."""
        return torch.relu(x @ self.w1.T + self.b1) @ self.w2.T + self.b2


def _parameters() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))
    return [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]


def _train(answer: Any, recorder: Recorder, part: Callable[[Tensor], Tensor], combine: Callable[[Tensor], Any]) -> None:
    """Trains a replicated layer and the answer's MLP on this rank's part of the tokens; `combine` sums the gradients of
    the replicated layer over the ranks, if each has other tokens."""
    record, figures = recorder.record, recorder.record.figures
    alone = _Model(Whole(*_parameters()))
    errors = [alone.train(recorder, step, lambda tokens: tokens, lambda gradient: None) for step in range(STEPS)]
    record.expected = [part(error).mean().item() for error in errors]
    replicated = 2 * 2 * TOKENS * WIDTH * WIDTH  # operations of the layer before the MLP, in forward and backward
    whole = sum(event.flops for event in record.events) / STEPS
    figures["flops"] = replicated + (whole - replicated) / dist.get_world_size()
    record.events.clear()  # those of the reference
    figures["message"], figures["bias"] = TOKENS * WIDTH * 4, WIDTH * 4
    figures["parameters"] = sum(parameter.nbytes for parameter in alone.mlp.parameters())
    before = recorder.live()
    mlp = answer(*_parameters())
    recorder.remember("after the construction", recorder.live() - before)
    model = _Model(mlp)
    record.losses = [model.train(recorder, step, part, combine).mean().item() for step in range(STEPS)]


class _Model:
    """A replicated linear layer, then the MLP, with SGD."""

    def __init__(self, mlp: nn.Module):
        torch.manual_seed(1)
        self.before, self.mlp = nn.Linear(WIDTH, WIDTH), mlp
        self.optimizer = torch.optim.SGD([*self.before.parameters(), *mlp.parameters()], RATE)

    def train(
        self, recorder: Recorder, step: int, part: Callable[[Tensor], Tensor], combine: Callable[[Tensor], Any]
    ) -> Tensor:
        """One step; the squared errors, in the shape of the output."""
        inputs, targets = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        with recorder.during("forward", step):
            errors = (self.mlp(self.before(part(inputs))) - part(targets)) ** 2
        with recorder.during("backward", step):
            (errors.sum() / targets.numel()).backward()
        with recorder.during("update", OUTSIDE):
            for parameter in self.before.parameters():
                combine(parameter.grad)
        self.optimizer.step()
        return errors.detach()
