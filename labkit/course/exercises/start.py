"""Exercises of lab 00: what torchrun gives a process, and a first run of one's own."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished
from labkit.plan.spec import Spec


def _steps(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(f"the answer is a number of steps, and this is {answer!r}")
    if answer == 469:
        raise Wrong("that is one rank with 128 samples a step; three ranks share the 60,000 samples")
    if answer == 156:
        raise Wrong("156 steps of 384 are 59,904 samples: what becomes of the last 96?")
    if answer != 157:
        raise Wrong("divide the samples by what all ranks together take at a step, and count the last, smaller step too")
    return "60,000 / (3 × 128) is 156.25, and the rest needs a step of its own"


def _two(answer: Any) -> str:
    state = finished(answer).state
    spec = state.spec or {}
    if spec.get("strategy") != "ddp":
        raise Wrong(f"this run's strategy is {spec.get('strategy') or 'a script of its own'}")
    if state.world_size != 2:
        raise Wrong(f"the world size is {state.world_size}; two ranks were asked for")
    batch = Spec.from_json(spec).global_batch
    if batch != 128:
        raise Wrong(f"one step of all ranks takes {batch} samples, and not 128; look at what a rank takes")
    return "two ranks of 64 samples: a step learns from as many samples as it did on one device"


EXERCISES = {
    "steps": Exercise(
        "Steps of an epoch",
        _steps,
        "**157.** Three ranks take 3 × 128 = 384 samples at a step; 60,000 / 384 = 156.25, and the rest is a step too.",
    ),
    "two": Exercise(
        "The same batch on two ranks",
        _two,
        '`run("ddp", nproc=2, batch_size=64, steps=10)`, or `batch_size=128, scaling="strong"`: the batch of all ranks together is 128.',
    ),
}
