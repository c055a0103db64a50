"""The result of a benchmark."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

PAIRS = 5
EVERY = 50  # steps between two profiled steps, the default of a run


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of `each` (None if nothing was measured), its unit, the target, and a note."""

    name: str
    median: float | None
    unit: str
    aim: str
    each: tuple[float, ...]
    note: str = ""


def ratio(name: str, each: list[float], aim: str, note: str) -> Figure:
    """The median of ratios."""
    return Figure(name, statistics.median(each), "×", aim, tuple(each), note)
