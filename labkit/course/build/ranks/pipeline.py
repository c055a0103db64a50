"""The trial of a pipeline: one stage per rank, trained on micro-batches; the order of forwards and backwards counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import BACKWARD, FORWARD, OUTSIDE

COUNT, SAMPLES, WIDTH, STEPS, RATE = 6, 4, 32, 3, 1.0


class Stage(nn.Module):
    """One stage of the network, which records when a micro-batch passes forward and backward."""

    def __init__(self, number: int, recorder: Recorder | None = None):
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self._recorder, self._count = recorder, 0

    def forward(self, x: Tensor) -> Tensor:
        """(samples, width) to (samples, width)."""
        recorder, number = self._recorder, self._count % COUNT
        y = self.layers(x)
        if recorder is not None:
            self._count += 1
            recorder.note(FORWARD, of=number)
            y.register_hook(lambda gradient: recorder.note(BACKWARD, of=number))
        return y


def schedule(answer: Any, recorder: Recorder) -> None:
    """`answer(stage, count, shape, inputs, loss_of)` is called in each step."""
    rank, ranks, record = dist.get_rank(), dist.get_world_size(), recorder.record
    record.expected = _reference(ranks)
    record.events.clear()  # those of the reference
    record.figures |= {"count": COUNT, "activation": SAMPLES * WIDTH * 4}
    stage = Stage(rank, recorder)
    optimizer = torch.optim.SGD(stage.parameters(), RATE)
    for step in range(STEPS):
        inputs, targets = _samples(step)
        losses: list[Tensor] = []

        def loss_of(output: Tensor, number: int, targets: Tensor = targets, losses: list[Tensor] = losses) -> Tensor:
            losses.append(nn.functional.mse_loss(output, targets[number]) / COUNT)
            return losses[-1]

        optimizer.zero_grad()
        with recorder.during("schedule", step):
            answer(
                stage,
                COUNT,
                (SAMPLES, WIDTH),
                list(inputs) if rank == 0 else None,
                loss_of if rank == ranks - 1 else None,
            )
        optimizer.step()
        with recorder.during("schedule", OUTSIDE):
            total = torch.tensor([loss.item() for loss in losses]).sum()
            dist.broadcast(total, src=ranks - 1)
        record.losses.append(total.item())


def _samples(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (micro-batches, samples, width)."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, COUNT, SAMPLES, WIDTH, generator=generator)
    return inputs, targets


def _reference(ranks: int) -> list[float]:
    """The losses of all stages on a single device, without micro-batches."""
    model = nn.Sequential(*(Stage(number) for number in range(ranks)))
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for step in range(STEPS):
        inputs, targets = _samples(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
