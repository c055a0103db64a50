"""Trials of data parallelism: a network of `LAYERS` linear layers, trained with SGD, each rank with its own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder

WIDTH, LAYERS, SAMPLES, RATE = 128, 6, 8, 1.0
STEPS = 4  # of the reference, then of the answer: the probe profiles the 8th step, the last one of the answer
BUCKET = 2 * 4 * WIDTH * (WIDTH + 1)  # bytes: the parameters of two layers
_ACCUMULATED_FROM = 2  # the first step that has two micro-batches, in the trial of buckets


def network(seed: int) -> nn.Sequential:
    """The network before the first step."""
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def samples(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a rank in a step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, generator=generator)
    return inputs, targets


def loss_of(model: Callable[[Tensor], Tensor], step: int, rank: int, part: slice = slice(None)) -> Tensor:
    """The mean squared error of a rank's samples, or of a part of them."""
    inputs, targets = samples(step, rank)
    return nn.functional.mse_loss(model(inputs[part]), targets[part])


def reference(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, steps: int = STEPS) -> Iterator[float]:
    """Trains on the samples of all ranks on this device, and gives the loss of this rank's samples in each step."""
    for step in range(steps):
        optimizer.zero_grad()
        parts = [loss_of(model, step, rank) for rank in range(ranks)]
        (sum(parts) / ranks).backward()
        optimizer.step()
        yield parts[dist.get_rank()].item()


def naive(answer: Any, recorder: Recorder) -> None:
    """`answer(model)` is called after each backward."""
    model = _begin(recorder, seed=0)
    _train(model, recorder, finish=lambda: answer(model))


def hooks(answer: Any, recorder: Recorder) -> None:
    """`answer(model)` is created before the first step, with other parameters on every rank; `finish()` is called
    after each backward."""
    model = _begin(recorder, seed=dist.get_rank())
    _train(model, recorder, finish=answer(model).finish)


def buckets(answer: Any, recorder: Recorder) -> None:
    """As `hooks`, with `BUCKET` bytes; later steps have two micro-batches, the first of them inside of `no_sync()`."""
    model = _begin(recorder, seed=dist.get_rank())
    recorder.record.figures["bucket"] = BUCKET
    wrapped = answer(model, BUCKET)
    _train(model, recorder, finish=wrapped.finish, no_sync=wrapped.no_sync)


def _begin(recorder: Recorder, seed: int) -> nn.Sequential:
    alone = network(seed=0)
    rate = torch.optim.SGD(alone.parameters(), RATE)
    recorder.record.expected = list(reference(alone, rate, dist.get_world_size()))
    model = network(seed)
    recorder.record.figures["gradients"] = sum(parameter.nbytes for parameter in model.parameters())
    recorder.record.events.clear()  # those of the reference
    return model


def _train(
    model: nn.Module,
    recorder: Recorder,
    finish: Callable[[], Any],
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    optimizer, rank = torch.optim.SGD(model.parameters(), RATE), dist.get_rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        first, last = torch.zeros(()), slice(None)
        if no_sync and step >= _ACCUMULATED_FROM:
            with recorder.during("accumulation", step), no_sync():
                first, last = loss_of(model, step, rank, slice(SAMPLES // 2)) / 2, slice(SAMPLES // 2, None)
                first.backward()
        with recorder.during("forward", step):
            loss = loss_of(model, step, rank, last) * (1 if last == slice(None) else 0.5)
        with recorder.during("backward", step):
            loss.backward()
        with recorder.during("finish", step):
            finish()
        with recorder.during("update", step):
            optimizer.step()
        recorder.record.losses.append((first + loss).item())


# ---- ZeRO and FSDP: the same network, trained with Adam; the answer communicates by itself


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer. Weight decay makes it sensitive to the scale of the gradients, as Adam alone is not."""
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


def begin(recorder: Recorder) -> nn.Sequential:
    """The network of this rank, and the losses of the reference in the record."""
    alone = network(seed=0)
    recorder.record.expected = list(reference(alone, adam(alone.parameters()), dist.get_world_size()))
    recorder.record.events.clear()  # those of the reference
    model = network(seed=0)
    recorder.record.figures["parameters"] = sum(parameter.nbytes for parameter in model.parameters())
    recorder.record.figures["largest"] = max(parameter.nbytes for parameter in model.parameters())
    return model


def zero(answer: Any, recorder: Recorder) -> None:
    """`answer(model, make_optimizer)` is created before the first step; `step()` is called after each backward."""
    model = begin(recorder)
    optimizer = answer(model, adam)
    for step in range(STEPS):
        model.zero_grad()
        with recorder.during("forward", step):
            loss = loss_of(model, step, dist.get_rank())
        before = recorder.live_at_rest()
        with recorder.during("backward", step):
            peak, _ = recorder.peak_since(loss.backward)
        recorder.remember("at the peak of backward", peak - before)
        recorder.remember("after backward", recorder.live_at_rest() - before)
        with recorder.during("update", step):
            optimizer.step()
        recorder.record.losses.append(loss.item())
        del loss
    model.zero_grad()
    recorder.remember("between two steps", recorder.live_at_rest())


def fsdp(answer: Any, recorder: Recorder) -> None:
    """`answer(layer)` replaces each layer that has parameters; the optimizer updates the parameters of the new ones."""
    model = begin(recorder)
    for index, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            recorder.record.figures["unit"] = sum(parameter.nbytes for parameter in layer.parameters())
            model[index] = answer(layer)
    del layer
    recorder.record.figures["activations"] = 3 * LAYERS * SAMPLES * WIDTH * 4  # input, product and output of each layer
    optimizer = adam(model.parameters())
    recorder.remember("after the construction", recorder.live_at_rest())
    for step in range(STEPS):
        optimizer.zero_grad()
        before = recorder.live_at_rest()
        with recorder.during("forward", step):
            peak, loss = recorder.peak_since(partial(loss_of, model, step, dist.get_rank()))
        recorder.remember("at the peak of forward", peak - before)
        recorder.remember("after forward", recorder.live_at_rest() - before)
        with recorder.during("backward", step):
            recorder.remember("at the peak of backward", recorder.peak_since(loss.backward)[0] - before)
        with recorder.during("update", step):
            optimizer.step()
        recorder.record.losses.append(loss.item())
        del loss
    optimizer.zero_grad()
    recorder.remember("between two steps", recorder.live_at_rest())
