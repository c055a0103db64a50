"""What a bench gives."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

PAIRS = 5
EVERY = 50  # steps from one that is sampled to the next, as runs have it where nothing is said


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of `each`, its unit, the aim, and what to know about it; None where nothing was measured."""

    name: str
    median: float | None
    unit: str
    aim: str
    each: tuple[float, ...]
    note: str = ""


def ratio(name: str, each: list[float], aim: str, note: str) -> Figure:
    """The median of ratios."""
    return Figure(name, statistics.median(each), "×", aim, tuple(each), note)
