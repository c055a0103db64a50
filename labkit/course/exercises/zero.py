"""Exercises of lab 04: which stage of ZeRO fits, and a run in which only the optimizer state is sharded."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished

_GB = 10**9
_CASES = (  # parameters, ranks, bytes per device, and the lowest stage that fits with 2 + 2 + 12 bytes per parameter
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
    require_function(answer, "of parameters, ranks and memory")
    for parameters, ranks, memory, expected in _CASES:
        call = f"lowest_stage({parameters:,}, ranks={ranks}, memory={memory:,})"
        given = result_of(call, answer, parameters, ranks, memory)
        if type(given) is type(expected) and given == expected:
            continue
        if expected is None:
            raise Wrong(f"{call} returned {given!r}, but the states do not fit at any stage: return None")
        if given is None:
            raise Wrong(f"{call} returned None, but some stage fits: 12 of the 16 bytes belong to the optimizer here")
        if type(given) is not int or given not in range(4):
            raise Wrong(f"{call} must return 0, 1, 2 or 3, or None if no stage fits, got {given!r}")
        reason = "a lower stage fits too" if given > expected else "the states are larger than the device memory"
        raise Wrong(f"{call} returned stage {given}: {reason}")
    return (
        "each stage divides one more of the terms 2 + 2 + 12 by the number of ranks; the first sum that fits is the"
        " answer"
    )


def _quarter(answer: Any) -> str:
    state = finished(answer).state
    if not state.spec.strategy:
        raise Wrong("this run uses a script; choose one of the strategies of this lab instead")
    spec = state.spec.to_spec()
    if spec.workload != "gpt":
        raise Wrong(f"the workload must be gpt, got {spec.workload}")
    whole = 4 * spec.workload_row.parameters(spec.options)
    memory = [rank["memory_bytes"] for rank in answer.summary()["ranks"]]
    if not all({"parameters", "optimizer"} <= owners.keys() for owners in memory):
        raise Wrong("this run did not measure its memory; run a few more steps")
    if min(owners["parameters"] for owners in memory) < 0.99 * whole:
        raise Wrong("the ranks do not store all parameters between two steps: use a lower stage")
    most = max(owners["optimizer"] for owners in memory) / (2 * whole)
    if most > 0.275:
        raise Wrong(f"on {len(memory)} ranks, one rank stores {most:.0%} of the optimizer state; it must be a quarter")
    if most < 0.225:
        raise Wrong(f"no rank stores more than {most:.0%} of the optimizer state; it must be a quarter")
    return f"each of {len(memory)} ranks stores all parameters and at most {most:.0%} of the optimizer state"


EXERCISES = {
    "stage": Exercise(
        "The lowest stage that fits",
        _stage,
        "With n ranks the states take 16P, 4P + 12P/n, 2P + 14P/n and 16P/n bytes; the answer is the first of these"
        " that does not exceed `memory`:\n\n```python\ndef lowest_stage(parameters, ranks, memory):\n    for stage in"
        " range(4):\n        sizes = {3: 2, 2: 2, 1: 12}  # the first stage that shards it: its bytes\n        if"
        " sum(size * parameters / (ranks if stage >= first else 1) for first, size in sizes.items()) <= memory:\n      "
        "      return stage\n    return None\n```\n\n30 billion parameters on four devices with 80 GB do not fit at any"
        " stage (120 GB each); on 64 devices stage 2 is enough.",
    ),
    "quarter": Exercise(
        "A quarter of the optimizer state",
        _quarter,
        '`run("zero1", **(GPT | place(4))).wait()`: stage 1 on four ranks. DeepSpeed\'s stages 1 and 2 on '
        "four ranks are right too. FSDP is not, because it also shards the parameters between the steps.",
    ),
}
