"""The charts: one pure function from RunState to a Chart each. The axes show the units."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy

from labkit.analysis.guess import FIGURES, by_rank
from labkit.analysis.metrics import expert_loads, phase_seconds, rolling_throughput, summed
from labkit.analysis.prediction import as_profiled, predicted_timelines
from labkit.analysis.profiled import ahead, aligned, beyond, clocks, exposed, newest, overlap, usual
from labkit.analysis.summary import nodes_in_words
from labkit.common.units import counted, size
from labkit.figures import colours
from labkit.figures.model import Axis, Bars, Chart, Derived, Line, Marks, Spans, Stretch
from labkit.record.documents import Plan, PredictedRank, PredictedStep
from labkit.record.events import MemoryStep, Owners, Span, Timeline
from labkit.record.ranks import OtherLosses, RankState
from labkit.record.reader import Column
from labkit.record.state import RunState
from labkit.record.writer import OWNERS, PHASES


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
        name, colour = _named(name, rank.pacemaker_name), colours.rank_colour(rank.rank)
        dash = "solid" if last else "dot"
        lines.append(Line(key, name, steps, losses, colour, 1.3, dash, keep="extremes", in_legend=last))
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

    steps = _part(ranks[0].steps.step, starts[0], starts[0] + length)
    key = "mean" + "".join(f"-{rank.attempt}" for rank in ranks)
    name = _named("mean", ranks[0].pacemaker_name)
    return Line(key, name, steps, Derived(length, values), width=2.2, keep="extremes")


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
        losses = Derived(length, values)
        lines.append(
            Line(f"optimizer{which}", name, Derived(length, steps), losses, width=2.2, dash=dash, keep="extremes")
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

    steps = _part(ranks[0].steps.step, starts[0], starts[0] + length) if ranks else Derived(0, values)
    key = "all" + "".join(f"-{rank.attempt}" for rank in ranks)
    line = Line(key, "all ranks", steps, Derived(length, values), width=2.0, in_legend=False)
    lines = (line, *_guess_line(state, "samples_per_second"))
    return Chart("throughput", "Throughput, all ranks", _steps_axis(state), Axis("samples/s", least=10.0), lines)


def _guess_line(state: RunState, name: str) -> list[Line]:
    """What the learner predicted of a figure of the whole run, as a level over all steps, if their number is known."""
    level, end = state.guess.get(name), state.total_steps
    if end is None or not isinstance(level, (int, float)):
        return []
    return [Line("guess", OWN, [0.0, float(end)], [level, level], colour=colours.GUESS, dash="dash", is_level=True)]


def memory(state: RunState) -> Chart:
    """Each rank's memory over time: allocated, the peak of the step, and on CUDA reserved and in use on the whole
    device.
    """
    ranks = _ranks(state)
    axis = _memory_axis(state)
    lines = []
    for rank in ranks:
        key, name, t, sizes = f"rank{rank.rank}", f"rank {rank.rank}", rank.steps.t, rank.steps.memory
        line = partial(Line, colour=colours.rank_colour(rank.rank), x_zero=_zero(state), y_unit=axis.bytes_each)
        thin = partial(line, in_legend=False)
        lines.append(line(f"{key}-now", name, t, sizes["allocated"]))
        lines.append(thin(f"{key}-peak", f"{name} peak", t, sizes["peak"], dash="dot", keep="extremes"))
        if len(rank.steps) and math.isfinite(sizes["reserved"][-1]):
            lines.append(thin(f"{key}-reserved", f"{name} reserved", t, sizes["reserved"], width=0.8))
        if device := _device(state, rank):
            used = device["memory_used"]
            lines.append(thin(f"{key}-device", f"device of {name}", device["t"], used, dash="dash"))
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


_FEW = 2  # bars at most that have their whole names below them


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


def _ranks(state: RunState) -> list[RankState]:
    """The ranks in order; before the first step of any rank, also the ranks that have not started."""
    known = dict(state.ranks)
    if not any(len(rank.steps) for rank in known.values()):
        known = {number: RankState(number) for number in state.listed_ranks} | known
    return [rank for _, rank in sorted(known.items())]


def _steps_axis(state: RunState) -> Axis:
    return Axis("step", end=state.total_steps, least=10.0, grows=True)


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


# ---- the charts of profiled steps: the timeline of all ranks, and the memory by owner

_PIXELS = 1500  # the resolution of the time axis: narrower stretches are merged
_FEW_RANKS = 4  # ranks with a predicted bar each
WIDE = 10  # bars with a label of two lines each
_NONE = "no profiled step yet"
OWN = "your guess"


def timeline(state: RunState, step: int | None = None) -> Chart:
    """One profiled step (default: the newest that all ranks have): per rank a lane of computation and a lane of
    communication. A run whose step was predicted has the predicted lanes of each rank before the measured ones.
    """
    step = newest(state) if step is None else step
    found = {rank.rank: rank.timelines[step] for rank in _ranks(state) if step in rank.timelines}
    predicted = predicted_steps(state)
    if not found and not predicted:
        return Chart("timeline", "Timeline of a step", Axis("ms", end=1.0), Axis("", categories=("",)), note=_NONE)
    shifts, how = aligned(found, ahead(state)) if found else ({}, "")
    drawn = [
        (rank, kind, one, shifts.get(rank, 0.0) if steps is found else 0.0)
        for rank in sorted({**predicted, **found})
        for kind, steps in ((" predicted", predicted), ("", found))
        if (one := steps.get(rank))
    ]
    width = max(shift + timeline.seconds for _, _, timeline, shift in drawn)
    lanes = tuple(name for rank, kind, *_ in drawn for name in (f"rank {rank}{kind}", f"comm {rank}{kind}"))
    computed: dict[str, list[Stretch]] = {phase: [] for phase in PHASES}
    sent: dict[str, list[Stretch]] = {}
    for index, (rank, kind, timeline, shift) in enumerate(drawn):
        both = ((2 * index, computed, _computing), (2 * index + 1, sent, _sending))
        for lane, stretches, found_in in both:
            for name, start, end, words in found_in(timeline, width / _PIXELS):
                stretch = (lane, _ms(start + shift), _ms(end + shift), f"rank {rank}{kind}: {words}")
                stretches.setdefault(name, []).append(stretch)
    spans = [
        Spans(phase, colours.PHASES.get(phase, colours.INK), tuple(those)) for phase, those in computed.items() if those
    ]
    spans += [Spans(op, colours.OPERATIONS.get(op, colours.OTHER_OPERATION), tuple(sent[op])) for op in sorted(sent)]
    missing = state.world_size - len(found) if found else 0
    notes = [_overlap_in_words(found)] if found else []
    notes += ["predicted: simulated"] if predicted else []
    notes += [how] if how else []
    notes += [
        f"clock of {host} corrected by {_ms(-clock.seconds):+.2f} ± {_ms(clock.uncertainty):.2f} ms"
        for host, clock in clocks(state).items()
    ]
    notes += [f"no timeline of {counted(missing, 'rank')}"] if missing else []
    left_out = max((timeline.left_out for timeline in found.values()), default=0)
    notes += [f"the last {left_out:,} collectives are omitted"] if left_out else []
    if any(timeline.backend == "gloo" for timeline in found.values()):
        notes.append("gloo: from queued to completed")
    title = f"Step {step}" if found else "A step, as predicted"
    if any(timeline.calls_only for timeline in found.values()):
        title = "The recorded collectives"
    x, y = Axis("ms", end=_ms(width)), Axis("", categories=lanes)
    return Chart("timeline", title, x, y, spans=tuple(spans), note=" · ".join(filter(None, notes)))


def _computing(step: Timeline, least: float) -> Iterator[tuple[str, float, float, str]]:
    """When the rank computed, phase by phase: phase, start, end and hover text; stretches too narrow to see are
    merged."""
    many = Counter(name for name, *_ in step.phases)
    numbers: Counter[str] = Counter()
    for name, start, end in step.phases:
        numbers[name] += 1
        is_one_of_many = many[name] > 1 and name in ("forward", "backward")
        which = f"{name} {numbers[name]} of {many[name]}" if is_one_of_many else name
        pieces: list[list[float]] = []
        for begin, stop in step.busy:
            begin, stop = max(begin, start), min(stop, end)
            if begin >= stop:
                continue
            if pieces and begin - pieces[-1][1] < least:
                pieces[-1][1] = stop
            else:
                pieces.append([begin, stop])
        for begin, stop in pieces:
            if stop - begin >= least / 4:
                yield name, begin, stop, f"{which}, {_ms(end - start):.2f} ms in total"


def _sending(step: Timeline, least: float) -> Iterator[tuple[str, float, float, str]]:
    """The rank's collectives: op, start, end and hover text; adjacent ones of one kind that are too narrow to see are
    merged.
    """
    last: list[Any] | None = None
    for call in sorted(step.comm, key=lambda call: (call.op, call.start)):
        op, count = call.op, call.bytes
        start, end = max(0.0, call.start), min(call.end, step.seconds)
        if last and last[0] == op and start - last[2] < least and end - start < 2 * least:
            last = [op, last[1], max(end, last[2]), last[3] + 1, last[4] + (count or 0), last[5]]
            continue
        if last:
            yield _merged(last)
        words = f"{op}{f' {call.seq}' if call.seq else ''}"
        words += f" of {call.group}" if call.group and call.group != "default_pg" else ""
        words += f", ranks {', '.join(map(str, call.ranks))}" if call.ranks else ""
        unit = next((name for name, first, stop in reversed(step.marks) if first <= start <= stop and "(" in name), "")
        last = [op, start, end, 1, count or 0, f"{words} {unit}".rstrip()]
    if last:
        yield _merged(last)


def _merged(span: list[Any]) -> tuple[str, float, float, str]:
    op, start, end, many, count, words = span
    what = words if many == 1 else f"{many} × {op}"
    size_of_all = f" {size(count)}," if count else ""
    return op, start, end, f"{what},{size_of_all} {_ms(end - start):.2f} ms"


def _overlap_in_words(steps: Mapping[int, Timeline]) -> str:
    if any(timeline.calls_only for timeline in steps.values()):
        return "from the call to the moment at which torch noticed its end; what else the ranks did is not recorded"
    under_way, exposed = (sum(values) for values in zip(*(overlap(timeline) for timeline in steps.values())))
    if not under_way:
        return "no communication"
    share = 1 - min(1.0, exposed / under_way)
    worst = max(steps, key=lambda rank: overlap(steps[rank])[1])
    return f"{share:.0%} of communication overlapped · {_ms(overlap(steps[worst])[1]):.1f} ms exposed on rank {worst}"


# ---- memory


def memory_by_owner(state: RunState) -> Chart:
    """The peak of each rank's profiled step, by owner; on CUDA, stacked on top, what the allocator caches and what else
    is in use. A run with a prediction has the predicted peak of each rank before the measured one; what the learner
    predicted is a mark across them.
    """
    ranks = {rank.rank: rank for rank in _ranks(state) if rank.memory_step}
    measured = {number: rank.memory_step.at_peak for number, rank in ranks.items() if rank.memory_step}
    predicted = _predicted(state)
    stacks = [
        (number, kind, peaks[number])
        for number in sorted({**predicted, **measured})
        for kind, peaks in ((" predicted", predicted), (" measured" if predicted else "", measured))
        if number in peaks
    ]
    axis = Axis.of_bytes(max((sum(peak.values()) for _, _, peak in stacks), default=0))
    unit = axis.bytes_each
    bars = [
        Bars(owner, colours.OWNERS[owner], tuple(peak.get(owner, 0) / unit for *_, peak in stacks)) for owner in OWNERS
    ]
    on_cuda = any(rank.device.startswith("cuda") for rank in ranks.values())
    if on_cuda:
        pairs = [
            beyond(state, ranks[number]) if peak is measured.get(number) else (0.0, 0.0) for number, _, peak in stacks
        ]
        cached, others = zip(*pairs)
        bars.append(Bars("cached by the allocator", "#DDDDDD", tuple(value / unit for value in cached)))
        bars.append(Bars("context, NCCL, others", "#777777", tuple(value / unit for value in others)))
    notes = [] if on_cuda or not stacks else ["live tensors"]
    notes += [f"predicted: {state.prediction.method}"] if state.prediction and predicted else []
    names = tuple(f"rank {number}{kind}" for number, kind, _ in stacks)
    between = "\n" if len(stacks) <= WIDE else " "
    labels = tuple(f"rank {number}{between}{kind.strip()}" for number, kind, _ in stacks) if predicted else ()
    title, note = "Peak memory of a step, by owner", "; ".join(notes) if stacks else _NONE
    marks = guess_marks(state, "peak_mb", [number for number, *_ in stacks], unit)
    x = Axis("", categories=names, labels=labels)
    return Chart("memory_by_owner", title, x, axis, bars=tuple(bars), marks=marks, note=note)


def guess_marks(state: RunState, name: str, ranks: Sequence[int], unit: float) -> tuple[Marks, ...]:
    """What the learner predicted of the figure `name`, for the rank of each bar, on an axis whose unit has `unit` bytes
    or seconds; nothing without such a prediction."""
    if name not in state.guess or not ranks:
        return ()
    known, each = by_rank(state.guess[name], state.world_size), FIGURES[name].each / unit
    values = tuple(known[rank] * each if rank in known else None for rank in ranks)
    return (Marks(OWN, colours.GUESS, values),)


def predicted_steps(state: RunState) -> dict[int, Timeline]:
    """The predicted timelines as profiled steps, by rank; of many ranks, only one of each group of equal ranks."""
    plan = state.prediction
    if plan is None:
        return {}
    timelines = predicted_timelines(plan)
    return {rank.rank: as_profiled(timelines[rank.rank]) for rank in _few_of(plan) if rank.rank in timelines}


def _few_of(plan: Plan) -> list[PredictedRank]:
    """The predicted ranks; of many, only one of each group of equal ranks."""
    return [rank for rank in plan.ranks if len(plan.ranks) <= _FEW_RANKS or rank.rank == rank.like]


def _predicted(state: RunState) -> dict[int, Owners]:
    """The predicted bytes at the peak, by rank; of many ranks, only one of each group of equal ranks."""
    few = _few_of(state.prediction) if state.prediction else []
    return {rank.rank: rank.at_peak for rank in few if rank.at_peak}


def memory_of_step(state: RunState, rank: int | None = None) -> Chart:
    """Bytes by owner over one profiled step of a rank (default: the rank with the highest peak), with its phases along
    the bottom, and the predicted sum as a dashed line.
    """
    profiled = [(one, one.memory_step) for one in _ranks(state) if one.memory_step and rank in (None, one.rank)]
    title = "Memory over one step"
    if not profiled:
        return Chart("memory_of_step", title, Axis("ms", end=1.0), Axis("MiB"), note=_NONE)
    one, held = max(profiled, key=lambda pair: pair[1].peak)
    step = _predicted_step(state, one.rank)
    axis = Axis.of_bytes(max(held.peak, step.peak if step else 0))
    times = [_ms(time) for time in held.times] + [_ms(held.seconds)]
    area = partial(Line, y_unit=axis.bytes_each, stacked=True)
    lines = tuple(
        area(f"{owner}-{one.rank}-{held.step}", owner, times, [*sizes, sizes[-1]], colours.OWNERS[owner])
        for owner in OWNERS
        if any(sizes := held.owners.get(owner, []))
    )
    bands = tuple(
        (name, _ms(start), _ms(end), colours.PHASES.get(name, colours.INK)) for name, start, end in held.phases
    )
    note = f"rank {one.rank}, step {held.step}; bottom: phases"
    if step:
        lines += (_predicted_curve(step, held, axis.bytes_each),)
    return Chart("memory_of_step", title, Axis("ms", end=_ms(held.seconds)), axis, lines=lines, bands=bands, note=note)


def _predicted_step(state: RunState, rank: int) -> PredictedStep | None:
    """The traced step in the place of a rank; None without a trace."""
    parts = state.prediction.classes if state.prediction else []
    return next((part.step for part in parts if rank in part.ranks and part.step.times), None)


def _predicted_curve(step: PredictedStep, held: MemoryStep, unit: float) -> Line:
    """The predicted sum of all owners. A trace counts operations, so each of its phases is stretched to the time of the
    measured one."""
    spans, measured = ({name: span for name, *span in _whole(profile.phases)} for profile in (step, held))
    names = [name for name in spans if name in measured]
    anchors = sorted((spans[name][end], measured[name][end]) for name in names for end in (0, 1))
    before, after = zip((0.0, 0.0), *anchors, (step.seconds, held.seconds))
    bounds = numpy.interp([*step.times, step.seconds], before, numpy.maximum.accumulate(after))
    sums = [sum(sizes) for sizes in zip(*step.owners.values())]
    times = [_ms(float(time)) for pair in pairwise(bounds) for time in pair]
    heights = [height for height in sums for _ in range(2)]
    return Line(f"predicted-{held.step}", "predicted", times, heights, dash="dash", y_unit=unit)


def _whole(phases: Iterable[Span]) -> Iterator[Span]:
    """Each phase from its first beginning to its last end."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for name, start, end in phases:
        spans.setdefault(name, []).append((start, end))
    for name, parts in spans.items():
        if name != "other":
            yield name, parts[0][0], parts[-1][1]


def _ms(seconds: float) -> float:
    return 1000 * seconds


CHARTS = {
    chart.__name__: chart
    for chart in (loss, throughput, memory, phases, timeline, memory_by_owner, memory_of_step, experts)
}
