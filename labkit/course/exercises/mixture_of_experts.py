"""Exercises of lab 15: the capacity of an expert, and fewer bytes for the tokens."""

from __future__ import annotations

import math
from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

_CASES = ((128, 8, 2, 1.25), (128, 8, 1, 1.0), (100, 8, 1, 1.0), (4096, 64, 4, 2.0))


def _slots(answer: Any) -> str:
    require_function(answer, "slots(positions, experts, top_k, factor)")
    for case in _CASES:
        positions, experts, chosen, factor = case
        wanted, call = math.ceil(factor * chosen * positions / experts), f"slots({', '.join(map(str, case))})"
        given = result_of(call, answer, *case)
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise Wrong(f"{call} must return a number, got {given!r:.80}")
        if given == wanted / chosen and chosen > 1:
            raise Wrong(f"{call} returned {given}: how many choices does each position make?")
        if given != wanted:
            raise Wrong(
                f"{call} returned {given}: what is the mean number of choices per expert, and how is it rounded?"
            )
    return f"the capacity is right in {len(_CASES)} cases"


def _bytes(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.asked
    name = run.state.spec.strategy or "a script"
    if spec is None or spec.workload_row.mixture is None or STRATEGIES[name].states != "experts":
        raise Wrong(f"this is a run of {name}: train the workload moe with expert parallelism")
    usual = {option.name: option.default for option in WORKLOADS[spec.workload].options}
    if run.state.world_size != 2 or spec.batch_per_rank != 4 or spec.precision != "fp32":
        raise Wrong("compare like with like: two ranks, a batch of 4 per rank, and fp32")
    if spec.options["capacity_factor"] != usual["capacity_factor"] or spec.options["size"] != usual["size"]:
        raise Wrong("leave the capacity factor and the size of the model as they are")
    if spec.options["top_k"] >= usual["top_k"] or spec.options["context"] != usual["context"]:
        raise Wrong("the bytes are proportional to E · C: which option halves C, with as many positions?")
    return "every token goes to one expert only, as in the Switch Transformer: half of the slots, half of the bytes"


EXERCISES = {
    "slots": Exercise(
        "The capacity of an expert",
        _slots,
        "`return math.ceil(factor * top_k * positions / experts)`: the mean number of choices per expert, times the "
        "factor, rounded up.",
    ),
    "bytes": Exercise(
        "Half of the bytes for the tokens",
        _bytes,
        '`run("ep", **HERE, steps=4, **SMALL, options={"top_k": 1}).wait()`: one choice per token instead of two.',
    ),
}
