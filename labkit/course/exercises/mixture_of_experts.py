"""Exercises of lab 15: the bytes of a layer of experts, and experts for given bytes; drawn for each learner."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from labkit.course.exercises import Drawn, Exercise, Wrong, draw_number, drawn
from labkit.course.exercises.own import finished
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

_RANKS, _BATCH, _USUAL = 2, 4, WORKLOADS["moe"]  # of the runs of the lab
_DEFAULTS = {option.name: option.default for option in _USUAL.options}


def _slots_of(experts: int, top_k: int, factor: float, positions: int) -> int:
    return math.ceil(factor * top_k * positions / experts)


# ---- slots and bytes of a layer


def _layer(random: Random) -> Drawn:
    experts, top_k, factor = random.choice((16, 32, 64)), random.choice((1, 2, 4)), random.choice((0.75, 1.0, 1.5, 2.0))
    positions, ranks, batch = 100 * random.randint(3, 12), random.choice((4, 8)), random.randint(2, 6)
    width = 256 * random.randint(2, 8)
    slots = _slots_of(experts, top_k, factor, positions)
    whole = 2 * batch * experts * slots * width / 1e6  # MB of one all-to-all, of which a part stays
    right = 2 * whole * (ranks - 1) / ranks
    uneven = factor * top_k * positions / experts
    return Drawn(
        f"A layer has {experts} experts on {ranks} ranks, top_k is {top_k} and the capacity factor {factor:g}. Each"
        f" rank has {batch} sequences of {positions} positions, and a token is {width} numbers in bf16",
        right,
        (
            (2 * whole, "the slots of its own experts stay on a rank"),
            (right / 2, "a layer has two all-to-alls in forward: dispatch and combine"),
            (right * 2, "that is forward and backward; or is it 4 bytes for a number?"),
            (right * uneven / slots, "a slot is whole: how is the capacity rounded?"),
            (right / factor, "empty slots are sent, too: where is the capacity factor?"),
            (right / batch, "every sequence has its slots"),
            *(((right / top_k, "a token is sent to each of its experts"),) if top_k > 1 else ()),
            (right / experts, "a rank sends to all experts of the others"),
            (right / whole * 2 * batch * positions * top_k * width / 1e6, "slots are sent, empty or not"),
        ),
    )


def _slots(answer: Any) -> str:
    question = _question("slots", _layer)
    question.judge(
        answer, "of MB", "count the slots of all experts for the sequences of a rank, and what leaves the rank"
    )
    return (
        f"{question.right:,.1f} MB, empty slots included: it is known before the run, which is why slots were invented"
    )


# ---- an expert for other bytes


def _options(random: Random) -> tuple[int, int, int]:
    """Experts, experts per token, and slots per expert, none of which are the defaults."""
    usual = _DEFAULTS["experts"] * _slots_of(*(_DEFAULTS[name] for name in _NAMES))
    while True:
        experts, top_k = random.choice((4, 16, 32)), random.choice((1, 2, 4))
        even = top_k * _DEFAULTS["context"] / experts
        slots = random.randint(math.ceil(0.5 * even), math.floor(2 * even))
        if (100 * experts * slots) % usual == 0 and experts * slots != usual and slots != even:
            return experts, top_k, slots


_NAMES = ("experts", "top_k", "capacity_factor", "context")


def _asked() -> tuple[int, int, int]:
    return _options(drawn("mixture_of_experts.bytes"))


def _task() -> str:
    experts, top_k, slots = _asked()
    usual = _DEFAULTS["experts"] * _slots_of(*(_DEFAULTS[name] for name in _NAMES))
    return (
        f"Your model has {experts} experts per layer, top_k is {top_k}, and tokens need"
        f" {100 * experts * slots // usual} % of the bytes of the run above"
    )


def _bytes(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.asked
    name = run.state.spec.strategy or "a script"
    if spec is None or spec.workload_row.mixture is None or STRATEGIES[name].states != "experts":
        raise Wrong(f"this is a run of {name}: train the workload moe with expert parallelism")
    if run.state.world_size != _RANKS or spec.batch_per_rank != _BATCH or spec.precision != "fp32":
        raise Wrong("compare like with like: two ranks, a batch of 4 per rank, and fp32")
    if any(spec.options[name] != _DEFAULTS[name] for name in ("context", "size")):
        raise Wrong("leave the context and the size of the model as they are")
    experts, top_k, slots = _asked()
    if (spec.options["experts"], spec.options["top_k"]) != (experts, top_k):
        raise Wrong(f"your model has experts={experts} and top_k={top_k}")
    got = _slots_of(*(spec.options[name] for name in _NAMES))
    if got != slots:
        raise Wrong(
            f"an expert has {got} slots per sequence, and tokens need {got / slots:.3g} times what is asked for:"
            " they are proportional to E · C, and C is rounded"
        )
    return f"{experts} experts with {slots} slots each: the bytes follow from E · C alone"


def _question(short: str, draw: Callable[[Random], Drawn]) -> Drawn:
    return draw_number(f"mixture_of_experts.{short}", draw)


EXERCISES = {
    "slots": Exercise(
        "The bytes of a layer of experts",
        _slots,
        "`slots = math.ceil(factor * top_k * positions / experts)`; a rank sends `2 * 2 * batch * experts * slots *"
        " width * (ranks - 1) / ranks` bytes in forward: two all-to-alls, of which its own part stays. The numbers"
        " differ between learners.",
        task=lambda: _question("slots", _layer).task,
    ),
    "bytes": Exercise(
        "Experts for given bytes",
        _bytes,
        "The run above has E · C = 8 · 40. For p percent of its bytes C = p / 100 · 320 / E, and `capacity_factor` is"
        ' C · E / (top_k · 128) or slightly less: `run("ep", **HERE, steps=4, **SMALL, options={…}).wait()`. The'
        " numbers differ between learners.",
        task=_task,
    ),
}
