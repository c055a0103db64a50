"""How near the learner's predictions were, by lab: from what the runs of this runs folder have stored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from labkit.analysis.guess import FIGURES
from labkit.analysis.metrics import median
from labkit.common.units import counted
from labkit.record.documents import Unreadable
from labkit.record.folder import RunFolder

ELSEWHERE = "elsewhere"  # not in the notebook of a lab


@dataclass(frozen=True)
class Score:
    """`made` predictions; the `errors` of those that were measured, without sign, as a fraction of the measured value
    (percentages: the difference). Of several ranks, the one with the largest error counts."""

    made: int
    errors: tuple[float, ...]

    @property
    def error(self) -> float | None:
        """The median error; None if nothing was measured."""
        return median(self.errors) if self.errors else None

    @property
    def words(self) -> str:
        """`3 predictions, median error 12 % (2 measured)`."""
        said = counted(self.made, "prediction")
        if self.error is None:
            return f"{said}, not measured"
        far = f"{self.error:.0%}".replace("%", " %") if math.isfinite(self.error) else "without limit"
        return f"{said}, median error {far}" + (f" ({len(self.errors)} measured)" * (len(self.errors) < self.made))

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values; an error without limit (nothing was expected to be measured) is None."""
        known = self.error is not None and math.isfinite(self.error)
        return {"made": self.made, "measured": len(self.errors), "median_error": self.error if known else None}


def scores(labs: Collection[str]) -> dict[str, Score]:
    """By the name of one of `labs`, or `ELSEWHERE`: the predictions that runs have stored, of figures of one run. A
    folder that cannot be read is left out; a run that is under way counts as not measured yet."""
    made: dict[str, int] = defaultdict(int)
    errors: dict[str, list[float]] = defaultdict(list)
    for folder in RunFolder.all():
        try:
            guess = folder.read_guess()
            summary = folder.read_summary()
        except Unreadable:
            continue
        if guess is None:
            continue
        outcomes = summary.guess if summary else []
        lab = guess.notebook if guess.notebook in labs else ELSEWHERE
        known = {name for name in guess.figures if name in FIGURES and not FIGURES[name].compared}
        made[lab] += len(known)
        for name in known:
            those = [outcome.error for outcome in outcomes if outcome.figure == name and outcome.measured is not None]
            if those:
                errors[lab].append(max(math.inf if error is None else abs(error) for error in those))
    return {lab: Score(number, tuple(errors[lab])) for lab, number in made.items() if number}
