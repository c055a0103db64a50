"""Trials of ZeRO: the network of `ddp`, trained with Adam; the answer is the optimizer, and communicates by itself."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.ddp import LAYERS, SAMPLES, STEPS, WIDTH, loss_of, network, reference
from labkit.course.build.ranks.recorder import Recorder


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
