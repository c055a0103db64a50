"""What a learner predicted of a run against its measurement, and one sentence about each figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from labkit.analysis.guessable import FIGURES, MIB, Figure, Parts
from labkit.analysis.prediction import ranges
from labkit.analysis.prediction import sentences as about_the_plan
from labkit.common.units import significant, size
from labkit.record.documents import Guessed, GuessOutcome
from labkit.record.state import RunState, per_revision

_SHOWN = 8  # ranks with values of their own that are put into words
_NAMED = 3  # owners, phases or operations that explain a miss


@dataclass(frozen=True)
class Outcome:
    """A figure of one rank, or of the whole run (`rank` None), in its unit: `guessed` by the learner, `predicted` by
    the lab, `measured`. Unknown values are None. `error` is that of `Figure.error`, and `reason` explains a miss."""

    figure: str
    unit: str
    rank: int | None
    guessed: float
    predicted: float | None = None
    measured: float | None = None
    error: float | None = None
    reason: str = ""

    @property
    def missed(self) -> bool:
        """Whether the value is wrong, see `Figure.misses`."""
        return self.measured is not None and FIGURES[self.figure].misses(self.guessed, self.measured)

    @property
    def size_of_error(self) -> float:
        """The error without its sign; infinite if nothing was expected to be measured."""
        return math.inf if self.error is None else abs(self.error)

    def recorded(self) -> GuessOutcome:
        """The outcome as the summary has it."""
        return GuessOutcome(**asdict(self))


def by_rank(guessed: Guessed, ranks: int) -> dict[int, float]:
    """The value of each of `ranks` ranks; ranks without a value are left out."""
    if isinstance(guessed, (int, float)):
        return dict.fromkeys(range(ranks), guessed)
    return {rank: value for rank, value in guessed.items() if rank < ranks}


@per_revision
def outcomes(state: RunState) -> tuple[Outcome, ...]:
    """The outcome of each figure that the learner predicted, by rank; empty for a run without such predictions."""
    return tuple(
        _outcome(state, figure, rank, value)
        for name, figure in _known(state).items()
        for rank, value in _by_rank(figure, state.guess[name], state.world_size)
    )


def _known(state: RunState) -> dict[str, Figure]:
    """The figures of this run that the learner predicted."""
    return {name: figure for name, figure in FIGURES.items() if name in state.guess and not figure.compared}


def _by_rank(figure: Figure, guessed: Guessed, ranks: int) -> Iterable[tuple[int | None, float]]:
    if figure.of_rank:
        return by_rank(guessed, ranks).items()
    return [(None, guessed)] if isinstance(guessed, (int, float)) else []


def _outcome(state: RunState, figure: Figure, rank: int | None, guessed: float) -> Outcome:
    number = rank or 0
    predicted = figure.in_unit(figure.predicted(state, number))
    found = Outcome(figure.name, figure.unit, rank, guessed, predicted)
    measured = figure.in_unit(figure.measured(state, number)) if rank is None or rank in state.ranks else None
    if measured is None:
        return found
    found = replace(found, measured=measured, error=figure.error(guessed, measured))
    return replace(found, reason=_largest(figure, figure.parts(state, number))) if found.missed else found


def _largest(figure: Figure, parts: Parts) -> str:
    """`at the peak of a step: activations 30.1 MiB, gradients 8.2 MiB, optimizer 8.2 MiB`; empty without parts."""
    known = sorted(((part, name) for name, part in parts.items() if part), reverse=True)[:_NAMED]
    texts = (
        f"{name} {size(part) if figure.each == MIB else figure.in_words(part / figure.each)}" for part, name in known
    )
    return f"{figure.where}: {', '.join(texts)}" if known else ""


# ---- in words


def statement(figure: Figure, guessed: Guessed | dict[str, float]) -> str:
    """`peak memory 40 MiB per rank`, or with the value of each rank or strategy."""
    if isinstance(guessed, (int, float)):
        return f"{figure.label} {figure.in_words(guessed)}" + (" per rank" if figure.of_rank else "")
    where = "for" if figure.compared else "on rank"
    each = [f"{figure.in_words(value)} {where} {key}" for key, value in guessed.items()]
    return f"{figure.label} {', '.join(each[:_SHOWN])}{', …' if len(each) > _SHOWN else ''}"


def sentences(state: RunState) -> list[str]:
    """What to say about the predictions of a run: the learner's, with the outcome once the run is over, then the
    lab's."""
    return [*own_sentences(state), *about_the_plan(state)]


def own_sentences(state: RunState, reasons: bool = True) -> list[str]:
    """What to say about the learner's predictions: until the run is over, what they are; then the outcome of each, with
    the reason of a miss unless these are left out."""
    known = _known(state)
    if known and not state.over:
        said = "; ".join(statement(figure, state.guess[name]) for name, figure in known.items())
        return [f"You predict: {said}."]
    return [sentence for name in known for sentence in sentences_about(state, name, reasons)]


def sentences_about(state: RunState, name: str, reasons: bool = True) -> list[str]:
    """The outcome of the figure `name`: one sentence for all ranks with the same prediction."""
    groups: dict[float, list[Outcome]] = {}
    for one in outcomes(state):
        if one.figure == name:
            groups.setdefault(one.guessed, []).append(one)
    found = [_sentence(FIGURES[name], those, state.world_size, reasons) for those in list(groups.values())[:_SHOWN]]
    left = len(groups) - len(found)
    return found + (
        [f"{FIGURES[name].label.capitalize()}: {left:,} more predictions are in the summary."] if left else []
    )


def _sentence(figure: Figure, those: list[Outcome], of: int, reasons: bool) -> str:
    """`Peak memory: you predicted 40 MiB per rank; it was 52.1 MiB (−23 %). At the peak of a step: activations …`"""
    ranks = [one.rank for one in those if one.rank is not None]
    said = f"{figure.label.capitalize()}: you predicted {figure.in_words(those[0].guessed)}"
    if len(ranks) < of and ranks:
        said += f" on {'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"
    elif len(ranks) > 1:
        said += " per rank"
    known = [one.measured for one in those if one.measured is not None]
    if not known:
        return f"{said}; it was not measured."
    worst = max((one for one in those if one.measured is not None), key=lambda one: one.size_of_error)
    low, high = figure.in_words(min(known)), figure.in_words(max(known))
    said += f"; it was {high}" if low == high else f"; it was {significant(min(known))} to {high}"
    notes = [] if worst.error is None else [figure.error_in_words(worst.error)]
    notes += [f"on rank {worst.rank}"] if low != high else []
    said += f" ({' '.join(notes)})" if notes else ""
    said += "" if worst.predicted is None else f"; the lab predicted {figure.in_words(worst.predicted)}"
    return f"{said}. {worst.reason[0].upper()}{worst.reason[1:]}." if reasons and worst.reason else f"{said}."
