"""Exercises of lab 05: what gathering ahead costs, and a wrap policy that makes a unit of every layer."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished

_CASES = (  # parameters of each unit in order, ranks, units gathered ahead, and the most parameters that a rank holds at once
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
    if not callable(answer):
        raise Wrong(f"the answer is a function of units, ranks and ahead, and this is {answer!r}")
    for units, ranks, ahead, expected in _CASES:
        asked = f"most_held({list(units)}, ranks={ranks}, ahead={ahead})"
        try:
            told = answer(list(units), ranks, ahead)
        except Exception as error:
            raise Wrong(f"{asked} raised {type(error).__name__}: {error}") from None
        if isinstance(told, bool) or not isinstance(told, (int, float)):
            raise Wrong(f"{asked} gave {told!r}, and not a number of parameters")
        if abs(told - expected) > 1e-6 * expected:
            raise Wrong(f"{asked} gave {told:g}: {_hint(told, units, ranks, ahead, expected)}")
    return "the own shards of all units, and on top the largest run of neighbours that are whole together"


def _hint(told: float, units: tuple[int, ...], ranks: int, ahead: int, expected: float) -> str:
    if ahead and abs(told - (sum(units) / ranks + max(units))) < 1e-6 * expected:
        return "a unit that was gathered ahead is whole beside the one that computes"
    if ahead and abs(told - (sum(units) / ranks + sum(sorted(units)[-ahead - 1 :]))) < 1e-6 * expected:
        return "units are gathered in the order of the model: the two largest need not be neighbours"
    if abs(told - (expected - sum(units) / ranks)) < 1e-6 * expected:
        return "the rank's own shards stay in memory while a unit is whole"
    if told > sum(units) * (1 + 1 / ranks):
        return "that is more than the shards and every unit together"
    return "look at the picture: what lies in memory all the time, and which units are whole at one moment?"


def _units(answer: Any) -> str:
    state = finished(answer).state
    spec = state.spec
    if spec.get("strategy") != "fsdp":
        raise Wrong(f"this run's strategy is {spec.get('strategy') or 'a script of its own'}, and FSDP1, fsdp, was asked for")
    if spec["workload"] != "gpt" or spec["options"]["size"] != "1M":
        raise Wrong("this run trains another model than gpt of the size 1M")
    seen = state.ranks[0].models
    if not seen:
        raise Wrong("this run did not tell of its model; give it some steps more")
    units = seen[-1]["units"]
    if units == 1:
        raise Wrong("this run has one unit only: no part of the model has as many parameters as the threshold")
    if units > _LAYERS + 1:
        raise Wrong(f"this run has {units} units: parts of a layer became units of their own; which of them is the largest?")
    if units < _LAYERS + 1:
        raise Wrong(f"this run has {units} units, and five layers and the rest of the model are {_LAYERS + 1}")
    return f"{units} units: each of the five layers, and the root with what is left of the model"


EXERCISES = {
    "held": Exercise(
        "What gathering ahead costs",
        _held,
        "```python\n"
        "def most_held(units, ranks, ahead):\n"
        "    whole = max(sum(units[first : first + ahead + 1]) for first in range(len(units)))\n"
        "    return sum(units) / ranks + whole\n"
        "```\n\n"
        "Backward goes through the same neighbours in the other order, so it has the same largest run.",
    ),
    "units": Exercise(
        "A unit for every layer",
        _units,
        '`run("fsdp", **GPT, options={"min_parameters": 100_000}).wait()`: any threshold from 66,049 to 198,272. A layer has 198,272 '
        "parameters; the largest parts inside it are attention and the first matrix of the perceptron, with 66,048 each.",
    ),
}
