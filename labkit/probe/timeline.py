"""Turns a profile of one step into a timeline and a memory curve: pure functions over plain rows.

A rank *computes* while an aten operation that contains no collective runs (on CUDA: any kernel or copy except NCCL's).
Gaps shorter than `GAP` are due to Python and the scheduler and count as computing. Communication is *exposed* while a
collective is active and the rank does not compute. With NCCL, the span of an operation is that of its kernel, which
includes waiting for peers. With gloo, it is the time from when gloo's thread starts the operation until it completes,
so that two operations may share the link.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from labkit.record.writer import OWNERS

OF_PROBE = "labkit"  # around what the probe itself allocates in a step
GAP = 50_000  # ns
MOST = 600  # maximum number of comm spans, busy intervals, marks or curve points in one event
_CALLS = ("c10d::", "_c10d_functional", "gloo:", "nccl:", "record_param_comms")
_MARKS = ("FSDP::", "Forward ", "Backward ", "FullyShardedDataParallel.", "DistributedDataParallel.forward")
_GATHERED = (
    *("FSDP::all_gather_copy_out", "FSDP::pre_unshard"),
    *("FullyShardedDataParallel._pre_forward", "FullyShardedDataParallel._pre_backward"),
)
_SENDING = (*_CALLS, "FSDP::", "FullyShardedDataParallel._post_backward")

Span = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Row:
    """One event of the profiler, in ns since the epoch. `on_gpu` marks the device time of a kernel or copy."""

    name: str
    start: int
    end: int
    thread: int
    on_gpu: bool = False


@dataclass(frozen=True)
class Allocation:
    """Bytes allocated (negative: freed) at an address; `inside` are the names of the enclosing operations, innermost
    first.
    """

    time: int
    address: int
    size: int
    inside: tuple[str, ...] = ()


def collectives(rows: Iterable[Row], recorded: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Spans [operation, from, to, bytes, group, ranks, sequence]; recorded collectives are matched in order, by
    operation.
    """
    from labkit.probe.traffic import operation

    waiting: dict[str, list[Mapping[str, Any]]] = {}
    for call in recorded:
        waiting.setdefault(call["op"], []).append(call)
    pairs = [call for call in recorded if call["op"] in ("send", "recv")]
    found = []
    for row in sorted(rows, key=lambda row: row.start):
        if not is_collective(row):
            continue
        op = operation(row.name)
        either = "sendrecv" in op  # NCCL uses one kernel for both, and for all-to-all
        queue = (pairs or waiting.get("all_to_all")) if either else waiting.get(op)
        known = queue.pop(0) if queue else {}
        op = known.get("op", "send") if either else op
        found.append([op, row.start, row.end, *(known.get(name) for name in ("bytes", "group", "ranks", "seq"))])
    return found


def is_collective(row: Row) -> bool:
    """Whether a row is a communication operation as executed by its backend."""
    return row.name.startswith("gloo:") or (row.on_gpu and row.name.startswith("ncclDevKernel"))


def busy(rows: Sequence[Row], on_gpu: bool) -> list[Span]:
    """The spans in which the rank computed, in order, separated by more than `GAP`."""
    if on_gpu:
        named = {row.name for row in rows if not row.on_gpu}  # kineto repeats named spans among the kernels
        kernels = (row for row in rows if row.on_gpu and not is_collective(row) and row.name not in named)
        return merged(((row.start, row.end) for row in kernels), GAP)
    calls: dict[int, list[int]] = {}
    for row in rows:
        if row.name.startswith(_CALLS):
            calls.setdefault(row.thread, []).append(row.start)
    for starts in calls.values():
        starts.sort()
    own = []
    for row in rows:
        if row.name.startswith("aten::"):
            starts = calls.get(row.thread, [])
            if bisect_right(starts, row.end) == bisect_right(starts, row.start):
                own.append((row.start, row.end))
    return merged(own, GAP)


def merged(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """The union of spans; spans at most `gap` apart are merged."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts of `spans` outside of `others`; both must be sorted and disjoint."""
    left = []
    for start, end in spans:
        for first, last in others:
            if last <= start or first >= end:
                continue
            if first > start:
                left.append((start, first))
            start = max(start, last)
        if start < end:
            left.append((start, end))
    return left


def overlap(spans: Sequence[Span], start: float, end: float) -> float:
    """The total length of `spans` between two times."""
    return sum(max(0, min(last, end) - max(first, start)) for first, last in spans)


def timeline(
    rows: Sequence[Row], phases: Sequence[tuple[str, int, int]], recorded: Sequence[Mapping[str, Any]], device: str
) -> dict[str, Any]:
    """The fields of a `timeline` event; `phases` cover the step, in ns."""
    begin, end = phases[0][1], phases[-1][2]
    inside = [row for row in rows if row.end > begin and row.start < end]
    comm = collectives(inside, recorded)
    computing = busy(inside, device == "cuda")
    uncovered = without(merged((start, stop) for _, start, stop, *_ in comm), computing)
    exposed: dict[str, float] = {}
    for name, start, stop in phases:
        seconds = 0 if name == "data" else overlap(uncovered, start, stop)
        if seconds:
            exposed[name] = exposed.get(name, 0.0) + seconds / 1e9
    marks = [row for row in inside if not row.on_gpu and row.name.startswith(_MARKS)]
    longest = sorted(marks, key=lambda row: row.start - row.end)[:MOST]

    def from_start(time: float) -> float:
        return _seconds(time, begin)

    by_gpu = device == "cuda" and any(row.on_gpu and is_collective(row) for row in inside)
    backend = "nccl" if by_gpu else "gloo"
    return {
        **_extent(phases),
        "device": device,
        "backend": backend if comm else "",
        "comm": [[op, from_start(start), from_start(stop), *rest] for op, start, stop, *rest in comm[:MOST]],
        "busy": [[from_start(start), from_start(stop)] for start, stop in _fewer(computing)],
        "marks": [
            [row.name, from_start(row.start), from_start(row.end)] for row in sorted(longest, key=lambda row: row.start)
        ],
        "exposed": {name: round(seconds, 6) for name, seconds in exposed.items()},
        "left_out": max(0, len(comm) - MOST),
    }


def _seconds(time: float, begin: float) -> float:
    """Seconds between two times in ns."""
    return round((time - begin) / 1e9, 6)


def _extent(phases: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    """When a step began, how long it took, and its phases, in seconds since it began."""
    begin, end = phases[0][1], phases[-1][2]
    return {
        "t0": begin / 1e9,
        "seconds": _seconds(end, begin),
        "phases": [[name, _seconds(start, begin), _seconds(stop, begin)] for name, start, stop in phases],
    }


def _fewer(spans: list[Span]) -> list[Span]:
    """At most `MOST` spans: the closest ones are merged."""
    gap = GAP
    while len(spans) > MOST:
        gap *= 2
        spans = merged(spans, gap)
    return spans


def curve(
    allocations: Sequence[Allocation],
    phases: Sequence[tuple[str, int, int]],
    before: Mapping[int, tuple[str, int]],
    after: Mapping[int, str],
    constant: Mapping[str, int],
    freed: int,
    comm: Sequence[Sequence[Any]] = (),
    alive: Collection[int] = (),
    released: Mapping[int, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """The fields of a `memory_step` event except its step.

    A block of the CUDA caching allocator is larger than its tensor: one from before the step has the bytes with
    which it is freed, and they are then missing in "other". `before` has owner and bytes of the addresses allocated
    when the step began, `after` the owner of those allocated at its end, `constant` the bytes without a known
    address, by owner. The CPU profiler does not report when memory from before the step is freed: `released` has
    that time by address, as far as it is known (infinite: not yet), and `freed` is the time for gradients of the
    previous step. An address that is allocated again was freed before, even if no profiled thread did so. gloo's
    threads are not profiled: memory of the size of a collective in `comm`, or of a rank's share of it, which has
    not been freed and is not `alive` at the end, was freed by then. It was free when the next collective was
    complete, unless such memory of the same operation was seen to be activations. Memory allocated in a forward and
    freed in a later phase is activations; memory allocated by a collective is its buffers.
    """
    begin, end = phases[0][1], phases[-1][2]
    zeroed = max(freed, begin)
    starts = [start for _, start, _ in phases]
    inside = sorted(
        (allocation for allocation in allocations if begin <= allocation.time <= end),
        key=lambda allocation: allocation.time,
    )
    if constant.get("other"):
        before, constant = _as_blocks(before, constant, inside)
    changes = [(begin, owner, size) for owner, size in (*constant.items(), *before.values())]
    gone: dict[int, float] = {}
    open_: dict[int, Allocation] = {}
    sizes = {size // parts for _, _, _, size, _, ranks, _ in comm if size for parts in (1, len(ranks or (0,)))}
    closed: list[tuple[Allocation, int, bool]] = []  # with a time at which it is free, and whether its release was seen
    for allocation in inside:
        if allocation.address in open_:
            taken = open_.pop(allocation.address)
            closed.append((taken, _time_of_release(taken, allocation, comm), allocation.size < 0))
        elif allocation.address in before:
            gone.setdefault(
                allocation.address,
                allocation.time
                if allocation.size < 0
                else min(allocation.time, released.get(allocation.address, zeroed)),
            )
        if allocation.size > 0:
            open_[allocation.address] = allocation
    for address, (owner, _) in before.items():
        if address not in after or address in open_:
            gone.setdefault(address, released.get(address, zeroed if owner == "gradients" else begin))
    changes += [
        (max(begin, round(at)), before[address][0], -before[address][1]) for address, at in gone.items() if at <= end
    ]
    for address, taken in [*open_.items()]:
        if taken.size in sizes and address not in after and address not in alive:
            closed.append((open_.pop(address), end, False))
    lasting = {
        (taken.size, taken.inside)
        for taken, time, seen in closed
        if seen and _owner_of(taken, phases, starts, time) == "activations"
    }
    for taken, time, seen in closed:
        if not seen and taken.size in sizes and (taken.size, taken.inside) not in lasting:
            time = min(time, next((stop for _, start, stop, *_ in comm if start >= taken.time), time))
        owner = _owner_of(taken, phases, starts, time)
        changes += (taken.time, owner, taken.size), (time, owner, -taken.size)
    changes += [
        (taken.time, after.get(address) or _owner_of(taken, phases, starts, None), taken.size)
        for address, taken in open_.items()
    ]
    return _columns(sorted(changes, key=lambda change: change[0]), phases)


def _time_of_release(taken: Allocation, freed: Allocation, comm: Sequence[Sequence[Any]]) -> int:
    """When memory is free: what a call of a collective frees before it returns, when gloo's thread starts the
    collective, at the latest. The call may be interrupted after that, by chance, and free it later."""
    if all(any(name.startswith("c10d::") for name in moved.inside) for moved in (taken, freed)):
        return min(freed.time, next((start for _, start, *_ in comm if start >= taken.time), freed.time))
    return freed.time


def _as_blocks(
    before: Mapping[int, tuple[str, int]], constant: Mapping[str, int], allocations: Iterable[Allocation]
) -> tuple[dict[int, tuple[str, int]], dict[str, int]]:
    """`before` with the bytes of the blocks that are freed, and `constant` without what they have more."""
    first: dict[int, int] = {}
    for allocation in allocations:
        first.setdefault(allocation.address, allocation.size)
    blocks = {address: (owner, max(size, -first.get(address, 0))) for address, (owner, size) in before.items()}
    more = sum(size for _, size in blocks.values()) - sum(size for _, size in before.values())
    return blocks, {**constant, "other": constant["other"] - more}


def _owner_of(
    taken: Allocation, phases: Sequence[tuple[str, int, int]], starts: Sequence[int], given_back: int | None
) -> str:
    for name in taken.inside:  # the innermost operation that determines the owner
        if name.startswith(_GATHERED):
            return "parameters"
        if name.startswith(_SENDING):
            return "communication"
    first = bisect_right(starts, taken.time) - 1
    last = len(phases) - 1 if given_back is None else bisect_right(starts, given_back) - 1
    if phases[first][0] in ("forward", "other") and any(
        phase == "backward" for phase, *_ in phases[first + 1 : last + 1]
    ):
        return "activations"
    return "other"


def _columns(changes: Sequence[tuple[int, str, int]], phases: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    begin = phases[0][1]
    now = dict.fromkeys(OWNERS, 0)
    points: list[tuple[int, tuple[int, ...]]] = [(begin, tuple(now.values()))]
    peak, at_peak = 0, dict(now)
    for time, owner, size in changes:
        now[owner] += size
        if points[-1][0] == time:
            points.pop()
        points.append((time, tuple(now.values())))
    for _, sizes in points:  # after all changes at one time
        if sum(sizes) > peak:
            peak, at_peak = sum(sizes), dict(zip(OWNERS, sizes))
    kept = _thinned(points)
    return {
        **_extent(phases),
        "times": [_seconds(time, begin) for time, _ in kept],
        "owners": {owner: [sizes[index] for _, sizes in kept] for index, owner in enumerate(OWNERS)},
        "peak": peak,
        "at_peak": at_peak,
    }


def _thinned(points: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """At most `MOST` points: the first, the maximum of each interval, and the last."""
    if len(points) <= MOST:
        return points
    edges = [1 + number * (len(points) - 2) // (MOST - 2) for number in range(MOST - 1)]
    highest = [max(points[first:last], key=lambda point: sum(point[1])) for first, last in pairwise(edges)]
    return [points[0], *highest, points[-1]]
