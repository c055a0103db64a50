"""The learner's own predictions: which figures can be guessed, and how near a guess was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from labkit.analysis.metrics import phase_seconds, step_seconds, throughput
from labkit.analysis.prediction import predicted_timelines, ranges
from labkit.analysis.prediction import sentences as about_the_plan
from labkit.analysis.profiled import overlap
from labkit.common.units import significant, size
from labkit.record.documents import Guessed, GuessOutcome, PredictedRank
from labkit.record.state import RunState, per_revision

# ---- the figures that a learner can predict


NEAR = 0.1  # share of the measured value, or of 100 points; a larger error is a miss
MIB = 1 << 20  # as in the charts, and in torch's own `bucket_cap_mb`

Value = Callable[[RunState, int], float | None]  # of a rank; of a figure of the whole run, the rank has no effect
Parts = Mapping[str, float | None]


@dataclass(frozen=True)
class Guessable:
    """A figure of each rank, or of the whole run: what is `measured`, and what the lab has `predicted`, in bytes,
    seconds or shares, of which a `unit` has `each`. One that is `compared` needs several runs, see `comparison.py`.

    A miss is explained with `parts`: bytes or seconds by name, of which `where` says what they are.
    """

    name: str
    label: str
    unit: str
    each: float
    measured: Value = lambda state, rank: None
    predicted: Value = lambda state, rank: None
    of_rank: bool = True
    compared: bool = False
    parts: Callable[[RunState, int], Parts] = lambda state, rank: {}
    where: str = ""

    def in_words(self, value: float) -> str:
        """A value in the unit of the figure: `40 MiB`."""
        return f"{significant(value)} {self.unit}".rstrip()

    def in_unit(self, value: float | None) -> float | None:
        """A measured or predicted value in the unit of the figure; None if it is unknown or not finite."""
        return None if value is None or not math.isfinite(value) else value / self.each

    def error(self, guessed: float, measured: float) -> float | None:
        """The prediction over the measured value, minus 1; of percentages, the difference of the shares. None if the
        measured value is 0 and the prediction is not."""
        if self.unit == "%":
            return (guessed - measured) / 100
        if not measured:
            return None if guessed else 0.0
        error = guessed / measured - 1
        return error if math.isfinite(error) else None

    def misses(self, guessed: float, measured: float) -> bool:
        """Whether a prediction is wrong by more than 10 %; of percentages, by more than 10 points."""
        error = self.error(guessed, measured)
        return error is None or abs(error) > NEAR

    def error_in_words(self, error: float) -> str:
        """`−23 %`, or `−23 points` of a percentage."""
        number = f"{100 * error:+,.{0 if abs(error) >= 0.01 else 1}f}".replace("-", "−")
        return f"{number} {'points' if self.unit == '%' else '%'}"


def _owner(owner: str) -> Guessable:
    def measured(state: RunState, rank: int) -> float | None:
        return state.ranks[rank].owners.get(owner)

    planned = _planned(lambda rank: rank.memory_bytes.get(owner))
    return Guessable(f"{owner}_mb", f"memory of the {owner}", "MiB", MIB, measured, planned)


@per_revision
def _plan(state: RunState) -> dict[int, PredictedRank]:
    return {predicted.rank: predicted for predicted in state.prediction.ranks} if state.prediction else {}


def _planned(value: Callable[[PredictedRank], float | None]) -> Value:
    """What the lab has predicted of a rank."""

    def predicted(state: RunState, rank: int) -> float | None:
        found = _plan(state).get(rank)
        return value(found) if found else None

    return predicted


def _planned_step(state: RunState, rank: int) -> float | None:
    timeline = predicted_timelines(state.prediction).get(rank) if state.prediction else None
    return timeline.seconds if timeline else None


def _planned_throughput(state: RunState, rank: int) -> float | None:
    time = state.prediction.time if state.prediction else None
    return time.samples_per_second if time else None


def _at_peak(state: RunState, rank: int) -> Parts:
    step = state.ranks[rank].memory_step
    return step.at_peak if step else {}


def _operations(state: RunState, rank: int) -> Parts:
    traffic = state.ranks[rank].traffic
    return {op: operation.sent for op, operation in traffic.ops.items()} if traffic else {}


def _exposed(state: RunState, rank: int) -> float | None:
    timeline = state.ranks[rank].timeline
    return overlap(timeline)[1] if timeline else None


def _overlapped(state: RunState, rank: int) -> float | None:
    timeline = state.ranks[rank].timeline
    seconds, exposed = overlap(timeline) if timeline else (0.0, 0.0)
    return 1 - min(1.0, exposed / seconds) if seconds else None


def _accuracy(state: RunState, rank: int) -> float | None:
    found = state.metric("accuracy")
    return found if isinstance(found, (int, float)) else None


_OF_RANK = (
    Guessable(
        "peak_mb",
        "peak memory",
        "MiB",
        MIB,
        measured=lambda state, rank: state.ranks[rank].peak_memory,
        predicted=_planned(lambda rank: rank.peak_memory_bytes),
        parts=_at_peak,
        where="at the peak of a step",
    ),
    *map(_owner, ("parameters", "gradients", "optimizer", "activations")),
    Guessable(
        "sent_mb",
        "traffic per step",
        "MiB",
        MIB,
        measured=lambda state, rank: state.ranks[rank].bytes_per_step,
        predicted=_planned(lambda rank: rank.comm_bytes_per_step),
        parts=_operations,
        where="sent per step",
    ),
    Guessable(
        "step_ms",
        "step time",
        "ms",
        1e-3,
        step_seconds,
        _planned_step,
        parts=phase_seconds,
        where="median of each phase",
    ),
    Guessable("data_ms", "waiting for data", "ms", 1e-3, lambda state, rank: phase_seconds(state, rank)["data"]),
    Guessable("exposed_ms", "exposed communication", "ms", 1e-3, _exposed),
    Guessable("overlapped_percent", "overlapped communication", "%", 0.01, _overlapped),
)
_OF_RUN = (
    Guessable(
        "samples_per_second",
        "throughput",
        "samples/s",
        1,
        lambda state, _: throughput(state),
        _planned_throughput,
        of_rank=False,
    ),
    Guessable("steps", "number of steps", "", 1, lambda state, _: state.step, of_rank=False),
    Guessable("loss", "loss", "", 1, lambda state, _: state.loss_at(), of_rank=False),
    Guessable("accuracy_percent", "accuracy", "%", 0.01, _accuracy, of_rank=False),
)
SPEEDUP = Guessable("speedup", "speed-up", "×", 1, of_rank=False, compared=True)
FIGURES: Mapping[str, Guessable] = {figure.name: figure for figure in (*_OF_RANK, *_OF_RUN, SPEEDUP)}


# ---- guess and measurement


_SHOWN = 8  # ranks with values of their own that are put into words
_NAMED = 3  # owners, phases or operations that explain a miss


@dataclass(frozen=True)
class Outcome:
    """A figure of one rank, or of the whole run (`rank` None), in its unit: `guessed` by the learner, `predicted` by
    the lab, `measured`. Unknown values are None. `error` is that of `Guessable.error`, and `reason` explains a miss."""

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
        """Whether the value is wrong, see `Guessable.misses`."""
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


def _known(state: RunState) -> dict[str, Guessable]:
    """The figures of this run that the learner predicted."""
    return {name: figure for name, figure in FIGURES.items() if name in state.guess and not figure.compared}


def _by_rank(figure: Guessable, guessed: Guessed, ranks: int) -> Iterable[tuple[int | None, float]]:
    if figure.of_rank:
        return by_rank(guessed, ranks).items()
    return [(None, guessed)] if isinstance(guessed, (int, float)) else []


def _outcome(state: RunState, figure: Guessable, rank: int | None, guessed: float) -> Outcome:
    number = rank or 0
    predicted = figure.in_unit(figure.predicted(state, number))
    found = Outcome(figure.name, figure.unit, rank, guessed, predicted)
    measured = figure.in_unit(figure.measured(state, number)) if rank is None or rank in state.ranks else None
    if measured is None:
        return found
    found = replace(found, measured=measured, error=figure.error(guessed, measured))
    return replace(found, reason=_largest(figure, figure.parts(state, number))) if found.missed else found


def _largest(figure: Guessable, parts: Parts) -> str:
    """`at the peak of a step: activations 30.1 MiB, gradients 8.2 MiB, optimizer 8.2 MiB`; empty without parts."""
    known = sorted(((part, name) for name, part in parts.items() if part), reverse=True)[:_NAMED]
    texts = (
        f"{name} {size(part) if figure.each == MIB else figure.in_words(part / figure.each)}" for part, name in known
    )
    return f"{figure.where}: {', '.join(texts)}" if known else ""


# ---- the run in words


def statement(figure: Guessable, guessed: Guessed | dict[str, float]) -> str:
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
    for outcome in outcomes(state):
        if outcome.figure == name:
            groups.setdefault(outcome.guessed, []).append(outcome)
    found = [_sentence(FIGURES[name], those, state.world_size, reasons) for those in list(groups.values())[:_SHOWN]]
    left = len(groups) - len(found)
    return found + (
        [f"{FIGURES[name].label.capitalize()}: {left:,} more predictions are in the summary."] if left else []
    )


def sentence_about(figure: Guessable, guessed: float, measured: float) -> str:
    """The outcome of a prediction whose value no run has measured."""
    outcome = Outcome(figure.name, figure.unit, None, guessed, None, measured, figure.error(guessed, measured))
    return _sentence(figure, [outcome], 1, reasons=False)


def _sentence(figure: Guessable, those: list[Outcome], of: int, reasons: bool) -> str:
    """`Peak memory: you predicted 40 MiB per rank; it was 52.1 MiB (−23 %). At the peak of a step: activations …`"""
    ranks = [outcome.rank for outcome in those if outcome.rank is not None]
    said = f"{figure.label.capitalize()}: you predicted {figure.in_words(those[0].guessed)}"
    if len(ranks) < of and ranks:
        said += f" on {'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"
    elif len(ranks) > 1:
        said += " per rank"
    known = [outcome.measured for outcome in those if outcome.measured is not None]
    if not known:
        return f"{said}; it was not measured."
    worst = max(
        (outcome for outcome in those if outcome.measured is not None), key=lambda outcome: outcome.size_of_error
    )
    low, high = figure.in_words(min(known)), figure.in_words(max(known))
    said += f"; it was {high}" if low == high else f"; it was {significant(min(known))} to {high}"
    notes = [] if worst.error is None else [figure.error_in_words(worst.error)]
    notes += [f"on rank {worst.rank}"] if low != high else []
    said += f" ({' '.join(notes)})" if notes else ""
    said += "" if worst.predicted is None else f"; the lab predicted {figure.in_words(worst.predicted)}"
    return f"{said}. {worst.reason[0].upper()}{worst.reason[1:]}." if reasons and worst.reason else f"{said}."
