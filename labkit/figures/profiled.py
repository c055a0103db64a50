"""The charts of profiled steps: the timeline of all ranks, and the memory by owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy

from labkit.analysis.guess import FIGURES, by_rank
from labkit.analysis.nodes import ahead, clocks
from labkit.analysis.prediction import as_profiled, predicted_timelines
from labkit.analysis.profiled import aligned, beyond, newest, overlap
from labkit.common.units import size
from labkit.figures import colours
from labkit.figures.model import Axis, Bars, Chart, Line, Marks, Spans
from labkit.record.documents import PredictedStep
from labkit.record.events import MemoryStep, Owners, Span, Timeline
from labkit.record.ranks import RankState
from labkit.record.state import RunState
from labkit.record.writer import OWNERS, PHASES

_PIXELS = 1500  # the resolution of the time axis: narrower stretches are merged
_FEW = 4  # ranks with a predicted bar each
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
    computed: dict[str, list[tuple[int, float, float, str]]] = {phase: [] for phase in PHASES}
    sent: dict[str, list[tuple[int, float, float, str]]] = {}
    for index, (rank, kind, timeline, shift) in enumerate(drawn):
        for phase, start, end, words in _computing(timeline, width / _PIXELS):
            computed.setdefault(phase, []).append(
                (2 * index, _ms(start + shift), _ms(end + shift), f"rank {rank}{kind}: {words}")
            )
        for op, start, end, words in _sending(timeline, width / _PIXELS):
            sent.setdefault(op, []).append(
                (2 * index + 1, _ms(start + shift), _ms(end + shift), f"rank {rank}{kind}: {words}")
            )
    spans = [
        Spans(phase, colours.PHASES.get(phase, colours.INK), tuple(those)) for phase, those in computed.items() if those
    ]
    spans += [
        Spans(op, colours.OPERATIONS.get(op, colours.OTHER_OPERATION), tuple(those))
        for op, those in sorted(sent.items())
    ]
    missing = state.world_size - len(found) if found else 0
    notes = [_overlap_in_words(found)] if found else []
    notes += ["predicted: simulated"] if predicted else []
    notes += [how] if how else []
    notes += [
        f"clock of {host} corrected by {_ms(-clock.seconds):+.2f} ± {_ms(clock.uncertainty):.2f} ms"
        for host, clock in clocks(state).items()
    ]
    notes += [f"no timeline of {missing} rank{'s' if missing > 1 else ''}"] if missing else []
    left_out = max((timeline.left_out for timeline in found.values()), default=0)
    notes += [f"the last {left_out:,} collectives are omitted"] if left_out else []
    if any(timeline.backend == "gloo" for timeline in found.values()):
        notes.append("gloo: from queued to completed")
    title = f"Step {step}" if found else "A step, as predicted"
    return Chart(
        "timeline",
        title,
        Axis("ms", end=_ms(width)),
        Axis("", categories=lanes),
        spans=tuple(spans),
        note=" · ".join(filter(None, notes)),
    )


def _computing(one: Timeline, least: float) -> Iterator[tuple[str, float, float, str]]:
    """When the rank computed, phase by phase: phase, start, end and hover text; stretches too narrow to see are
    merged."""
    many = {name: sum(phase == name for phase, *_ in one.phases) for name, *_ in one.phases}
    counted: dict[str, int] = {}
    for name, start, end in one.phases:
        counted[name] = counted.get(name, 0) + 1
        which = (
            f"{name} {counted[name]} of {many[name]}" if many[name] > 1 and name in ("forward", "backward") else name
        )
        pieces: list[list[float]] = []
        for begin, stop in one.busy:
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


def _sending(one: Timeline, least: float) -> Iterator[tuple[str, float, float, str]]:
    """The rank's collectives: op, start, end and hover text; adjacent ones of one kind that are too narrow to see are
    merged.
    """
    last: list[Any] | None = None
    for call in sorted(one.comm, key=lambda call: (call.op, call.start)):
        op, count = call.op, call.bytes
        start, end = max(0.0, call.start), min(call.end, one.seconds)
        if last and last[0] == op and start - last[2] < least and end - start < 2 * least:
            last = [op, last[1], max(end, last[2]), last[3] + 1, last[4] + (count or 0), last[5]]
            continue
        if last:
            yield _merged(last)
        words = f"{op}{f' {call.seq}' if call.seq else ''}"
        words += f" of {call.group}" if call.group and call.group != "default_pg" else ""
        words += f", ranks {', '.join(map(str, call.ranks))}" if call.ranks else ""
        unit = next((name for name, first, stop in reversed(one.marks) if first <= start <= stop and "(" in name), "")
        last = [op, start, end, 1, count or 0, f"{words} {unit}".rstrip()]
    if last:
        yield _merged(last)


def _merged(span: list[Any]) -> tuple[str, float, float, str]:
    op, start, end, many, count, words = span
    what = words if many == 1 else f"{many} × {op}"
    return (
        op,
        start,
        end,
        f"{what}, {size(count)}, {_ms(end - start):.2f} ms" if count else f"{what}, {_ms(end - start):.2f} ms",
    )


def _overlap_in_words(found: Mapping[int, Timeline]) -> str:
    under_way, exposed = (sum(values) for values in zip(*(overlap(timeline) for timeline in found.values())))
    if not under_way:
        return "no communication"
    share = 1 - min(1.0, exposed / under_way)
    worst = max(found, key=lambda rank: overlap(found[rank])[1])
    return f"{share:.0%} of communication overlapped · {_ms(overlap(found[worst])[1]):.1f} ms exposed on rank {worst}"


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
    few = [predicted.rank for predicted in plan.ranks if len(plan.ranks) <= _FEW or predicted.rank == predicted.like]
    return {rank: as_profiled(timelines[rank]) for rank in few if rank in timelines}


def _predicted(state: RunState) -> dict[int, Owners]:
    """The predicted bytes at the peak, by rank; of many ranks, only one of each group of equal ranks."""
    ranks = state.prediction.ranks if state.prediction else []
    few = len(ranks) <= _FEW
    return {
        predicted.rank: predicted.at_peak
        for predicted in ranks
        if predicted.at_peak and (few or predicted.rank == predicted.like)
    }


def memory_of_step(state: RunState, rank: int | None = None) -> Chart:
    """Bytes by owner over one profiled step of a rank (default: the rank with the highest peak), with its phases along
    the bottom, and the predicted sum as a dashed line.
    """
    profiled = [
        (state_of_rank, state_of_rank.memory_step)
        for state_of_rank in _ranks(state)
        if state_of_rank.memory_step and rank in (None, state_of_rank.rank)
    ]
    title = "Memory over one step"
    if not profiled:
        return Chart("memory_of_step", title, Axis("ms", end=1.0), Axis("MiB"), note=_NONE)
    one, held = max(profiled, key=lambda pair: pair[1].peak)
    step = _predicted_step(state, one.rank)
    axis = Axis.of_bytes(max(held.peak, step.peak if step else 0))
    times = [_ms(time) for time in held.times] + [_ms(held.seconds)]
    lines = tuple(
        Line(
            f"{owner}-{one.rank}-{held.step}",
            owner,
            times,
            [*held.owners[owner], held.owners[owner][-1]],
            colour=colours.OWNERS[owner],
            y_unit=axis.bytes_each,
            stacked=True,
        )
        for owner in OWNERS
        if any(held.owners.get(owner, ()))
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


def _ranks(state: RunState) -> list[RankState]:
    return [rank for _, rank in sorted(state.ranks.items())]


def _ms(seconds: float) -> float:
    return 1000 * seconds
