"""Trials of tensor parallelism: an MLP split by columns and rows, with a replicated layer before it, and a
cross-entropy over a split vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import OUTSIDE, Expected, Given, loaded

TOKENS, WIDTH, HIDDEN, STEPS, RATE = 16, 32, 128, 4, 0.5
VOCABULARY, SCALES = 512, (1.0, 10.0, 1_000.0)
_MLP = ("w1", "b1", "w2", "b2")
_NEAR = 1e-5  # an input of the ReLU that is nearer to 0 may change its sign with the order of sums, and the gradient

ADDED_AGAIN = (
    "the gradient of {names} is not summed over the ranks: every rank uses x for other features (f in backward)"
)
TWICE = "the gradient of {names} is the sum over the ranks twice: g is an identity in backward"


def draw(trial: str, ranks: int) -> list[Given]:
    """The logits and targets of each rank's part of the vocabulary; or the whole parameters, inputs and targets."""
    if trial == "cross_entropy":
        targets = torch.randint(VOCABULARY, (len(SCALES), TOKENS))
        logits = torch.stack([scale * torch.randn(TOKENS, VOCABULARY) for scale in SCALES])
        return [{"logits": part, "targets": targets} for part in logits.chunk(ranks, dim=2)]
    while _nearest_to_zero(given := _draw_mlp()) < _NEAR:
        pass
    return [{**given} for _ in range(ranks)]


def _draw_mlp() -> Given:
    shapes = {"w1": (HIDDEN, WIDTH), "b1": (HIDDEN,), "w2": (WIDTH, HIDDEN), "b2": (WIDTH,)}
    given = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    inputs, targets = torch.randn(2, STEPS + 1, TOKENS, WIDTH)
    return {"inputs": inputs, "targets": targets, **given, **nn.Linear(WIDTH, WIDTH).state_dict()}


def _nearest_to_zero(given: Given) -> float:
    """The smallest input of the ReLU while a single device trains."""
    model, least = _Model(Whole(*(given[name] for name in _MLP)), given), math.inf
    for step in range(STEPS):
        least = min(least, model.mlp.hidden(model.before(given["inputs"][step])).abs().min().item())
        model.errors(given, step, lambda tokens: tokens).mean().backward()
        model.update()
    return least


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """The results of each rank on a single device."""
    if trial == "cross_entropy":
        return _expect_cross_entropy(given)
    model, ranks = _Model(Whole(*(given[0][name] for name in _MLP)), given[0]), len(given)
    expected = [Expected() for _ in given]
    for step in range(STEPS):
        errors = model.errors(given[0], step, lambda tokens: tokens)
        (errors.sum() / errors.numel()).backward()
        if step == 0 and trial == "column_row":
            _mistakes_of_f_and_g(model, given[0], expected)
        for rank, mine in enumerate(expected):
            part = errors.detach() if trial == "column_row" else errors.detach().chunk(ranks)[rank]
            mine.losses.append(part.mean().item())
            if step == 0:
                mine.expects("gradient of step 0: before.weight", model.before.weight.grad)
        model.update()
    for rank, mine in enumerate(expected):
        whole = model.errors(given[0], STEPS, lambda tokens: tokens)
        mine.expects("output", whole if trial == "column_row" else whole.chunk(ranks)[rank])
        for name, parameter in model.before.named_parameters():
            mine.expects(f"parameter before.{name}", parameter, given[0][name])
    return expected


def _mistakes_of_f_and_g(model: _Model, given: Given, expected: list[Expected]) -> None:
    """The gradient of the replicated layer, if f sums nothing, or if g sums in backward as well."""
    ranks, inputs = len(expected), given["inputs"][0]
    mlp = model.mlp
    x = model.before(inputs).detach().requires_grad_()
    hidden = x @ mlp.w1.T + mlp.b1
    errors = torch.relu(hidden) @ mlp.w2.T + mlp.b2 - given["targets"][0]
    of_hidden = (2 * errors / errors.numel()) @ mlp.w2 * (hidden > 0)
    for rank, mine in enumerate(expected):
        own = of_hidden.chunk(ranks, dim=1)[rank] @ mlp.w1.chunk(ranks)[rank]
        name = "gradient of step 0: before.weight"
        mine.mistake(ADDED_AGAIN, name, own.T @ inputs)
        mine.mistake(TWICE, name, ranks * model.before.weight.grad)


def _expect_cross_entropy(given: list[Given]) -> list[Expected]:
    expected = [Expected() for _ in given]
    for step in range(len(SCALES)):
        whole = torch.cat([rank["logits"][step] for rank in given], dim=1).requires_grad_()
        loss = nn.functional.cross_entropy(whole, given[0]["targets"][step])
        (gradient,) = torch.autograd.grad(loss, whole)
        for mine, part in zip(expected, gradient.chunk(len(given), dim=1)):
            mine.losses.append(loss.item())
            name = f"gradient of step {step}: logits"
            mine.expects(name, part)
            mine.mistake("the gradient of {names} is not divided by the number of tokens", name, part * TOKENS)
    return expected


class Whole(nn.Module):
    """The MLP on a single device."""

    def __init__(self, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = (nn.Parameter(tensor.clone()) for tensor in (w1, b1, w2, b2))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) to (tokens, width)."""
        return torch.relu(self.hidden(x)) @ self.w2.T + self.b2

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the ReLU, (tokens, hidden)."""
        return x @ self.w1.T + self.b1


class _Model:
    """A replicated linear layer, then the MLP, with SGD."""

    def __init__(self, mlp: nn.Module, given: Given):
        self.before, self.mlp = loaded(nn.Linear(WIDTH, WIDTH), given), mlp
        self._optimizer = torch.optim.SGD([*self.before.parameters(), *mlp.parameters()], RATE)

    def errors(self, given: Given, step: int, part: Callable[[Tensor], Tensor]) -> Tensor:
        """The squared errors of this rank's part of the tokens, (tokens, width)."""
        self._optimizer.zero_grad()
        return (self.mlp(self.before(part(given["inputs"][step]))) - part(given["targets"][step])) ** 2

    def update(self) -> None:
        """One step of the optimizer."""
        self._optimizer.step()


# ---- what runs on the ranks


def column_row(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(w1, b1, w2, b2)` gets the whole parameters; every rank has all tokens, before and after it."""
    recorder.record.figures["tokens"] = TOKENS
    _train(answer, recorder, given, part=lambda tokens: tokens, combine=lambda gradient: None)


def sequence(answer: Any, recorder: Recorder, given: Given) -> None:
    """As `column_row`, but every rank has its own tokens before and after it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    recorder.record.figures["tokens"] = TOKENS / ranks
    _train(answer, recorder, given, lambda tokens: tokens.chunk(ranks)[rank], dist.all_reduce)


def _train(
    answer: Any,
    recorder: Recorder,
    given: Given,
    part: Callable[[Tensor], Tensor],
    combine: Callable[[Tensor], Any],
) -> None:
    """Trains a replicated layer and the answer's MLP on this rank's part of the tokens; `combine` sums the gradients of
    the replicated layer over the ranks, if each has other tokens."""
    figures, whole = recorder.record.figures, [given.pop(name) for name in _MLP]
    figures["message"], figures["bias"] = TOKENS * WIDTH * 4, WIDTH * 4
    figures["parameters"] = sum(tensor.nbytes for tensor in whole)
    figures["replicated"] = 2 * 2 * figures["tokens"] * WIDTH * WIDTH  # operations of the layer before the MLP
    figures["mlp"] = 3 * 2 * 2 * TOKENS * WIDTH * HIDDEN / dist.get_world_size()  # operations of this rank's share
    recorder.watch(*whole)
    before = recorder.live()
    mlp = answer(*whole)
    del whole
    recorder.remember("after the construction", recorder.live() - before + figures["parameters"])
    model = _Model(mlp, given)
    for step in range(STEPS):
        with recorder.during("forward", step):
            errors = model.errors(given, step, part)
        with recorder.during("backward", step):
            (errors.sum() / (TOKENS * WIDTH)).backward()
        with recorder.during("update", OUTSIDE):
            for parameter in model.before.parameters():
                combine(parameter.grad)
        if step == 0:
            recorder.results["gradient of step 0: before.weight"] = model.before.weight.grad.clone()
        model.update()
        recorder.record.losses.append(errors.detach().mean().item())
    recorder.results["output"] = model.errors(given, STEPS, part).detach()
    recorder.keep_parameters((f"before.{name}", parameter) for name, parameter in model.before.named_parameters())


def cross_entropy(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(logits, targets)` gets the logits of this rank's part of the vocabulary; one step per scale of logits."""
    figures = recorder.record.figures
    figures["token"], figures["logits"] = TOKENS * 4, TOKENS * VOCABULARY // dist.get_world_size()
    for step in range(len(SCALES)):
        logits = given["logits"][step].clone().requires_grad_()
        with recorder.during("forward", step):
            loss = answer(logits, given["targets"][step].clone())
        recorder.record.losses.append(loss.item())
        with recorder.during("backward", step):
            loss.backward()
        recorder.keep_gradients(f"step {step}", [("logits", logits)])
