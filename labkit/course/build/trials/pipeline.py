"""The trial of a pipeline: one stage per rank, trained on micro-batches; the order of forwards and backwards counts.

Only the first rank is given the inputs, and only the last one the targets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import BACKWARD, FORWARD, OUTSIDE, Expected, Given, loaded

COUNT, SAMPLES, WIDTH, STEPS, RATE = 6, 4, 32, 3, 1.0
LAST_ONLY = "the gradients of {names} are those of the last micro-batch alone: they must add up over all of them"
MEAN = "the gradients of {names} are divided by the number of micro-batches twice: loss_of divides already"


def _stage() -> nn.Sequential:
    """One stage of the network: (samples, width) to (samples, width)."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def draw(trial: str, ranks: int) -> list[Given]:
    """The parameters of each rank's stage; inputs and targets, (steps, micro-batches, samples, width)."""
    inputs, targets = torch.randn(2, STEPS, COUNT, SAMPLES, WIDTH)
    given: list[Given] = [dict(_stage().state_dict()) for _ in range(ranks)]
    given[0]["inputs"], given[-1]["targets"] = inputs, targets
    return given


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """The losses of all stages on a single device, the gradients of the first step and the final parameters."""
    stages = [loaded(_stage(), rank) for rank in given]
    model, expected = nn.Sequential(*stages), [Expected() for _ in given]
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        inputs, targets = given[0]["inputs"][step], given[-1]["targets"][step]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        last = torch.autograd.grad(nn.functional.mse_loss(model(inputs[-1]), targets[-1]) / COUNT, model.parameters())
        loss.backward()
        of_last = iter(last)
        for rank, stage in zip(expected, stages):
            rank.losses.append(loss.item())
            for name, parameter in stage.named_parameters():
                alone, result = next(of_last), f"gradient of step 0: {name}"
                if step == 0:
                    rank.expects(result, parameter.grad)
                    rank.mistake(LAST_ONLY, result, alone)
                    rank.mistake(MEAN, result, parameter.grad / COUNT)
        optimizer.step()
    for rank, stage, before in zip(expected, stages, given):
        rank.expects_parameters(stage.named_parameters(), before)
    return expected


# ---- what runs on the ranks


class _Order:
    """Notes when a micro-batch passes a stage: its forward with the first product of the stage, its backward with the
    gradient of the first weight, which has the same input. The answer holds no reference to this object."""

    def __init__(self, recorder: Recorder, stage: nn.Sequential):
        self._recorder, self._weight = recorder, stage[0].weight.data_ptr()
        self._inputs: dict[int, int] = {}  # by the address of a micro-batch's input, its number
        self._count = 0
        recorder.product = self._product

    def begin(self) -> None:
        """A step begins."""
        self._inputs.clear()
        self._count = 0

    def _product(self, name: str, args: Any) -> None:
        if name == "addmm" and args[2].data_ptr() == self._weight:
            self._inputs[args[1].data_ptr()] = self._count
            self._recorder.note(FORWARD, of=self._count)
            self._count += 1
        elif name == "mm" and args[1].data_ptr() in self._inputs:
            self._recorder.note(BACKWARD, of=self._inputs.pop(args[1].data_ptr()))


def schedule(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(stage, count, shape, inputs, loss_of)` is called in each step."""
    rank, ranks, record = dist.get_rank(), dist.get_world_size(), recorder.record
    record.figures |= {"count": COUNT, "activation": SAMPLES * WIDTH * 4}
    record.figures["product"] = 2 * COUNT * SAMPLES * WIDTH * WIDTH  # operations of one layer in forward
    stage = loaded(_stage(), given)
    order = _Order(recorder, stage)
    optimizer = torch.optim.SGD(stage.parameters(), RATE)
    for step in range(STEPS):
        losses: list[Tensor] = []

        def loss_of(output: Tensor, number: int, step: int = step, losses: list[Tensor] = losses) -> Tensor:
            losses.append(nn.functional.mse_loss(output, given["targets"][step][number]) / COUNT)
            return losses[-1]

        optimizer.zero_grad()
        order.begin()
        with recorder.during("schedule", step):
            answer(
                stage,
                COUNT,
                (SAMPLES, WIDTH),
                [batch.clone() for batch in given["inputs"][step]] if rank == 0 else None,
                loss_of if rank == ranks - 1 else None,
            )
        if step == 0:
            recorder.keep_gradients("step 0", stage.named_parameters())
        optimizer.step()
        with recorder.during("schedule", OUTSIDE):
            total = torch.tensor([loss.item() for loss in losses]).sum()
            dist.broadcast(total, src=ranks - 1)
        record.losses.append(total.item())
    recorder.keep_parameters(stage.named_parameters())
