"""Exercises of lab 05: the memory cost of prefetching, and a wrap policy that makes a unit of every layer."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished

_CASES = (  # parameters per unit in order, ranks, prefetched units, and the maximum number of parameters on a rank
    ((100, 100, 100, 100), 4, 0, 200.0),
    ((100, 100, 100, 100), 4, 1, 300.0),
    ((10, 200, 30), 2, 0, 320.0),
    ((10, 200, 30), 2, 1, 350.0),
    ((300, 10, 10, 300), 2, 1, 620.0),
    ((50, 60, 70), 3, 5, 240.0),
    ((400,), 4, 2, 500.0),
)
_LAYERS = 5  # of gpt with 1M parameters


def _held(answer: Any) -> str:
    require_function(answer, "of units, ranks and ahead")
    for units, ranks, ahead, expected in _CASES:
        call = f"most_held({list(units)}, ranks={ranks}, ahead={ahead})"
        given = result_of(call, answer, list(units), ranks, ahead)
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise Wrong(f"{call} must return a number of parameters, got {given!r}")
        if abs(given - expected) > 1e-6 * expected:
            raise Wrong(f"{call} returned {given:g}: {_hint(given, units, ranks, ahead, expected)}")
    return (
        "the rank's own shards of all units, plus the largest sum of consecutive units that are whole at the same time"
    )


def _hint(given: float, units: tuple[int, ...], ranks: int, ahead: int, expected: float) -> str:
    if ahead and abs(given - (sum(units) / ranks + max(units))) < 1e-6 * expected:
        return "a prefetched unit is whole at the same time as the unit that computes"
    if ahead and abs(given - (sum(units) / ranks + sum(sorted(units)[-ahead - 1 :]))) < 1e-6 * expected:
        return "units are gathered in model order: the two largest need not be neighbours"
    if abs(given - (expected - sum(units) / ranks)) < 1e-6 * expected:
        return "the rank's own shards stay in memory while a unit is whole"
    if given > sum(units) * (1 + 1 / ranks):
        return "that is more than the shards plus all units"
    return "look at the picture: what is in memory all the time, and which units are whole at the same moment?"


def _units(answer: Any) -> str:
    state = finished(answer).state
    spec = state.spec
    if spec.strategy != "fsdp":
        raise Wrong(f"the strategy of this run must be fsdp (FSDP1), got {spec.strategy or 'a script'}")
    if spec.workload != "gpt" or spec.options.get("size") != "1M":
        raise Wrong("this run must train gpt with size=1M")
    seen = state.ranks[0].models
    if not seen:
        raise Wrong("this run recorded no model; run a few more steps")
    units = seen[-1].units
    if units == 1:
        raise Wrong("this run has only one unit: no module has as many parameters as the threshold")
    if units > _LAYERS + 1:
        raise Wrong(
            f"this run has {units} units: modules inside a layer became separate units; which of them is the largest?"
        )
    if units < _LAYERS + 1:
        raise Wrong(f"this run has {units} units; five layers and the root are {_LAYERS + 1}")
    return f"{units} units: the five layers, and the root with the rest of the model"


EXERCISES = {
    "held": Exercise(
        "The memory cost of prefetching",
        _held,
        "```python\n"
        "def most_held(units, ranks, ahead):\n"
        "    whole = max(sum(units[first : first + ahead + 1]) for first in range(len(units)))\n"
        "    return sum(units) / ranks + whole\n"
        "```\n\n"
        "Backward passes through the same consecutive units in reverse order, so it has the same maximum.",
    ),
    "units": Exercise(
        "One unit per layer",
        _units,
        '`run("fsdp", **GPT, options={"min_parameters": 100_000}).wait()`: any threshold from 66,049 to 198,272. A'
        " layer has 198,272 parameters; the largest modules inside it are attention and the first matrix of the MLP,"
        " with 66,048 each.",
    ),
}
