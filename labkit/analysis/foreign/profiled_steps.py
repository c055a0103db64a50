"""The steps of profiled ranks as events of a run, so that everything that shows runs shows them.

The time of a step is that of its `Breakdown`: from the start of its first kernel to the end of its last. Its phases
are told apart by what torch annotates: `DataLoader` and `Optimizer.step` by their own names, and backward from the
first to the last operator of autograd. A phase begins with the first kernel that was launched in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from labkit.analysis.foreign.breakdown import (
    COMMUNICATION,
    COMPUTATION,
    Analysed,
    Breakdown,
    common,
    kernels_of,
    length,
    merge,
    message_bytes,
    operation,
)
from labkit.analysis.foreign.chrome import Call, Numbers, Spans
from labkit.analysis.foreign.page import numbered
from labkit.record import events
from labkit.record.events import RANKS
from labkit.record.writer import sent

_MOST = 600  # busy intervals of a step, as many as the probe records
_MOST_CALLS = 5_000  # of a step
_MOST_KERNELS = 100  # of a step, those that take longest
_MOST_STEPS = 20  # with a timeline: as many as a state stores
_FIRST_DAY = 1_451_606_400.0  # 2016, the year of torch's first release: an earlier time counts from a computer's start
_RINGS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")  # whose traffic is known
_OTHER = "other"


def profile_events(analysed: Sequence[Analysed]) -> Iterator[events.OfRank]:
    """The events of all ranks, each with its start first. Raises `ForeignError` if two files are of one rank."""
    ranks = numbered([rank.profile.rank for rank in analysed], [rank.profile.path.name for rank in analysed])
    for number, rank in zip(ranks, analysed):
        yield from _of_rank(number, rank)


def _of_rank(number: int, rank: Analysed) -> Iterator[events.OfRank]:
    profile = rank.profile
    base = profile.base * 1e-9
    base = base if base >= _FIRST_DAY else 0.0
    steps = {step: (start, end) for step, start, end in rank.steps if _chosen(rank, start, end).any()}
    totals = rank.by_step
    if not steps and rank.total.span:  # without steps, the whole time is shown as one
        steps, totals = {1: (-np.inf, np.inf)}, {1: rank.total}
    begun = min((float(rank.spans.start[_chosen(rank, *step)][0]) for step in steps.values()), default=0.0)
    on_gpu = len(profile.gpu) > 0
    yield events.Start(
        t=base + begun,
        rank=number,
        device="cuda" if on_gpu else "cpu",
        device_name=_clean(re.sub(r"^\d+ × ", "", profile.device)) if on_gpu else "",
        host=_clean(profile.host) or None,
        steady=True,
    )
    for index, (step, span) in enumerate(sorted(steps.items(), key=lambda item: item[1])):
        total, chosen = totals[step], _chosen(rank, *span)
        spans = rank.spans.where(chosen)
        calls = [call for call in rank.calls if span[0] == -np.inf or span[0] <= call.launched < span[1]]
        begin = float(spans.start[0])
        phases = _phases(rank, spans, total.span, *span)
        seconds = {"step": total.span}
        if len(phases) > 1:
            for name, first, last in phases:
                seconds[name] = seconds.get(name, 0.0) + last - first
        yield events.Step(
            t=base + begin + total.span,
            rank=number,
            step=step,
            seconds=events.StepSeconds(**seconds),
        )
        if index >= len(steps) - _MOST_STEPS:
            event = _timeline(rank, total, spans, rank.kinds[chosen], calls, phases)
            yield structs.replace(event, t=base + begin + total.span, t0=base + begin, rank=number, step=step)
    if steps and (traffic := _traffic(calls)) and not profile.sampled:
        yield events.Traffic(t=base + begin + total.span, rank=number, step=step, ops=traffic)


def _chosen(rank: Analysed, start: float, end: float) -> NDArray[np.bool_]:
    """Which spans belong to a step: those that were launched in it."""
    if start == -np.inf:
        return np.ones(len(rank.spans), bool)
    return (rank.spans.origin >= start) & (rank.spans.origin < end)


def _timeline(
    rank: Analysed,
    total: Breakdown,
    spans: Spans,
    kinds: NDArray[np.int64],
    calls: Sequence[Call],
    phases: Sequence[events.Span],
) -> events.Timeline:
    """One step, which begins at 0."""
    begin = float(spans.start[0])
    computing, sending = (
        merge(spans.start[kinds == kind] - begin, spans.end[kinds == kind] - begin)
        for kind in (COMPUTATION, COMMUNICATION)
    )
    exposed: dict[str, float] = {}
    for name, start, end in phases:
        within = _clipped(sending, start, end)
        alone = length(*within) - common(within, _clipped(computing, start, end))
        if alone > 0:
            exposed[name] = exposed.get(name, 0.0) + alone
    kernels = kernels_of([(rank.profile, spans)])[:_MOST_KERNELS]
    return events.Timeline(
        t=0.0,
        rank=0,
        step=0,
        t0=0.0,
        seconds=total.span,
        phases=[*phases],
        comm=_numbered(calls[:_MOST_CALLS], begin, rank.profile.sampled),
        marks=[],
        busy=_fewer(*computing),
        exposed=exposed,
        device="cuda" if len(rank.profile.gpu) else "cpu",
        backend=_clean(rank.profile.backend or ""),
        left_out=max(0, len(calls) - _MOST_CALLS),
        computed=total.computation,
        copies=total.copies,
        idle=total.idle,
        kernels=[(_clean(kernel.name), kernel.count, kernel.seconds) for kernel in kernels],
    )


def _clipped(spans: tuple[Numbers, Numbers], start: float, end: float) -> tuple[Numbers, Numbers]:
    """The parts of merged intervals between two times."""
    inside = (spans[1] > start) & (spans[0] < end)
    return np.maximum(spans[0][inside], start), np.minimum(spans[1][inside], end)


def _fewer(start: Numbers, end: Numbers) -> list[tuple[float, float]]:
    """At most `_MOST` intervals: the shortest gaps between them count as part of them."""
    if len(start) > _MOST:
        gaps = start[1:] - end[:-1]
        kept = np.sort(np.argsort(gaps, kind="stable")[len(gaps) - _MOST + 1 :])
        start, end = start[np.concatenate(([0], kept + 1))], end[np.concatenate((kept, [len(end) - 1]))]
    return [*zip(start.tolist(), end.tolist())]


# ---- phases


def _phases(rank: Analysed, spans: Spans, seconds: float, start: float, end: float) -> list[events.Span]:
    """The phases of a step, in seconds since its first kernel; one that is called other if they are not known."""
    begins = [] if rank.profile.sampled else sorted(_begins(rank, start, end))
    found: list[events.Span] = []
    for moment, name in begins:
        later = spans.start[spans.origin >= moment]
        if not len(later):
            break
        at = float(later.min() - spans.start[0])
        if found and found[-1][1] >= at:
            found.pop()
        if found and found[-1][0] == name:
            continue
        found.append((name, at, seconds))
    if not found:
        return [(_OTHER, 0.0, seconds)]
    ends = [at for _, at, _ in found[1:]] + [seconds]
    whole = [(name, at, last) for (name, at, _), last in zip(found, ends)]
    return [(_OTHER, 0.0, found[0][1]), *whole] if found[0][1] > 0 else whole


def _begins(rank: Analysed, start: float, end: float) -> Iterator[tuple[float, str]]:
    """When the CPU began each phase of a step; nothing if it did not train."""
    profile = rank.profile
    backward = [name.startswith("autograd::engine::evaluate_function") for name in profile.names] + [False] * 2
    chosen = np.array(backward)[profile.cpu.name] & (profile.cpu.start >= start) & (profile.cpu.start < end)
    if not chosen.any():
        return
    begun, ended = float(profile.cpu.start[chosen].min()), float(profile.cpu.end[chosen].max())
    yield start, "forward"
    yield begun, "backward"
    after = ended
    for name, first, last in profile.phases:
        if start <= first < end:
            yield first, name
            if name == "data" and last < begun:
                yield last, "forward"
            after = max(after, last)
    yield after, _OTHER


# ---- calls


def _numbered(calls: Sequence[Call], begin: float, sampled: bool) -> list[events.Call]:
    """The calls, with their number in their group if the file has all of them."""
    counts: Counter[str] = Counter()
    found = []
    for call in calls:
        counts[call.group] += 1
        found.append(_call(call, begin, counts[call.group] if call.group and not sampled else None))
    return found


def _call(call: Call, begin: float, number: int | None) -> events.Call:
    op = operation(call.op)
    group, _, listed = call.group.partition(" ")
    ranks = [int(text) for text in re.findall(r"\d{1,8}", listed)] if re.fullmatch(r"\[[\d, ]*\]", listed) else []
    known = len(ranks) == call.ranks and all(rank < RANKS for rank in ranks)
    return events.Call(
        op=op,
        start=call.start - begin,
        end=call.end - begin,
        bytes=message_bytes(op, call) or None,
        group=_clean(group) or None,
        ranks=ranks if ranks and known else None,
        seq=number,
    )


def _traffic(calls: Sequence[Call]) -> dict[str, events.Operation]:
    """The traffic of a step, if the file has the bytes and the group of every call; otherwise empty."""
    found: dict[str, events.Operation] = {}
    for call in calls:
        op = operation(call.op)
        count = message_bytes(op, call)
        if op not in _RINGS or not count or call.ranks < 1:
            return {}
        before = found.get(op) or events.Operation(0.0, 0.0, 0.0)
        goes = before.sent + sent(op, count, call.ranks)
        found[op] = events.Operation(before.calls + 1, before.bytes + count, goes)
    return found


def _clean(text: str) -> str:
    """A text of a file as a run may hold it."""
    return text.replace("\0", "�")
