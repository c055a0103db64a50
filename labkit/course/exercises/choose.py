"""Exercises of lab 11: what the stages of ZeRO keep, a model of 7B on eight devices, and a run that has to fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labkit.common.units import size
from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished
from labkit.plan.spec import Spec

_SHARDED: dict[int, Callable[[float, int], float]] = {  # bytes of a device, by stage, in mixed precision
    0: lambda parameters, devices: 16 * parameters,
    1: lambda parameters, devices: (2 + 2 + 12 / devices) * parameters,
    2: lambda parameters, devices: (2 + 14 / devices) * parameters,
    3: lambda parameters, devices: 16 * parameters / devices,
}
_TRIED = ((1000, 8), (1_000_000, 4), (50, 1))


def _states(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function of parameters, devices and stage, and this is {answer!r}")
    for parameters, devices in _TRIED:
        for stage, right in _SHARDED.items():
            given = answer(parameters, devices, stage)
            if isinstance(given, bool) or not isinstance(given, (int, float)):
                raise Wrong(f"states({parameters}, {devices}, {stage}) gave {given!r}; it should give a number of bytes")
            if not math.isclose(given, right(parameters, devices), rel_tol=1e-6):
                raise Wrong(f"states({parameters}, {devices}, {stage}) gave {given:,.6g} bytes: {_HINTS[stage]}")
    return "on one device all stages keep the same 16 bytes a parameter; on many, stage 3 keeps almost nothing"


_HINTS = {
    0: "without ZeRO every device keeps everything; add up the five parts",
    1: "stage 1 divides what the optimizer keeps, and only that",
    2: "stage 2 divides what the optimizer keeps and one thing more",
    3: "stage 3 leaves nothing whole",
}


def _seven(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(f"the answer is a number of GB, and this is {answer!r}")
    for near, words in (
        (112, "that is what all GPUs hold together; ZeRO-3 divides it by their number"),
        (13.04, "that is in GiB, of 2³⁰ bytes; give GB, of 10⁹ bytes"),
        (38.5, "that is ZeRO-1, which divides what the optimizer keeps alone"),
        (26.25, "that is ZeRO-2, under which parameters stay whole"),
        (1.75, "that is the parameters in bf16 alone; what else does training keep?"),
        (3.5, "that is parameters and gradients in bf16; Adam keeps more than both"),
        (10.5, "that is what Adam keeps alone"),
    ):
        if math.isclose(answer, near, rel_tol=0.01):
            raise Wrong(words)
    if answer > 1e9:
        raise Wrong(f"{answer:,.0f} looks like bytes; give GB, of 10⁹ bytes")
    if not 13.9 <= answer <= 14.2:
        raise Wrong("multiply the parameters by the bytes that each takes in training, and divide by the GPUs")
    return (
        "16 × 7 · 10⁹ / 8 bytes. Of 24 GB that leaves about 10 for activations, the gathered block and what the allocator loses: it can fit"
    )


_BUDGET = 24 << 20
_LEAST = 256
_COUNTED = ("parameters", "gradients", "optimizer", "activations")


def _fits(answer: Any) -> str:
    summary = _finished(answer)
    spec = Spec.from_json(answer.state.spec)
    if spec.workload != "cnn" or spec.nproc != 2:
        raise Wrong(f"this run trains {spec.workload} on {spec.nproc}; the cnn on two ranks was asked for")
    if spec.global_batch < _LEAST:
        raise Wrong(f"a step of this run learns from {spec.global_batch} samples; it must stay at {_LEAST}")
    worst = max((rank["memory_bytes"] for rank in summary["ranks"]), key=lambda held: sum(held.get(owner, 0) for owner in _COUNTED))
    if not worst.get("activations"):
        raise Wrong("no step of this run was looked at closely, so its activations are not known; give it 6 steps")
    total = sum(worst.get(owner, 0) for owner in _COUNTED)
    if total > _BUDGET:
        most = max(_COUNTED, key=lambda owner: worst.get(owner, 0))
        held = f"a rank holds {size(total)}, and {size(_BUDGET)} is all there is"
        raise Wrong(f"{held}; most of it is {most}, {size(worst[most])}. What shrinks those?")
    return f"{size(total)} a rank, of which {size(worst['activations'])} are activations"


def _finished(answer: Any) -> dict[str, Any]:
    summary = finished(answer).summary()
    if not summary["strategy"]:
        raise Wrong("this run is of a script of its own; name a strategy")
    return summary


EXERCISES: dict[str, Exercise] = {
    "states": Exercise(
        "What the stages of ZeRO keep",
        _states,
        "`16*P`, `(4 + 12/n)*P`, `(2 + 14/n)*P`, `16*P/n` for stages 0 to 3: 2 + 2 for parameters and gradients in 16 bits, 12 for Adam.",
    ),
    "seven": Exercise(
        "7B on eight GPUs",
        _seven,
        "**14 GB**: 16 × 7 · 10⁹ = 112 GB, an eighth on each. 24 GB do where activations and a gathered block stay below about 9 GB.",
    ),
    "fits": Exercise(
        "Make it fit",
        _fits,
        "Activations are what is too much, so sharding alone does not help. `run('ddp', nproc=2, options={'accumulate': 4}, steps=6)` "
        "takes the batch in four parts; `fsdp2` with `accumulate=2` fits too.",
    ),
}
