"""The learner's own predictions: each waits in this session until the next run, which stores them in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.analysis.comparison import Row, guess_sentence
from labkit.analysis.guess import FIGURES, Guessable, outcomes, sentence_about, sentences_about, statement
from labkit.common.arguments import Number, check_choice, shown
from labkit.common.text import visible
from labkit.figures.tables import marked_html
from labkit.plan.spec import SpecError
from labkit.record.documents import GUESS, Guessed, Guesses
from labkit.record.events import RANKS
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.runs.notebook import headless, in_notebook, notebook
from labkit.training.strategies import BASELINE, STRATEGIES

_MOST = {"%": 100.0}  # by unit
_RANK = Number(int, 0, RANKS - 1)
_MARKS = {"right": "✓ close", "wrong": "✗ missed", "empty": "○ open"}
PENDING: dict[str, Guess] = {}  # by figure, for the next run


class Guess:
    """A predicted figure. It displays itself as a statement until its run is over, and then as the outcome; without a
    value (`guessed` None), as a request for one."""

    def __init__(self, figure: Guessable, guessed: Guessed | dict[str, float] | None):
        self.figure, self.guessed = figure, guessed
        self._follower: Follower | None = None
        self._rows: Callable[[], Sequence[Row]] | None = None
        self._measured: float | None = None

    def compared_in(self, rows: Callable[[], Sequence[Row]]) -> None:
        """Sets where the rows of the comparison are that the prediction is about."""
        self._rows = rows
        withdraw([self])

    def compared_with(self, measured: float) -> Guess:
        """Sets what the prediction is about if no run measures it: a value of your own, in the unit of the figure.
        Returns the prediction, which displays the outcome."""
        self._measured = float(Number(float, -1e15, 1e15).check("measured", measured))
        withdraw([self])
        return self

    def of(self, strategy: str) -> list[Guess]:
        """The same for one strategy of a comparison; empty if there is no value for it, and for the baseline."""
        each = self.guessed.get(strategy) if isinstance(self.guessed, dict) else self.guessed
        return [] if each is None or strategy == BASELINE.name else [Guess(self.figure, each)]

    def belongs_to(self, folder: RunFolder) -> None:
        """Sets the run that the prediction is stored with."""
        self._follower = Follower(folder)

    def outcome(self) -> tuple[str, str]:
        """`empty`, `right` or `wrong`, and what to say about it now."""
        if self.guessed is None:
            unit = f" (in {self.figure.unit})" if self.figure.unit else ""
            return "empty", f"Replace the three dots with your prediction: {self.figure.label}{unit}."
        said = f"You predict: {statement(self.figure, self.guessed)}."
        if self._measured is not None and isinstance(self.guessed, float):
            missed = self.figure.misses(self.guessed, self._measured)
            return "wrong" if missed else "right", sentence_about(self.figure, self.guessed, self._measured)
        if self._rows is not None:
            return self._of_rows(self._rows(), said)
        if self._follower is None:
            if PENDING.get(self.figure.name) is self:
                return "empty", f"{said} {'Compare' if self.figure.compared else 'Run'} it to see."
            return "empty", f"{said} A later prediction has replaced this one."
        self._follower.poll()
        state = self._follower.state
        if not state.over:
            return "empty", f"{said} Display it again when {self._follower.folder.name} is over."
        found = [
            outcome
            for outcome in outcomes(state)
            if outcome.figure == self.figure.name and outcome.measured is not None
        ]
        kind = ("wrong" if any(outcome.missed for outcome in found) else "right") if found else "empty"
        return kind, " ".join(sentences_about(state, self.figure.name))

    def _of_rows(self, rows: Sequence[Row], said: str) -> tuple[str, str]:
        if not all(row.over for row in rows):
            return "empty", f"{said} Display it again when the comparison is over."
        known = [row for row in rows if guess_sentence(row)]
        missed = any(self.figure.misses(row.guessed_speedup or 0.0, row.speedup or 0.0) for row in known)
        words = " ".join(map(guess_sentence, known)) or f"{said} It was not measured."
        return ("wrong" if missed else "right") if known else "empty", words

    def __repr__(self) -> str:
        kind, words = self.outcome()
        return visible(f"{_MARKS[kind]} {words}")

    def _repr_html_(self) -> str:
        kind, words = self.outcome()
        return marked_html("guess", kind, _MARKS[kind], words)


def guess(figure: str, value: Any) -> Guess:
    """Your own prediction of a figure of the next run: `guess("peak_mb", 40)`.

    The value is one number, or one per rank: a list, or `{0: 40, 1: 38}`. The next run that this session starts stores
    it; comparisons and claims do not. `speedup` is for the next comparison: one value, or one per strategy such as
    `{"ddp": 1.8}`. When displayed, it is a statement, and after the run the outcome. With three dots (`...`) as its
    value, it asks for one, and in an interactive notebook the next run does not start without it. The message of the
    `ValueError` for an unknown figure has the names of all.
    """
    known = FIGURES[check_choice("figure", figure, FIGURES)]
    made = PENDING[known.name] = Guess(known, None if value is ... else _checked(known, value))
    return made


def check_guess(figure: str, value: Any) -> None:
    """Raises `ValueError` for what is no value of a figure, as `guess` does."""
    _checked(FIGURES[figure], value)


def _checked(figure: Guessable, value: Any) -> Guessed | dict[str, float]:
    bounds = Number(float, 0.0, _MOST.get(figure.unit, 1e15))
    name = f"{figure.name} ({figure.unit})" if figure.unit else figure.name
    if isinstance(value, (str, bytes)) or not isinstance(value, (Mapping, Sequence)):
        return float(bounds.check(name, value))
    if figure.compared and isinstance(value, Mapping):
        named = (
            (check_choice(f"a strategy in {figure.name}", strategy, STRATEGIES), amount)
            for strategy, amount in value.items()
        )
        return {strategy: float(bounds.check(f"{name} of {strategy}", amount)) for strategy, amount in named}
    if not figure.of_rank:
        raise ValueError(f"{figure.name} is a figure of the whole run; give one value, got {shown(value)}")
    if not value:
        raise ValueError(f"{figure.name} must be one value, or one per rank, got {shown(value)}")
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {
        _RANK.check(f"a rank of {figure.name}", rank): float(bounds.check(f"{name} of rank {rank}", value_of_rank))
        for rank, value_of_rank in pairs
    }


def pending(ranks: int) -> list[Guess]:
    """What waits for a run of `ranks` ranks. Raises `SpecError` for a prediction of a rank that the run does not
    have, and as `ask_for` does."""
    pending = ask_for([guess for guess in PENDING.values() if not guess.figure.compared])
    for guess in pending:
        last = max(guess.guessed) if isinstance(guess.guessed, Mapping) else -1
        if last >= ranks:
            raise SpecError(
                "guess",
                f"{guess.figure.name} was predicted for rank {last}, but the last rank of this run is rank {ranks - 1};"
                f" call guess({guess.figure.name!r}, …) again with the values of {ranks} ranks, or with one value",
            )
    return pending


def ask_for(guesses: Sequence[Guess]) -> list[Guess]:
    """Those with a value. Others are withdrawn, and raise `SpecError` in a notebook with a learner, so that nothing
    runs before they have predicted it; a headless one runs."""
    open_ones = [guess for guess in guesses if guess.guessed is None]
    withdraw(open_ones)
    if open_ones and in_notebook() and not headless():
        figure = open_ones[0].figure
        raise SpecError(
            "guess",
            f'first your prediction, {figure.label}: replace the three dots in guess("{figure.name}", ...), and run'
            " that cell and this one again",
        )
    return [guess for guess in guesses if guess.guessed is not None]


def document(guesses: Sequence[Guess]) -> Guesses | None:
    """What a run folder stores; None without predictions."""
    figures = {guess.figure.name: guess.guessed for guess in guesses if guess.guessed is not None}
    if not figures:
        return None
    return Guesses(figures, v=GUESS, notebook=notebook() or None)


def attach(guesses: Sequence[Guess], folder: RunFolder) -> None:
    """Notes that a run has stored these predictions: they no longer wait."""
    for guess in guesses:
        guess.belongs_to(folder)
    withdraw(guesses)


def withdraw(guesses: Sequence[Guess]) -> None:
    """Removes these predictions from those that wait, unless a later one has replaced them."""
    for guess in guesses:
        if PENDING.get(guess.figure.name) is guess:
            del PENDING[guess.figure.name]
