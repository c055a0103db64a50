"""The figures that a learner can predict. None is defined here: each is a figure of the summary, in a unit that is easy
to type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from labkit.analysis.metrics import phase_seconds, step_seconds, throughput
from labkit.analysis.prediction import predicted_timelines
from labkit.analysis.profiled import overlap
from labkit.common.units import significant
from labkit.record.documents import PredictedRank
from labkit.record.state import RunState, per_revision

NEAR = 0.1  # share of the measured value, or of 100 points; a larger error is a miss
MIB = 1 << 20  # as in the charts, and in torch's own `bucket_cap_mb`

Value = Callable[[RunState, int], float | None]  # of a rank; of a figure of the whole run, the rank has no effect
Parts = Mapping[str, float | None]


@dataclass(frozen=True)
class Figure:
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


def _owner(owner: str) -> Figure:
    def measured(state: RunState, rank: int) -> float | None:
        return state.ranks[rank].owners.get(owner)

    def predicted(state: RunState, rank: int) -> float | None:
        found = _plan(state).get(rank)
        return found.memory_bytes.get(owner) if found else None

    return Figure(f"{owner}_mb", f"memory of the {owner}", "MiB", MIB, measured, predicted)


@per_revision
def _plan(state: RunState) -> dict[int, PredictedRank]:
    return {one.rank: one for one in state.prediction.ranks} if state.prediction else {}


def _planned_peak(state: RunState, rank: int) -> float | None:
    found = _plan(state).get(rank)
    return found.peak_memory_bytes if found else None


def _planned_traffic(state: RunState, rank: int) -> float | None:
    found = _plan(state).get(rank)
    return found.comm_bytes_per_step if found else None


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
    return {op: one.sent for op, one in traffic.ops.items()} if traffic else {}


def _exposed(state: RunState, rank: int) -> float | None:
    one = state.ranks[rank].timeline
    return overlap(one)[1] if one else None


def _overlapped(state: RunState, rank: int) -> float | None:
    one = state.ranks[rank].timeline
    seconds, exposed = overlap(one) if one else (0.0, 0.0)
    return 1 - min(1.0, exposed / seconds) if seconds else None


def _accuracy(state: RunState, rank: int) -> float | None:
    found = state.metric("accuracy")
    return found if isinstance(found, (int, float)) else None


_OF_RANK = (
    Figure(
        "peak_mb",
        "peak memory",
        "MiB",
        MIB,
        measured=lambda state, rank: state.ranks[rank].peak_memory,
        predicted=_planned_peak,
        parts=_at_peak,
        where="at the peak of a step",
    ),
    *map(_owner, ("parameters", "gradients", "optimizer", "activations")),
    Figure(
        "sent_mb",
        "traffic per step",
        "MiB",
        MIB,
        measured=lambda state, rank: state.ranks[rank].bytes_per_step,
        predicted=_planned_traffic,
        parts=_operations,
        where="sent per step",
    ),
    Figure(
        "step_ms",
        "step time",
        "ms",
        1e-3,
        step_seconds,
        _planned_step,
        parts=phase_seconds,
        where="median of each phase",
    ),
    Figure("data_ms", "waiting for data", "ms", 1e-3, lambda state, rank: phase_seconds(state, rank)["data"]),
    Figure("exposed_ms", "exposed communication", "ms", 1e-3, _exposed),
    Figure("overlapped_percent", "overlapped communication", "%", 0.01, _overlapped),
)
_OF_RUN = (
    Figure(
        "samples_per_second",
        "throughput",
        "samples/s",
        1,
        lambda state, _: throughput(state),
        _planned_throughput,
        of_rank=False,
    ),
    Figure("steps", "number of steps", "", 1, lambda state, _: state.step, of_rank=False),
    Figure("loss", "loss", "", 1, lambda state, _: state.loss_at(), of_rank=False),
    Figure("accuracy_percent", "accuracy", "%", 0.01, _accuracy, of_rank=False),
)
SPEEDUP = Figure("speedup", "speed-up", "×", 1, of_rank=False, compared=True)
FIGURES: Mapping[str, Figure] = {figure.name: figure for figure in (*_OF_RANK, *_OF_RUN, SPEEDUP)}
