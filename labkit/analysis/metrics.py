"""Every derived figure of speed, once: throughput, percentiles, efficiency, and the load of experts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy

from labkit.analysis.theory.formulas import SIX_ND, tokens_of_a_sample
from labkit.common.units import significant
from labkit.plan.spec import Spec
from labkit.record.documents import Plan, ReplicaFigures
from labkit.record.events import ReplicaMeasured
from labkit.record.ranks import RankState
from labkit.record.state import RunState, per_revision
from labkit.record.writer import PHASES

if TYPE_CHECKING:
    from labkit.record.reader import Column


# ---- the figures of speed


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
    return max(0, len(rank.steps) - rank.first_step - warm_up(rank))


def warm_up(rank: RankState) -> int:
    """How many first steps of an attempt count in no figure of a rank."""
    return 0 if rank.steady else WARM_UP


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
def phase_seconds_of_parts(state: RunState, number: int, parts: int) -> list[Mapping[str, float]]:
    """The current `phase_seconds` of rank `number` in each of several equally long parts of the steps; 0 if unknown."""
    rank = _rank(state, number)
    first = _begin(state, rank, now=True)
    cut = {phase: numpy.array_split(rank.steps.phases[phase].sample(first), parts) for phase in PHASES}
    return [
        {phase: float(numpy.nan_to_num(median(pieces[part]))) for phase, pieces in cut.items()} for part in range(parts)
    ]


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
    first = rank.first_step + warm_up(rank)
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
    if unknown. The first step is part of its own value only."""
    index = numpy.arange(first, last)
    begins = numpy.maximum(
        numpy.minimum(index, warm_up(rank)), index - _WINDOW + 1
    )  # of the window that ends with each step
    least = int(begins[0]) if len(begins) else first
    part = slice(rank.first_step + least, rank.first_step + last)
    sums = _measured(rank.steps.samples[part], rank.steps.seconds[part]).cumsum(axis=1)
    sums = numpy.concatenate([numpy.zeros((2, 1)), sums], axis=1)
    samples, seconds = sums[:, index + 1 - least] - sums[:, begins - least]
    rates: numpy.ndarray = numpy.divide(samples, seconds, out=numpy.full(len(index), math.nan), where=seconds > 0)
    return rates


def step_times(rank: RankState, part: slice, phase: str | None = None) -> numpy.ndarray:
    """The seconds of each of some steps of a rank, or of one of its phases; NaN if unknown."""
    column = rank.steps.seconds if phase is None else rank.steps.phases[phase]
    return column[part]


def step_throughput(rank: RankState, part: slice) -> numpy.ndarray:
    """A rank's samples per second in each of some steps, not averaged; NaN if unknown."""
    samples, seconds = _measured(rank.steps.samples[part], rank.steps.seconds[part])
    rates: numpy.ndarray = numpy.divide(samples, seconds, out=numpy.full(len(samples), math.nan), where=seconds > 0)
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
    known = [value for value in given if value]
    return batch / max(known) if known and len(known) == len(given) else None


# ---- the time of a run


@per_revision
def training_time(state: RunState) -> tuple[float, int]:
    """Seconds from the end of the warm-up to the last step or evaluation, and the number of steps in between; (0, 0)
    until every rank has such a step."""
    ranks = [rank for rank in state.ranks.values() if counted_steps(rank)]
    if not ranks or len(ranks) < state.world_size:
        return 0.0, 0
    if any(rank.first_step + warm_up(rank) < 1 for rank in ranks):
        return 0.0, 0  # when the first step began is not recorded
    begin = max(rank.steps.t[rank.first_step + warm_up(rank) - 1] for rank in ranks)
    end = max([rank.steps.t[-1] for rank in ranks] + [metric.t for metric in state.metrics if metric.t])
    return end - begin, min(counted_steps(rank) for rank in ranks)


@per_revision
def pace(state: RunState) -> float | None:
    """Mean seconds from the end of one step to the end of the next, with what comes between them, over the newest steps
    of the slowest rank; None if unknown."""
    paces = []
    for rank in state.ranks.values():
        times = rank.steps.t[max(rank.first_step, len(rank.steps) - RECENT) :]
        if len(times) > 1:
            paces.append(float(times[-1] - times[0]) / (len(times) - 1))
    return max(paces) if paces and max(paces) >= 0 else None


def seconds_left(state: RunState) -> float | None:
    """Seconds left at the current pace; None before the first steps, or if the number of steps is unknown."""
    total, of_a_step = state.total_steps, pace(state)
    return None if total is None or of_a_step is None else max(0, total - state.step) * of_a_step


# ---- replicas in threads of one process (dp)


def gil_wait(state: RunState) -> float | None:
    """The median share of time, over the newest steps, that a thread of dp's process waited for the GIL or a core."""
    found = median(event.gil_wait for event in state.in_threads if event.gil_wait is not None)
    return None if math.isnan(found) else found


def replica_figures(state: RunState) -> list[ReplicaFigures]:
    """Medians over the newest steps for each replica (thread) of dp; replica 0 has `extra` bytes. Empty without
    replicas."""
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


# ---- what the speed of a run means for its devices


@dataclass(frozen=True)
class Efficiency:
    """Per second: samples and tokens of all ranks, model FLOPs of a device; and MFU. Unknown values are None, and
    `mfu_missing` says why FLOP/s or MFU are; it is empty if they are known, and until the speed is."""

    samples_per_second: float | None
    tokens_per_second: float | None
    flops_per_device: float | None
    mfu: float | None
    mfu_missing: str

    @property
    def words(self) -> list[str]:
        """Those that are known: `1,650 samples/s`, `211,200 tokens/s`, `0.0512 TFLOP/s per device`, `MFU 31.0 %`."""
        found = []
        if self.samples_per_second is not None:
            found.append(f"{self.samples_per_second:,.0f} samples/s")
        if self.tokens_per_second is not None:
            found.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return [*found, f"{self.computed} per device"] if self.computed else found

    @property
    def computed(self) -> str:
        """`0.0512 TFLOP/s, MFU 31.0 %`; empty if unknown."""
        if self.flops_per_device is None:
            return ""
        said = f"{significant(self.flops_per_device / 1e12)} TFLOP/s"
        return said + (f", MFU {100 * self.mfu:.1f} %" if self.mfu is not None else "")


_OF_FILES = "FLOP/s are not known: the files of an imported run do not have the samples and operations of a step"


@per_revision
def efficiency(state: RunState, now: bool = False) -> Efficiency:
    """Of a run, as measured; with `now`, over the newest steps as in `metrics`."""
    steps = [step_seconds(state, number, now) for number in state.ranks]
    slowest = max((seconds for seconds in steps if seconds), default=None) if None not in steps else None
    found = _efficiency(state.asked, state.prediction, throughput(state, now), slowest)
    return replace(found, mfu_missing=_OF_FILES) if state.imported and found.mfu_missing else found


def predicted_efficiency(plan: Plan, spec: Spec | None) -> Efficiency:
    """Of the prediction of a Spec; nothing is known without the time of a step."""
    time = plan.time
    speed, seconds = (time.samples_per_second, time.seconds) if time else (None, None)
    return _efficiency(spec, plan, speed, seconds)


def _efficiency(spec: Spec | None, plan: Plan | None, speed: float | None, seconds: float | None) -> Efficiency:
    each = tokens_of_a_sample(spec) if spec else None
    tokens = speed * each if speed is not None and each else None
    if not seconds:
        return Efficiency(speed, tokens, None, None, "")
    if plan is None or plan.model_flops is None:
        return Efficiency(speed, tokens, None, None, f"FLOP/s are not known: {_without_flops(plan)}")
    flops = plan.model_flops / seconds / (plan.spec.nproc or 1)
    peak = plan.peak
    if peak is None or not peak.flops:
        why = peak.source if peak else "the prediction has no peak of the device"
        return Efficiency(speed, tokens, flops, None, f"MFU is not known: {why}")
    return Efficiency(speed, tokens, flops, flops / peak.flops, "")


def _without_flops(plan: Plan | None) -> str:
    if plan is None:
        return "they are counted by a prediction, and the run has none; predict it before it runs"
    is_traced = plan.method == "simulated"
    return "the prediction is of an earlier version" if is_traced else "the script could not be traced"


# ---- the run in words


def against_prediction(state: RunState, plan: Plan) -> list[str]:
    """Model FLOP/s and MFU, measured and predicted, and the peak or why it is not known; none without FLOPs."""
    measured, predicted = efficiency(state), predicted_efficiency(plan, state.asked)
    if not measured.computed:
        return []
    against = f"; {predicted.computed} was predicted" if predicted.computed else ""
    peak = measured.mfu_missing or (f"Peak: {plan.peak.source}" if plan.peak else "")
    return [f"Per device, {measured.computed} was measured{against}. {peak}."]


def flops_in_words(plan: Plan) -> str:
    """The model FLOPs of a step, what the ranks execute, and the textbook's estimate."""
    count = plan.model_flops
    if not count:
        return ""
    executed = sum(rank.flops or 0 for rank in plan.ranks)
    again = sum(rank.recomputed_flops or 0 for rank in plan.ranks)
    said = f"Model FLOPs of a step: {_gflop(count)}; all ranks execute {_gflop(executed)}"
    said += f", of which {_gflop(again)} recompute" if again else ""
    estimate = plan.six_nd
    said += f". 6ND: {_gflop(estimate)} ({estimate / count - 1:+.0%}), {SIX_ND}" if estimate else ""
    missing = predicted_efficiency(plan, plan.spec.to_spec()).mfu_missing
    return ". ".join(filter(None, (said, missing))) + "."


def _gflop(count: float) -> str:
    return f"{significant(count / 1e9)} GFLOP"


# ---- the load of experts


_NAME = re.compile(r"(?:experts\.)?expert (\d{1,4})")  # the metrics of the event `experts`


@per_revision
def expert_loads(state: RunState) -> tuple[int, dict[int, dict[int, float]]]:
    """The newest step that every rank with experts has logged, and in it the choices of each expert by rank and number
    of the expert, over all layers; (0, {}) if none was logged."""
    found: dict[int, dict[int, dict[int, float]]] = {}  # by step, rank and expert
    for metric in state.metrics:
        match = _NAME.fullmatch(str(metric.name))
        step, rank, value = metric.step, metric.rank, metric.value
        if match and isinstance(value, (int, float)) and step is not None and rank is not None and value >= 0:
            found.setdefault(int(step), {}).setdefault(rank, {})[int(match[1])] = float(value)
    most = max((len(ranks) for ranks in found.values()), default=0)
    step = max((step for step, ranks in found.items() if len(ranks) == most), default=0)
    return step, found.get(step, {})


def summed(loads: dict[int, dict[int, float]]) -> dict[int, float]:
    """The choices of each expert by all ranks, by number of the expert."""
    numbers = sorted({number for experts in loads.values() for number in experts})
    return {number: sum(experts.get(number, 0.0) for experts in loads.values()) for number in numbers}
