"""The trial of throughput: the class `Training` of a script, with a text, micro-batches and parameters that were drawn.

The trial, not the script, decides the number of steps and what they train on. A rank is given its own text only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import Expected, Given, loaded
from labkit.course.build.starters.slow_training import (
    HEADS,
    LAYERS,
    MAX_NORM,
    MICRO_BATCHES,
    MOMENTUM,
    POSITIONS,
    RATE,
    SAMPLES,
    Model,
)

STEPS = 2  # the probe of an ordinary run profiles a later one, which takes long for this many operators
_TEXT = 4096  # bytes of each rank
_LOADED = ("inputs", "targets")

# ---- what is drawn at grading, and what a single device makes of it


def draw(trial: str, ranks: int) -> list[Given]:
    """What each rank is given: `text`, its bytes; `starts`, (steps, micro-batches, samples), where samples begin in it;
    and the parameters, which are equal on all ranks."""
    parameters = Model().state_dict()
    return [
        {
            "text": torch.randint(256, (_TEXT,), dtype=torch.uint8),
            "starts": torch.randint(_TEXT - POSITIONS, (STEPS, MICRO_BATCHES, SAMPLES)),
            **parameters,
        }
        for _ in range(ranks)
    ]


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """Trains on the micro-batches of all ranks on this device: for each rank its losses and the final parameters."""
    model = loaded(Model(), given[0])
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    expected = [Expected() for _ in given]
    for mine, rank in zip(given, expected):
        batches = [_batch(mine, step, index) for step in range(STEPS) for index in range(MICRO_BATCHES)]
        for name, tensors in zip(_LOADED, zip(*batches)):
            rank.expects(name, torch.stack(tensors))
    for step in range(STEPS):
        optimizer.zero_grad()
        for mine, rank in zip(given, expected):
            loss = torch.stack([_loss(model, mine, step, index) for index in range(MICRO_BATCHES)]).mean()
            (loss / len(given)).backward()
            rank.losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    for rank in expected:
        rank.expects_parameters(model.named_parameters(), start)
    return expected


def _batch(given: Given, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.stack([given["text"][start : start + POSITIONS + 1] for start in given["starts"][step, index]])
    return tokens[:, :-1].long(), tokens[:, 1:].long()


def _loss(model: nn.Module, given: Given, step: int, index: int) -> torch.Tensor:
    inputs, targets = _batch(given, step, index)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# ---- what runs on the ranks


def _loaded(batch: Any) -> tuple[torch.Tensor, ...]:
    """A copy of what `load` returned, which must be all that there is to load; `ValueError` if it is no micro-batch."""
    shapes = [list(tensor.shape) for tensor in batch if isinstance(tensor, torch.Tensor)]
    if shapes != 2 * [[SAMPLES, POSITIONS]]:
        raise ValueError(
            f"load must return inputs and targets, tensors of ({SAMPLES}, {POSITIONS}), got {shapes or batch}"
        )
    return tuple(tensor.clone() for tensor in batch)


def train(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(text, parameters)` is created before the first step; in each step `load(starts)` is called for each
    micro-batch in the phase "data", and `step(batches)` in the phase "step"."""
    text, starts, figures = bytes(given["text"].tolist()), given["starts"].tolist(), recorder.record.figures
    parameters = {name: tensor for name, tensor in given.items() if name not in ("text", "starts")}
    figures["parameters"] = len(parameters)
    figures["gradients"] = sum(parameter.nbytes for parameter in parameters.values())
    figures["micro_batches"] = MICRO_BATCHES
    figures["scores"] = LAYERS * MICRO_BATCHES * SAMPLES * HEADS * POSITIONS**2  # elements of attention's scores
    training, taken = answer(text, parameters), []
    for step in range(STEPS):
        with recorder.during("data", step):
            batches = [training.load(some) for some in starts[step]]
        taken += [_loaded(batch) for batch in batches]
        with recorder.during("step", step):
            loss = training.step(batches)
        recorder.record.losses.append(float(loss))
        del batches
    for name, tensors in zip(_LOADED, zip(*taken)):
        recorder.results[name] = torch.stack(tensors)
    recorder.keep_parameters(training.parameters().items())
