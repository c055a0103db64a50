"""Profiled steps as a trace for Perfetto or Chrome: one process per rank, on a common time axis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.analysis.nodes import ahead
from labkit.analysis.profiled import aligned, profiled_steps
from labkit.common.files import MARK, write_output
from labkit.record.events import Timeline
from labkit.record.state import RunState

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


def _events(rank: int, step: int, one: Timeline, begin: float) -> Iterator[dict[str, Any]]:
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

    for name, start, end in one.phases:
        yield span(_PHASES, name, start, end)
    for start, end in one.busy:
        yield span(_COMPUTING, "compute", start, end)
    for name, start, end in one.marks:
        yield span(_MARKS, name, start, end)
    free: list[float] = []  # overlapping collectives get separate rows: spans of one row must nest
    for call in sorted(one.comm, key=lambda call: call.start):
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
