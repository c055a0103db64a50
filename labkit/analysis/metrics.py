"""The figures of speed: one definition of each, for the summary, comparison, claims, charts, findings and front ends.

**Which steps count.** The first step of an attempt is warm-up: it builds buckets, caches, kernels and optimizer state,
and can take many times as long as the others. It counts in no figure. Steps before a restart do not count either:
figures are those of the newest attempt, like the step of a run. Until its second step, a rank has no figure of speed.

**Which of them.** A figure is of all these steps, or, with `now`, of the newest `RECENT` ones while the run is under
way: the front ends show what happens now, and findings judge it. Once the run is over, both are the same. While it is
under way, medians and percentiles of more than 2,000 steps are estimated from about 1,000 evenly spaced ones, because
charts are redrawn several times per second; afterwards they are exact, up to a million steps.

**Median or mean.** The time of a step and of its phases is a median, because a few steps take longer for another
reason, such as a profile or a checkpoint. Throughput is samples / seconds over these steps, in which every second
counts. An evaluation belongs to no step: only `training_time` and `pace` contain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy

from labkit.record.documents import ReplicaFigures
from labkit.record.events import ReplicaMeasured
from labkit.record.ranks import RankState
from labkit.record.state import per_revision
from labkit.record.writer import PHASES

if TYPE_CHECKING:
    from labkit.record.state import RunState
    from labkit.record.steps import Column

WARM_UP = 1  # first steps of an attempt that count in no figure
RECENT = 50  # newest steps that show what happens now
USUAL = 8  # from this step on, a profiled step counts as typical: before it, buckets and caches are still being built
_WINDOW = 10  # steps over which a point of the rolling throughput is averaged
_EXACT = 1 << 20  # most steps of a rank whose median is exact when the run is over


def median(values: Iterable[float]) -> float:
    """The median of the known values; NaN if there are none."""
    known = _known(values)
    return float(numpy.median(known)) if len(known) else math.nan


def percentile_95(values: Iterable[float]) -> float:
    """The 95th percentile of the known values, interpolated linearly between two of them; NaN if there are none."""
    known = _known(values)
    return float(numpy.percentile(known, 95)) if len(known) else math.nan


def quartiles(values: Iterable[float]) -> tuple[float, float]:
    """The lower and the upper quartile of the known values, interpolated linearly between two of them; NaN if there are
    none."""
    known = _known(values)
    return (float(numpy.percentile(known, 25)), float(numpy.percentile(known, 75))) if len(known) else (math.nan,) * 2


def _known(values: Iterable[float]) -> numpy.ndarray:
    numbers = numpy.asarray(values if isinstance(values, numpy.ndarray) else list(values), float)
    known: numpy.ndarray = numbers[~numpy.isnan(numbers)]
    return known


def counted_steps(rank: RankState) -> int:
    """The number of steps of a rank that count in its figures."""
    return max(0, len(rank.steps) - rank.first_step - WARM_UP)


# ---- the time of a step


@per_revision
def step_seconds(state: RunState, number: int, now: bool = False) -> float | None:
    """The median seconds of a step of rank `number`; None if unknown."""
    rank = _rank(state, number)
    return _figure(median, state, rank, rank.steps.seconds, now)


@per_revision
def step_seconds_p95(state: RunState, number: int) -> float | None:
    """The 95th percentile of the seconds of a step of rank `number`: one step in 20 takes longer; None if unknown."""
    rank = _rank(state, number)
    return _figure(percentile_95, state, rank, rank.steps.seconds)


@per_revision
def phase_seconds(state: RunState, number: int, now: bool = False) -> Mapping[str, float | None]:
    """By phase of a step, the median seconds that rank `number` spends in it; None if unknown.

    Medians of the phases need not sum to the median of the step.
    """
    rank = _rank(state, number)
    return {phase: _figure(median, state, rank, rank.steps.phases[phase], now) for phase in PHASES}


@per_revision
def phase_shares(state: RunState) -> Mapping[str, float]:
    """By phase, its share of a step of the rank with the longest median step; they sum to 1. Empty if unknown."""
    slowest = max(state.ranks, key=lambda number: step_seconds(state, number) or 0.0, default=0)
    known = {phase: seconds or 0.0 for phase, seconds in phase_seconds(state, slowest).items()}
    total = sum(known.values())
    return {phase: seconds / total for phase, seconds in known.items()} if total else {}


def _rank(state: RunState, number: int) -> RankState:
    return state.ranks.get(number) or RankState(number)


def _begin(state: RunState, rank: RankState, now: bool) -> int:
    """The index of the first step that counts."""
    first = rank.first_step + WARM_UP
    return max(first, len(rank.steps) - RECENT) if now and not state.over else first


def _figure(
    figure: Callable[[numpy.ndarray], float], state: RunState, rank: RankState, column: Column, now: bool = False
) -> float | None:
    """The median or the percentile of a column over the steps that count."""
    first = _begin(state, rank, now)
    is_exact = len(column) - first <= (_EXACT if now or state.over else 0)
    found = figure(column[first:] if is_exact else column.sample(first))
    return None if math.isnan(found) else found


# ---- samples per second


@per_revision
def throughput(state: RunState, now: bool = False) -> float | None:
    """Samples per second over all ranks, each sample counted once (see sources.py); None if unknown.

    Only the time of training steps counts, not that of evaluations between them.
    """
    weights = state.sample_weights()
    return sum(weights[number] * (rank_throughput(state, number, now) or 0.0) for number in state.ranks) or None


@per_revision
def rank_throughput(state: RunState, number: int, now: bool = False) -> float | None:
    """Samples per second that rank `number` trains on in its steps; None if unknown."""
    steps = _rank(state, number).steps
    first, sums = _begin(state, _rank(state, number), now), numpy.zeros(2)
    for samples, seconds in zip(steps.samples.pieces(first), steps.seconds.pieces(first)):
        sums += _measured(samples, seconds).sum(axis=1)
    return float(sums[0] / sums[1]) if sums[1] > 0 else None


def rolling_throughput(rank: RankState, first: int, last: int) -> numpy.ndarray:
    """A rank's samples per second after each step from `first` to `last` of its newest attempt, over 10 steps each; NaN
    if unknown. The first step is part of its own value only.
    """
    index = numpy.arange(first, last)
    begins = numpy.maximum(numpy.minimum(index, WARM_UP), index - _WINDOW + 1)  # of the window that ends with each step
    least = int(begins[0]) if len(begins) else first
    part = slice(rank.first_step + least, rank.first_step + last)
    sums = _measured(rank.steps.samples[part], rank.steps.seconds[part]).cumsum(axis=1)
    sums = numpy.concatenate([numpy.zeros((2, 1)), sums], axis=1)
    samples, seconds = sums[:, index + 1 - least] - sums[:, begins - least]
    rates: numpy.ndarray = numpy.divide(samples, seconds, out=numpy.full(len(index), math.nan), where=seconds > 0)
    return rates


def _measured(samples: numpy.ndarray, seconds: numpy.ndarray) -> numpy.ndarray:
    """Samples and seconds of steps as two rows, both 0 for a step of which one is unknown."""
    return numpy.where(numpy.isfinite(samples) & (seconds > 0), (samples, seconds), 0.0)


def throughput_of_median_steps(batch: int, medians: Iterable[float | None]) -> float | None:
    """Samples per second at the median step of the slowest rank, from the global batch size and the median of each rank
    (`step_seconds_median` in a summary); None if one is unknown.

    It compares runs of a few steps, in which a single profiled step would change the mean.
    """
    given = list(medians)
    known = [one for one in given if one]
    return batch / max(known) if known and len(known) == len(given) else None


# ---- the time of a run


@per_revision
def training_time(state: RunState) -> tuple[float, int]:
    """Seconds from the end of the warm-up to the last step or evaluation, and the number of steps in between; (0, 0)
    until every rank has such a step.
    """
    ranks = [rank for rank in state.ranks.values() if counted_steps(rank)]
    if not ranks or len(ranks) < state.world_size:
        return 0.0, 0
    begin = max(rank.steps.t[rank.first_step + WARM_UP - 1] for rank in ranks)
    end = max([rank.steps.t[-1] for rank in ranks] + [metric.t for metric in state.metrics if metric.t])
    return end - begin, min(counted_steps(rank) for rank in ranks)


@per_revision
def pace(state: RunState) -> float | None:
    """Mean seconds from the end of one step to the end of the next, with what comes between them, over the newest steps
    of the slowest rank; None if unknown.
    """
    paces = []
    for rank in state.ranks.values():
        times = rank.steps.t[max(rank.first_step, len(rank.steps) - RECENT) :]
        if len(times) > 1:
            paces.append(float(times[-1] - times[0]) / (len(times) - 1))
    return max(paces) if paces and max(paces) >= 0 else None


def seconds_left(state: RunState) -> float | None:
    """Seconds left at the current pace; None before the first steps, or if the number of steps is unknown."""
    total, each = state.total_steps, pace(state)
    return None if total is None or each is None else max(0, total - state.step) * each


# ---- replicas in threads of one process (dp)


def gil_wait(state: RunState) -> float | None:
    """The median share of time, over the newest steps, that a thread of dp's process waited for the GIL or a core."""
    found = median(event.gil_wait for event in state.in_threads if event.gil_wait is not None)
    return None if math.isnan(found) else found


def replica_figures(state: RunState) -> list[ReplicaFigures]:
    """Medians over the newest steps for each replica (thread) of dp; replica 0 has `extra` bytes. Empty without
    replicas.
    """
    measured: dict[int, list[ReplicaMeasured]] = {}
    for event in state.in_threads:
        for replica in event.replicas:
            measured.setdefault(replica.replica, []).append(replica)
    figures = [
        ReplicaFigures(
            replica=number,
            device=steps[-1].device,
            forward=median(step.forward for step in steps),
            cpu=median(step.cpu for step in steps),
            samples=median(step.samples for step in steps),
            memory=median(step.memory for step in steps),
        )
        for number, steps in sorted(measured.items())
    ]
    if figures:
        figures[0].extra = state.in_threads[-1].extra
    return figures
