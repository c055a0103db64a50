"""The charts: one pure function from RunState to a Chart each. The axes show the units."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import partial

import numpy

from labkit.analysis.metrics import expert_loads, phase_seconds, rolling_throughput, summed
from labkit.analysis.nodes import nodes_in_words
from labkit.analysis.profiled import exposed, usual
from labkit.figures import colours
from labkit.figures.model import Axis, Bars, Chart, Derived, Line, Marks
from labkit.figures.profiled import OWN, guess_marks, memory_by_owner, memory_of_step, predicted_steps, timeline
from labkit.record.events import Timeline
from labkit.record.ranks import OtherLosses, RankState
from labkit.record.state import RunState
from labkit.record.steps import Column
from labkit.record.writer import PHASES


def loss(state: RunState) -> Chart:
    """The loss of every rank on its own part of the batch, and their mean, over steps; one more line per further
    optimizer.
    """
    ranks = _ranks(state)
    lines = [line for rank in ranks for line in _losses(rank)]
    if len(ranks) > 1:
        lines.append(_mean_loss(ranks))
    lines += [*_losses_of_others(ranks), *_guess_line(state, "loss")]
    return Chart("loss", "Loss", _steps_axis(state), Axis("loss", least=0.1), tuple(lines), note=nodes_in_words(state))


def _losses(rank: RankState) -> list[Line]:
    """A rank's loss, one line per attempt; interrupted attempts are dotted."""
    starts = rank.attempts or {0: 0}
    ends = [*list(starts.values())[1:], len(rank.steps)]
    lines = []
    for (attempt, start), end in zip(starts.items(), ends):
        last = attempt == rank.attempt
        steps, losses = (_part(column, start, end) for column in (rank.steps.step, rank.steps.loss))
        key = f"rank{rank.rank}" if attempt == 0 else f"rank{rank.rank}-attempt{attempt}"
        name = f"rank {rank.rank}" if attempt == 0 else f"rank {rank.rank}, attempt {attempt}"
        name = _named(name, rank.pacemaker_name)
        colour = colours.rank_colour(rank.rank)
        lines.append(
            Line(
                key,
                name,
                steps,
                losses,
                colour=colour,
                width=1.3,
                keep="extremes",
                dash="solid" if last else "dot",
                in_legend=last,
            )
        )
    return lines


def _part(column: Column, start: int, end: int) -> Derived:
    """A column from index `start` to `end`."""
    return Derived(end - start, lambda first, last: column[start + first : start + last])


def _mean_loss(ranks: list[RankState]) -> Line:
    """The mean over ranks in the newest attempt, the only one in which the steps of all ranks line up."""
    starts = [rank.attempts.get(rank.attempt, 0) for rank in ranks]
    length = min(len(rank.steps) - start for rank, start in zip(ranks, starts))

    def values(first: int, last: int) -> numpy.ndarray:
        return _mean([rank.steps.loss[start + first : start + last] for rank, start in zip(ranks, starts)])

    def steps(first: int, last: int) -> numpy.ndarray:
        return ranks[0].steps.step[starts[0] + first : starts[0] + last]

    key = "mean" + "".join(f"-{rank.attempt}" for rank in ranks)
    name = _named("mean", ranks[0].pacemaker_name)
    return Line(key, name, Derived(length, steps), Derived(length, values), width=2.2, keep="extremes")


def _losses_of_others(ranks: list[RankState]) -> list[Line]:
    """For each optimizer except the pacemaker, the mean of its losses over ranks, at its own steps."""
    lines: list[Line] = []
    for which in sorted({which for rank in ranks for which in rank.losses}):
        columns = [rank.losses[which] for rank in ranks if which in rank.losses]
        length = min(len(column.loss) for column in columns)

        def values(first: int, last: int, columns: list[OtherLosses] = columns) -> numpy.ndarray:
            return _mean([numpy.asarray(column.loss[first:last]) for column in columns])

        def steps(first: int, last: int, column: OtherLosses = columns[0]) -> numpy.ndarray:
            return numpy.asarray(column.step[first:last])

        name = _named("mean" if len(ranks) > 1 else f"rank {ranks[0].rank}", ranks[0].optimizers.get(which))
        dash = ("dash", "dot", "dashdot")[len(lines) % 3]
        lines.append(
            Line(
                f"optimizer{which}",
                name,
                Derived(length, steps),
                Derived(length, values),
                width=2.2,
                keep="extremes",
                dash=dash,
            )
        )
    return lines


def _named(name: str, optimizer: str | None) -> str:
    return f"{name}, {optimizer}" if optimizer else name


def throughput(state: RunState) -> Chart:
    """Samples per second over all ranks, each sample counted once, over steps; a mean over the last 10 steps."""
    ranks, counts = _ranks(state), state.sample_weights()
    starts = [rank.attempts.get(rank.attempt, 0) for rank in ranks]
    length = min((len(rank.steps) - start for rank, start in zip(ranks, starts)), default=0)

    def values(first: int, last: int) -> numpy.ndarray:
        rates = (counts[rank.rank] * rolling_throughput(rank, first, last) for rank in ranks if counts[rank.rank])
        return sum(rates, numpy.zeros(last - first))

    def steps(first: int, last: int) -> numpy.ndarray:
        return ranks[0].steps.step[starts[0] + first : starts[0] + last]

    key = "all" + "".join(f"-{rank.attempt}" for rank in ranks)
    line = Line(key, "all ranks", Derived(length, steps), Derived(length, values), width=2.0, in_legend=False)
    lines = (line, *_guess_line(state, "samples_per_second"))
    return Chart("throughput", "Throughput, all ranks", _steps_axis(state), Axis("samples/s", least=10.0), lines)


def _guess_line(state: RunState, name: str) -> list[Line]:
    """What the learner predicted of a figure of the whole run, as a level over all steps, if their number is known."""
    level, end = state.guess.get(name), state.total_steps
    if end is None or not isinstance(level, (int, float)):
        return []
    return [Line("guess", OWN, [0.0, float(end)], [level, level], colour=colours.GUESS, dash="dash")]


def memory(state: RunState) -> Chart:
    """Each rank's memory over time: allocated, the peak of the step, and on CUDA reserved and in use on the whole
    device.
    """
    ranks = _ranks(state)
    axis = _memory_axis(state)
    line = partial(Line, x_zero=_zero(state), y_unit=axis.bytes_each)
    lines = []
    for rank in ranks:
        key, t, sizes, colour = f"rank{rank.rank}", rank.steps.t, rank.steps.memory, colours.rank_colour(rank.rank)
        lines.append(line(f"{key}-now", f"rank {rank.rank}", t, sizes["allocated"], colour=colour))
        peak = f"rank {rank.rank} peak"
        lines.append(
            line(f"{key}-peak", peak, t, sizes["peak"], colour=colour, dash="dot", keep="extremes", in_legend=False)
        )
        if len(rank.steps) and math.isfinite(sizes["reserved"][-1]):
            name = f"rank {rank.rank} reserved"
            lines.append(line(f"{key}-reserved", name, t, sizes["reserved"], colour=colour, width=0.8, in_legend=False))
        device = _device(state, rank)
        if device:
            name = f"device of rank {rank.rank}"
            lines.append(
                line(
                    f"{key}-device",
                    name,
                    device["t"],
                    device["memory_used"],
                    colour=colour,
                    dash="dash",
                    in_legend=False,
                )
            )
    devices = [rank.device for rank in state.ranks.values()] or [state.spec.device or ""]
    on_cuda = any(device.startswith("cuda") for device in devices)
    title = "Memory per GPU" if on_cuda else "Memory per CPU rank"
    note = "thin: reserved, dotted: peak, dashed: whole device" if on_cuda else "live tensors, dotted: peak"
    return Chart("memory", title, Axis("seconds since start", least=10.0), axis, tuple(lines), note=note)


def _device(state: RunState, rank: RankState) -> dict[str, array[float]] | None:
    """The supervisor's samples of the GPU that a rank trains on; None if there are none."""
    number = rank.device.removeprefix("cuda:")
    return state.system.gpus.get(int(number)) if number.isdigit() else None


def _memory_axis(state: RunState) -> Axis:
    """The memory axis, in the unit that suits the newest values."""
    columns: list[Sequence[float]] = [column for rank in state.ranks.values() for column in rank.steps.memory.values()]
    columns += [gpu["memory_used"] for gpu in state.system.gpus.values()]
    largest = max((column[-1] for column in columns if len(column) and math.isfinite(column[-1])), default=0.0)
    return Axis.of_bytes(largest)


_FEW = 4  # bars at most that have their whole names below them


def phases(state: RunState) -> Chart:
    """The time of a step by phase, per rank: the medians of the summary in milliseconds, stacked. A run whose step was
    predicted has the simulated times of each rank before the measured ones."""
    ranks = {rank.rank: rank for rank in _ranks(state)}
    predicted = predicted_steps(state)
    measured = {
        number: _measured_phases(state, rank) for number, rank in ranks.items() if len(rank.steps) or not predicted
    }
    simulated = {number: _predicted_phases(step) for number, step in predicted.items()}
    stacks = [
        (f"rank {number}{kind}", number, *times[number])
        for number in sorted({**simulated, **measured})
        for kind, times in ((" simulated", simulated), ("", measured))
        if number in times
    ]
    bars = [
        Bars(phase, colours.PHASES[phase], tuple(busy.get(phase, 0.0) for *_, busy, _ in stacks))
        for phase in PHASES
        if phase != "copy" or any(busy.get(phase) for *_, busy, _ in stacks)
    ]
    profiled = any(usual(rank) for rank in ranks.values())
    if profiled or predicted:
        bars.append(Bars("communication", colours.COMMUNICATION, tuple(waits for *_, waits in stacks)))
    note = "median; communication: exposed" if profiled else "median"
    names = tuple(name for name, *_ in stacks)
    many = len(names) > _FEW  # numbers then stand below the bars, which are narrower than "rank 0"
    labels = tuple(name.removeprefix("rank " if many else "").replace(" simulated", "\nsim.") for name in names)
    x = Axis("rank" if many else "", categories=names, labels=labels)
    y = Axis("ms per step", least=1.0)
    marks = guess_marks(state, "step_ms", [number for _, number, *_ in stacks], 0.001)
    return Chart("phases", "Where a step's time goes", x, y, bars=tuple(bars), marks=marks, note=note)


def _measured_phases(state: RunState, rank: RankState) -> tuple[dict[str, float], float]:
    """Milliseconds by phase without exposed communication, and those of it."""
    shares = exposed(rank)
    whole = {phase: 1000 * (seconds or 0.0) for phase, seconds in phase_seconds(state, rank.rank).items()}
    waits = {phase: shares.get(phase, 0.0) * spent for phase, spent in whole.items()}
    return {phase: spent - waits[phase] for phase, spent in whole.items()}, sum(waits.values())


def _predicted_phases(step: Timeline) -> tuple[dict[str, float], float]:
    busy: dict[str, float] = {}
    for phase, start, end in step.phases:
        busy[phase] = busy.get(phase, 0.0) + 1000 * (end - start)
    for phase, seconds in step.exposed.items():
        busy[phase] = busy.get(phase, 0.0) - 1000 * seconds
    return busy, 1000 * sum(step.exposed.values())


def experts(state: RunState) -> Chart:
    """How often each expert was chosen in the newest step that the ranks logged, stacked by rank."""
    step, loads = expert_loads(state)
    total = summed(loads)
    bars = tuple(
        Bars(f"rank {rank}", colours.rank_colour(rank), tuple(own.get(number, 0.0) for number in total))
        for rank, own in sorted(loads.items())
    )
    even = sum(total.values()) / max(len(total), 1)
    marks = (Marks("even load", colours.INK, (even,) * len(total)),) if total else ()
    x = Axis("expert", categories=tuple(map(str, total)) or ("",))
    note = f"all layers, step {step}" if total else "no mixture of experts"
    return Chart("experts", "Choices per expert", x, Axis("choices"), bars=bars, marks=marks, note=note)


CHARTS = {
    chart.__name__: chart
    for chart in (loss, throughput, memory, phases, timeline, memory_by_owner, memory_of_step, experts)
}


def _ranks(state: RunState) -> list[RankState]:
    """The ranks in order; before the first step of any rank, also the ranks that have not started."""
    known = dict(state.ranks)
    if not any(len(rank.steps) for rank in known.values()):
        known = {number: RankState(number) for number in range(state.world_size)} | known
    return [rank for _, rank in sorted(known.items())]


def _steps_axis(state: RunState) -> Axis:
    return Axis("step", end=state.total_steps, least=10.0)


def _zero(state: RunState) -> float:
    """When the run started, in unix seconds: from its status, or else from the first rank that started."""
    started = [rank.started for rank in state.ranks.values() if rank.started]
    return state.status.started or min(started, default=0.0)


def _mean(columns: list[numpy.ndarray]) -> numpy.ndarray:
    """The mean at each step over the ranks whose value is finite; NaN if there are none."""
    rows = numpy.stack(columns)
    known = numpy.isfinite(rows)
    number = known.sum(axis=0)
    means: numpy.ndarray = numpy.divide(
        numpy.where(known, rows, 0.0).sum(axis=0), number, out=numpy.full(rows.shape[1], math.nan), where=number > 0
    )
    return means
