"""Figures of profiled steps: typical steps, exposed communication, ranks on a common time axis, and memory outside of
tensors.

Ranks are aligned by their clocks, those of several hosts by their offsets (`clocks`). If the clocks disagree (the
steps would not overlap, or an all-reduce would end on one rank before it starts on another), each rank is shifted so
that its collectives end at the same time as those of rank 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from labkit.analysis.metrics import USUAL, median, quartiles
from labkit.common.files import MARK, write_output
from labkit.record.events import Span, Timeline
from labkit.record.state import RunState, per_revision
from labkit.record.writer import PHASES

if TYPE_CHECKING:
    from labkit.record.ranks import RankState


def usual(rank: RankState) -> list[Timeline]:
    """The rank's timelines of typical steps; of its early steps if there are no others."""
    steps = {step: timeline for step, timeline in sorted(rank.timelines.items()) if not timeline.calls_only}
    return [timeline for step, timeline in steps.items() if step >= USUAL] or [*steps.values()]


def seconds_by_phase(phases: Iterable[Span]) -> dict[str, float]:
    """The seconds of each phase of a profiled step, which may have several spans."""
    spent: dict[str, float] = {}
    for name, start, end in phases:
        spent[name] = spent.get(name, 0.0) + end - start
    return spent


def exposed(rank: RankState) -> dict[str, float]:
    """By phase, the share with exposed communication (a collective and no compute): the median over typical profiled
    steps."""
    shares: dict[str, list[float]] = {}
    for step in usual(rank):
        spent = seconds_by_phase(step.phases)
        for phase in PHASES:
            shares.setdefault(phase, []).append(
                min(1.0, step.exposed.get(phase, 0.0) / spent[phase]) if spent.get(phase) else 0.0
            )
    return {phase: median(values) for phase, values in shares.items()}


def overlap(timeline: Timeline) -> tuple[float, float]:
    """Of one timeline: seconds of communication, and the exposed part of them, in which nothing was computed."""
    under_way, last = 0.0, -math.inf
    for start, end in sorted((max(0.0, call.start), min(call.end, timeline.seconds)) for call in timeline.comm):
        under_way += max(0.0, end - max(start, last))
        last = max(last, end)
    return under_way, sum(timeline.exposed.values())


def parts(timeline: Timeline) -> dict[str, float]:
    """Seconds of a profiled step in which the rank computed, in which communication was exposed, in which memory was
    copied, if that is known, and in which it was idle."""
    computed = sum(end - start for start, end in timeline.busy) if timeline.computed is None else timeline.computed
    exposed_seconds = sum(timeline.exposed.values())
    copies = {} if timeline.copies is None else {"copies of memory": timeline.copies}
    idle = max(0.0, timeline.seconds - computed - exposed_seconds) if timeline.idle is None else timeline.idle
    return {"compute": computed, "exposed communication": exposed_seconds, **copies, "idle": idle}


def profiled_steps(state: RunState) -> list[int]:
    """The steps of which at least one rank has a timeline."""
    return sorted({step for rank in state.ranks.values() for step in rank.timelines})


def step_in_words(state: RunState, step: int) -> str:
    """`profiled step 5`; of dumps of the flight recorder, what they have instead of a step."""
    ranks = (rank.timelines.get(step) for rank in state.ranks.values())
    return (
        "the recorded collectives"
        if any(timeline and timeline.calls_only for timeline in ranks)
        else f"profiled step {step:,}"
    )


def newest(state: RunState) -> int | None:
    """The newest step of which all ranks with timelines have one; without such a step, the newest of any rank."""
    those = [set(rank.timelines) for rank in state.ranks.values() if rank.timelines]
    common = set.intersection(*those) if those else set()
    return max(common or set().union(*those), default=None)


_NOT_IN_STEP = "not in step, and without a common collective: each rank from its own start"


def aligned(found: Mapping[int, Timeline], ahead: Mapping[int, float] | None = None) -> tuple[dict[int, float], str]:
    """Seconds by which each rank's step starts after the earliest, and how they were found if not by the clocks, of
    which some are these seconds `ahead`: in words, empty otherwise."""
    found = {rank: replace(step, t0=step.t0 - (ahead or {}).get(rank, 0.0)) for rank, step in found.items()}
    first = next(iter(found))
    ends, starts = ({rank: moments(timeline, which) for rank, timeline in found.items()} for which in ("end", "start"))
    begins, how = {}, ""
    for rank, timeline in found.items():
        common = ends[first].keys() & ends[rank].keys()
        wrong = any(ends[rank][key] < starts[first][key] or ends[first][key] < starts[rank][key] for key in common)
        wrong |= abs(timeline.t0 - found[first].t0) > max(timeline.seconds, found[first].seconds)
        late = median(ends[rank][key] - ends[first][key] for key in common) if common else timeline.t0 - found[first].t0
        begins[rank] = timeline.t0 - (late if wrong else 0.0)
        if wrong:
            how = "clocks disagree: aligned by common collectives" if common else how or _NOT_IN_STEP
    earliest = min(begins.values())
    return {rank: begin - earliest for rank, begin in begins.items()}, how


def resident(state: RunState) -> dict[int, float]:
    """Resident bytes of each rank's process, sampled by the supervisor: code, libraries, data, and on CPU ranks also
    tensors."""
    return {rank: columns["rss"][-1] for rank, columns in sorted(state.system.ranks.items()) if len(columns["rss"])}


def beyond(state: RunState, rank: RankState) -> tuple[float, float]:
    """On CUDA, bytes that the caching allocator holds beyond the peak, and device bytes in use beyond what it has
    reserved."""
    number = rank.device.removeprefix("cuda:")
    reserved = rank.steps.memory["reserved"][-1] if len(rank.steps) else math.nan
    used = state.system.gpus.get(int(number), {}).get("memory_used", [math.nan])[-1] if number.isdigit() else math.nan
    kept = reserved - rank.memory_step.peak if rank.memory_step else math.nan
    return _known(kept), _known(used - reserved)


def _known(count: float) -> float:
    return max(0.0, count) if math.isfinite(count) else 0.0


# ---- the clocks of hosts


MUTUAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # none ends before all have begun it


@dataclass(frozen=True)
class Offset:
    """A host's clock is `seconds` ahead of that of the first rank's host, give or take `uncertainty` (seconds: half the
    range of the middle half of all differences, at least half the shortest collective), from so many `collectives`."""

    seconds: float
    uncertainty: float
    collectives: int


@per_revision
def clocks(state: RunState) -> dict[str, Offset]:
    """The offset of each host but the first rank's, as far as profiled collectives link them; empty with one host."""
    hosts = {number: rank.host for number, rank in state.ranks.items() if rank.host}
    if len(set(hosts.values())) < 2:
        return {}
    ends: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for number in hosts:
        for step, timeline in state.ranks[number].timelines.items():
            starts = moments(timeline, "start")
            for key, end in moments(timeline, "end").items():
                ends.setdefault((step, *key), {})[number] = end, end - starts[key]
    known = {hosts[min(hosts)]: Offset(0.0, 0.0, 0)}
    while linked := _linked(ends, hosts, known):
        known |= linked
    return dict(list(known.items())[1:])


def ahead(state: RunState) -> dict[int, float]:
    """By rank the seconds by which its host's clock is ahead; ranks whose host has no offset are left out."""
    found = clocks(state)
    return {number: found[rank.host].seconds for number, rank in state.ranks.items() if rank.host in found}


def moments(timeline: Timeline, which: Literal["start", "end"]) -> dict[tuple[Any, ...], float]:
    """When each numbered collective of a group (its name and ranks) started or ended, in unix seconds."""
    return {
        (call.group, *(call.ranks or ()), call.seq): timeline.t0 + (call.start if which == "start" else call.end)
        for call in timeline.comm
        if call.seq and call.op in MUTUAL
    }


def _linked(
    ends: dict[tuple[Any, ...], dict[int, tuple[float, float]]], hosts: dict[int, str], known: dict[str, Offset]
) -> dict[str, Offset]:
    """The offsets of further hosts that have a collective in common with a known one, each from its first such host."""
    differences: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for ranks in ends.values():
        for number, (end, seconds) in ranks.items():
            for other, (then, others) in ranks.items():
                if hosts[other] in known and hosts[number] not in known:
                    pair = end - then, min(seconds, others)
                    differences.setdefault(hosts[number], {}).setdefault(hosts[other], []).append(pair)
    found = {}
    for host, by in differences.items():
        via = next(name for name in known if name in by)
        values, shortest = [value for value, _ in by[via]], min(seconds for _, seconds in by[via])
        low, high = quartiles(values)
        spread = max(high - low, shortest) / 2
        found[host] = Offset(median(values) + known[via].seconds, spread + known[via].uncertainty, len(values))
    return found


# ---- profiled steps as a trace for Perfetto or Chrome: one process per rank, on a common time axis


_PHASES, _COMPUTING, _MARKS, _COMMUNICATION = range(4)
_ROWS = ("phases", "compute", "torch annotations", "communication")


def trace(state: RunState) -> dict[str, Any]:
    """All profiled steps of a run in Chrome's trace event format; times in microseconds since the first of them."""
    events = list(_names(state))
    late = ahead(state)
    begun = {
        (number, step): timeline.t0 - late.get(number, 0.0)
        for number, rank in sorted(state.ranks.items())
        for step, timeline in rank.timelines.items()
    }
    zero = min(begun.values(), default=0.0)
    for step in profiled_steps(state):
        found = {number: rank.timelines[step] for number, rank in sorted(state.ranks.items()) if step in rank.timelines}
        shifts, _ = aligned(found, late)
        begin = min(begun[number, step] for number in found) - zero
        for rank, timeline in found.items():
            events += _events(rank, step, timeline, begin + shifts[rank])
    return {"otherData": {"source": MARK}, "traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(state: RunState, path: Path) -> None:
    """Writes the trace to `path`, or replaces one that was written before. Raises `OSError`."""
    write_output(path, json.dumps(trace(state), separators=(",", ":")), private=True)


def _names(state: RunState) -> Iterator[dict[str, Any]]:
    for number in sorted(state.ranks):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"rank {number}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for row, name in enumerate(_ROWS):
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": row, "args": {"name": name}}


def _events(rank: int, step: int, timeline: Timeline, begin: float) -> Iterator[dict[str, Any]]:
    def span(row: int, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
        first, last = round(1e6 * start), round(1e6 * end)  # whole microseconds, so that nested spans stay nested
        moment = round(1e6 * begin) + first
        return {
            "ph": "X",
            "pid": rank,
            "tid": row,
            "name": name,
            "ts": moment,
            "dur": last - first,
            "args": {"step": step} | args,
        }

    for name, start, end in timeline.phases:
        yield span(_PHASES, name, start, end)
    for start, end in timeline.busy:
        yield span(_COMPUTING, "compute", start, end)
    for name, start, end in timeline.marks:
        yield span(_MARKS, name, start, end)
    free: list[float] = []  # overlapping collectives get separate rows: spans of one row must nest
    for call in sorted(timeline.comm, key=lambda call: call.start):
        lane = next((index for index, last in enumerate(free) if last <= call.start), len(free))
        free[lane : lane + 1] = [call.end]
        yield span(
            _COMMUNICATION + lane,
            call.op,
            call.start,
            call.end,
            bytes=call.bytes,
            group=call.group,
            ranks=call.ranks,
            number=call.seq,
        )
