"""Exercises of lab 00: the steps of an epoch, and a run on two ranks with the global batch size of one."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_number
from labkit.course.exercises.own import finished


def _steps(answer: Any) -> str:
    require_number(answer, "of steps")
    if answer == 469:
        raise Wrong("that is for one rank with 128 samples per step; here three ranks split the 60,000 samples")
    if answer == 156:
        raise Wrong("156 steps of 384 samples are 59,904 samples: what happens to the last 96?")
    if answer != 157:
        raise Wrong("divide the samples by the global batch size, and count the last, smaller step too")
    return "60,000 / (3 × 128) is 156.25, and the remainder needs one more step"


def _two(answer: Any) -> str:
    state = finished(answer).state
    spec = state.spec
    if spec.strategy != "ddp":
        raise Wrong(f"the strategy of this run must be ddp, got {spec.strategy or 'a script'}")
    if state.world_size != 2:
        raise Wrong(f"the world size must be 2, got {state.world_size}")
    batch = spec.to_spec().global_batch
    if batch != 128:
        raise Wrong(f"the global batch size must be 128, got {batch}; how many samples does each rank take?")
    return "two ranks with 64 samples each: a step processes as many samples as on one device"


EXERCISES = {
    "steps": Exercise(
        "Steps per epoch",
        _steps,
        "**157.** Three ranks take 3 × 128 = 384 samples per step; 60,000 / 384 = 156.25, and the remainder is one more"
        " step.",
    ),
    "two": Exercise(
        "The same global batch on two ranks",
        _two,
        '`run("ddp", nproc=2, batch_size=64, steps=10)`, or `batch_size=128, scaling="strong"`: the global batch size'
        " is 128.",
    ),
}
