"""Trials of data parallelism: a network of `LAYERS` linear layers, trained with SGD, each rank with its own samples.

A rank is given its samples only: the gradients of the others reach it by communication or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import Expected, Given, loaded

WIDTH, LAYERS, SAMPLES, RATE = 512, 6, 8, 1.0
STEPS = 4
BUCKET = 2 * 4 * WIDTH * (WIDTH + 1)  # bytes: the parameters of two layers
_ACCUMULATED_FROM = 2  # the first step that has two micro-batches, in the trial of buckets
_LAST = STEPS - 1

# ---- what is drawn at grading, and what a single device makes of it


def network() -> nn.Sequential:
    """The network, with any parameters."""
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def draw(trial: str, ranks: int) -> list[Given]:
    """What each rank is given: `inputs` and `targets`, (steps + 1, samples, width), of which the last are for the
    comparison of the outputs; and the parameters, which differ between the ranks if the answer must make them equal."""
    models = [network() for _ in range(ranks)]
    given = []
    for rank in range(ranks):
        model = models[rank if trial in ("hooks", "buckets") else 0]
        inputs, targets = torch.randn(2, STEPS + 1, SAMPLES, WIDTH)
        given.append({"inputs": inputs, "targets": targets, **model.state_dict()})
    return given


def loss_of(model: Callable[[Tensor], Tensor], given: Given, step: int, part: slice = slice(None)) -> Tensor:
    """The mean squared error of a rank's samples, or of a part of them."""
    return nn.functional.mse_loss(model(given["inputs"][step][part]), given["targets"][step][part])


_WITH_SGD = ("naive", "hooks", "buckets")
_WHOLE_PARAMETERS = ("naive", "hooks", "buckets", "zero")  # trials after which a rank has all of each parameter


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """Trains on the samples of all ranks on this device: for each rank losses, gradients and final parameters."""
    model, ranks = loaded(network(), given[0]), len(given)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), RATE) if trial in _WITH_SGD else adam(model.parameters())
    expected = [Expected() for _ in given]
    for step in range(STEPS):
        own = [_own_gradients(model, mine, step, rank) for mine, rank in zip(given, expected)]
        for parameter, *parts in zip(model.parameters(), *own):
            parameter.grad = sum(parts) / ranks
        if step == 0 and trial == "zero":
            _mistakes_of_updates(model, own, expected)
        for rank, gradients in zip(expected, own) if trial in _WITH_SGD else ():
            _gradients_of(step, model, gradients, rank, ranks)
        optimizer.step()
        for rank in expected if step == 0 and trial == "zero" else ():
            for name, parameter in model.named_parameters():
                rank.expects(f"first {name}", sample(parameter), sample(start[name]))
    for mine, rank in zip(given, expected):
        if trial in _WHOLE_PARAMETERS:
            rank.expects_parameters(model.named_parameters(), start)
        rank.expects("output", model(mine["inputs"][STEPS]))
    return expected


def _own_gradients(model: nn.Module, given: Given, step: int, expected: Expected) -> list[Tensor]:
    """The gradients of one rank's samples, whose loss and squares are noted."""
    model.zero_grad()
    loss = loss_of(model, given, step)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected.losses.append(loss.item())
    expected.squares.append(sum(float(gradient.double().square().sum()) for gradient in gradients))
    return list(gradients)


SUM = "the gradients of {names} are the sum over the ranks, not the mean: divide by the number of ranks"
TWICE = "the gradients of {names} are divided by the number of ranks twice"
OWN = (
    "the gradients of {names} are those of the rank's own samples: no collective reduces them (is a bucket left over?)"
)
STALE = "the parameters {names} change in the rank's own shard only: gather the shards of all ranks after the update"
SWAPPED = "the shards of {names} are in the wrong places: rank r has the r-th shard of each parameter"


def _gradients_of(step: int, model: nn.Module, own: list[Tensor], expected: Expected, ranks: int) -> None:
    for (name, parameter), gradient in zip(model.named_parameters(), own) if step in (0, _LAST) else ():
        expected.expects(f"gradient of step {step}: {name}", parameter.grad)
        if step == 0:
            for words, wrong in ((SUM, parameter.grad * ranks), (TWICE, parameter.grad / ranks), (OWN, gradient)):
                expected.mistake(words, f"gradient of step 0: {name}", wrong)


def _mistakes_of_updates(model: nn.Module, own: list[list[Tensor]], expected: list[Expected]) -> None:
    """The parameters after the first update, for common mistakes with the gradients and the shards."""
    ranks = len(own)

    def updated(parameters: Iterable[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        for copy, gradient in zip(copies, gradients):
            copy.grad = gradient
        adam(copies).step()
        return [copy.detach() for copy in copies]

    before = [parameter.detach() for parameter in model.parameters()]
    mean = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    right, sums = updated(before, mean), updated(before, [gradient * ranks for gradient in mean])
    next_shard = [torch.cat([*tensor.chunk(ranks)[1:], tensor.chunk(ranks)[0]]) for tensor in before]
    swapped = updated(next_shard, mean)
    locally = [updated(before, gradients) for gradients in own]
    for rank, mine in enumerate(expected):
        for index, (name, _) in enumerate(model.named_parameters()):
            stale = list(before[index].chunk(ranks))
            stale[rank] = right[index].chunk(ranks)[rank]
            chunks = [locally[source][index].chunk(ranks)[source] for source in range(ranks)]
            mine.mistake(SUM, f"first {name}", sample(sums[index]))
            mine.mistake(OWN, f"first {name}", sample(torch.cat(chunks)))
            mine.mistake(STALE, f"first {name}", sample(torch.cat(stale)))
            mine.mistake(SWAPPED, f"first {name}", sample(swapped[index]))


def sample(tensor: Tensor) -> Tensor:
    """A copy of some elements, the same ones in each of the ranks' shards."""
    flat = tensor.detach().flatten()
    return flat[:: 1 if len(flat) <= WIDTH else 256].clone()


# ---- what runs on the ranks


def naive(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(model)` is called after each backward."""
    model = _begin(recorder, given)
    _train(model, recorder, given, finish=lambda: answer(model))


def hooks(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(model)` is created before the first step, with other parameters on every rank; `finish()` is called
    after each backward."""
    model = _begin(recorder, given)
    _train(model, recorder, given, finish=answer(model).finish)


def buckets(answer: Any, recorder: Recorder, given: Given) -> None:
    """As `hooks`, with `BUCKET` bytes; later steps have two micro-batches, the first of them inside of `no_sync()`."""
    model = _begin(recorder, given)
    recorder.record.figures["bucket"] = BUCKET
    wrapped = answer(model, BUCKET)
    _train(model, recorder, given, finish=wrapped.finish, no_sync=wrapped.no_sync)


def _begin(recorder: Recorder, given: Given) -> nn.Sequential:
    """The network of this rank. The parameters that it was given are freed."""
    model, figures = loaded(network(), given), recorder.record.figures
    for name in model.state_dict():
        del given[name]
    recorder.ignore(given["inputs"], given["targets"])
    figures["parameters"] = figures["gradients"] = sum(parameter.nbytes for parameter in model.parameters())
    figures["largest"] = max(parameter.nbytes for parameter in model.parameters())
    figures["product"] = 2 * SAMPLES * WIDTH * WIDTH * LAYERS  # operations of the layers in forward
    figures["first"] = 2 * SAMPLES * WIDTH * WIDTH  # the gradient of the network's input, which nobody needs
    return model


def _train(
    model: nn.Module,
    recorder: Recorder,
    given: Given,
    finish: Callable[[], Any],
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        first, last = torch.zeros(()), slice(None)
        if no_sync and step >= _ACCUMULATED_FROM:
            with recorder.during("accumulation", step), no_sync():
                first, last = loss_of(model, given, step, slice(SAMPLES // 2)) / 2, slice(SAMPLES // 2, None)
                first.backward()
        with recorder.during("forward", step):
            loss = loss_of(model, given, step, last) * (1 if last == slice(None) else 0.5)
        with recorder.during("backward", step):
            loss.backward()
        with recorder.during("finish", step):
            finish()
        if step in (0, _LAST):
            recorder.keep_gradients(f"step {step}", model.named_parameters())
        with recorder.during("update", step):
            optimizer.step()
        recorder.record.losses.append((first + loss).item())
    _end(model, recorder, given)


def _end(model: nn.Module, recorder: Recorder, given: Given) -> None:
    """The results after the last step."""
    recorder.keep_parameters(model.named_parameters())
    recorder.results["output"] = model(given["inputs"][STEPS]).detach()


# ---- ZeRO and FSDP: the same network, trained with Adam; the answer communicates by itself


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer. Weight decay makes it sensitive to the scale of the gradients, as Adam alone is not; epsilon keeps
    gradients that are almost zero from deciding."""
    return torch.optim.Adam(parameters, lr=0.003, weight_decay=0.01, eps=1e-5)


def _warm_up(recorder: Recorder) -> None:
    """Does once what the trial does, so that libraries have loaded what they need when `rest` measures the process."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = adam(model.parameters())
    model(torch.ones(SAMPLES, WIDTH)).sum().backward()
    for collective, scale in ((all_gather, 1), (reduce_scatter, -1)):
        part, whole = torch.zeros(WIDTH), torch.zeros(WIDTH * dist.get_world_size())
        collective(*((whole, part) if scale > 0 else (part, whole)))
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    del model, optimizer
    recorder.rest()


all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def zero(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(model, make_optimizer)` is created before the first step; `step()` is called after each backward."""
    model = _begin(recorder, given)
    recorder.watch(*model.parameters())
    _warm_up(recorder)
    optimizer = answer(model, adam)
    for step in range(STEPS):
        model.zero_grad()
        with recorder.during("forward", step):
            loss = loss_of(model, given, step)
        before = recorder.live_at_rest()
        with recorder.during("backward", step):
            peak, _ = recorder.peak_since(loss.backward)
        recorder.remember("at the peak of backward", peak - before)
        recorder.remember("after backward", recorder.live_at_rest() - before)
        with recorder.during("update", step):
            optimizer.step()
        recorder.record.losses.append(loss.item())
        del loss
        if step == 0:
            for name, parameter in model.named_parameters():
                recorder.results[f"first {name}"] = sample(parameter)
        recorder.remember_process("between two steps", step)
    model.zero_grad()
    recorder.remember("between two steps", recorder.live_at_rest())
    _end(model, recorder, given)


def fsdp(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(layer)` replaces each layer that has parameters; the optimizer updates the parameters of the new ones."""
    model = _begin(recorder, given)
    _warm_up(recorder)
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
            peak, loss = recorder.peak_since(partial(loss_of, model, given, step))
        recorder.remember("at the peak of forward", peak - before)
        recorder.remember("after forward", recorder.live_at_rest() - before)
        with recorder.during("backward", step):
            recorder.remember("at the peak of backward", recorder.peak_since(loss.backward)[0] - before)
        with recorder.during("update", step):
            optimizer.step()
        recorder.record.losses.append(loss.item())
        del loss
        recorder.remember_process("between two steps", step)
    optimizer.zero_grad()
    recorder.remember("between two steps", recorder.live_at_rest())
    recorder.results["output"] = model(given["inputs"][STEPS]).detach()
