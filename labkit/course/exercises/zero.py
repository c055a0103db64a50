"""Exercises of lab 04: which stage of ZeRO fits, and a run in which only the optimizer state is sharded."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished
from labkit.plan.spec import Spec

_GB = 10**9
_CASES = (  # parameters, ranks, bytes of a device, and the lowest stage that fits with 2 + 2 + 12 bytes a parameter
    (1 * _GB, 1, 16 * _GB, 0),
    (1 * _GB, 1, 15 * _GB, None),
    (4 * _GB, 8, 80 * _GB, 0),
    (7 * _GB, 2, 80 * _GB, 1),
    (7 * _GB, 8, 30 * _GB, 2),
    (7 * _GB, 8, 14 * _GB, 3),
    (30 * _GB, 4, 80 * _GB, None),
    (30 * _GB, 64, 80 * _GB, 2),
    (70 * _GB, 16, 80 * _GB, 3),
)


def _stage(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function of parameters, ranks and memory, and this is {answer!r}")
    for parameters, ranks, memory, expected in _CASES:
        asked = f"lowest_stage({parameters:,}, ranks={ranks}, memory={memory:,})"
        try:
            told = answer(parameters, ranks, memory)
        except Exception as error:
            raise Wrong(f"{asked} raised {type(error).__name__}: {error}") from None
        if type(told) is type(expected) and told == expected:
            continue
        if expected is None:
            raise Wrong(f"{asked} gave {told!r}, and the states do not fit at any stage there: give None")
        if told is None:
            raise Wrong(f"{asked} gave None, and some stage fits: 12 of the 16 bytes are the optimizer's here")
        if type(told) is not int or told not in range(4):
            raise Wrong(f"{asked} gave {told!r}; a stage is 0, 1, 2 or 3, or None where none fits")
        fits = "a lower one fits too" if told > expected else "there the states are larger than the device"
        raise Wrong(f"{asked} gave stage {told}: {fits}")
    return "stage after stage a part of the 2 + 2 + 12 bytes is divided by the ranks, and the first sum that fits is the answer"


def _quarter(answer: Any) -> str:
    state = finished(answer).state
    if not state.spec.get("strategy"):
        raise Wrong("this run is a script of its own; use one of the strategies of this lab")
    spec = Spec.from_json(state.spec)
    if spec.workload != "gpt":
        raise Wrong(f"this run trains {spec.workload}, and gpt was asked for")
    whole = 4 * spec.workload_row.parameters(spec.options)
    held = [rank["memory_bytes"] for rank in answer.summary()["ranks"]]
    if not all({"parameters", "optimizer"} <= owners.keys() for owners in held):
        raise Wrong("this run did not measure its memory; give it some steps more")
    if min(owners["parameters"] for owners in held) < 0.99 * whole:
        raise Wrong("its ranks do not have all parameters between two steps: a later stage was used than was asked for")
    most = max(owners["optimizer"] for owners in held) / (2 * whole)
    if most > 0.275:
        raise Wrong(f"the rank that has most of the optimizer state has {most:.0%} of it, on {len(held)} ranks; a quarter was asked for")
    if most < 0.225:
        raise Wrong(f"no rank has more than {most:.0%} of the optimizer state, which is less than the quarter that was asked for")
    return f"all parameters on every one of {len(held)} ranks, and {most:.0%} of the optimizer state at the most"


EXERCISES = {
    "stage": Exercise(
        "The lowest stage that fits",
        _stage,
        "With n ranks the states take 16P, 4P + 12P/n, 2P + 14P/n and 16P/n bytes; the answer is the first of these that is not above "
        "`memory`:\n\n"
        "```python\n"
        "def lowest_stage(parameters, ranks, memory):\n"
        "    for stage in range(4):\n"
        "        sizes = {3: 2, 2: 2, 1: 12}  # the first stage that shards it: its bytes\n"
        "        if sum(size * parameters / (ranks if stage >= first else 1) for first, size in sizes.items()) <= memory:\n"
        "            return stage\n"
        "    return None\n"
        "```\n\n"
        "30 billion parameters on four devices of 80 GB fit at no stage (120 GB each); on 64 of them stage 2 is enough.",
    ),
    "quarter": Exercise(
        "A quarter of the optimizer state",
        _quarter,
        '`run("zero1", **(GPT | place(4))).wait()`: stage 1 on four ranks. DeepSpeed\'s stages 1 and 2 on '
        "four ranks are right too; FSDP is not, because between the steps its parameters are sharded as well.",
    ),
}
