"""Detects ranks that cannot report themselves: stopped by a signal, or blocked in a C call that holds the GIL.

Once per second the supervisor checks the process of each rank and writes a `silent` event on behalf of such a rank; a
`heard` event follows when the rank responds again. A C call that holds the GIL is detected by the stacks that
faulthandler writes in the rank when its monitoring thread has not run for too long; see `probe/position.py`. Both are
reported after as many seconds as a rank that waits, `hang_after` of the Spec: a debugger or a shell may stop a process
briefly.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from labkit.record import clock
from labkit.record.folder import RunFolder
from labkit.record.stacks import clipped, in_collective, of_crash

_EVERY = 1.0  # seconds between two checks
_AGAIN = 10.0  # seconds between two reports
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass
class _Watched:
    """The process of one rank and its state. `cpu` and `heard` are of the newest position that it wrote."""

    process: psutil.Process
    heard: float = 0.0  # on the run's clock
    cpu: float = 0.0  # seconds
    since: float | None = None
    reported: float | None = None
    position: dict[str, Any] = field(default_factory=dict)


class Silence:
    """Checks the ranks. `pids` maps ranks to pids and may grow; `patience` is in seconds; `write` appends an event to
    the supervisor's event file.
    """

    def __init__(self, folder: RunFolder, pids: dict[int, int], patience: float, write: Callable[..., None]):
        self._folder, self._pids, self._patience, self._write = folder, pids, patience, write
        self._watched: dict[int, _Watched] = {}
        self._next = 0.0

    def look(self) -> None:
        """Checks every rank, at most once per second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        for rank, pid in dict(self._pids).items():
            try:
                one = self._watched.get(rank)
                if one is None or one.process.pid != pid:
                    one = self._watched[rank] = _Watched(psutil.Process(pid))
                self._look_at(rank, one)
            except psutil.Error:
                self._watched.pop(rank, None)

    def _look_at(self, rank: int, one: _Watched) -> None:
        with one.process.oneshot():
            status, times = one.process.status(), one.process.cpu_times()
        cpu = times.user + times.system
        position = _position(self._folder, rank)
        if position.get("t", 0.0) != one.heard:
            one.heard, one.cpu, one.position = position.get("t", 0.0), cpu, position
        stack = "" if position.get("over") else _held_by_c(self._folder, rank)
        if not stack and status not in _STOPPED:
            if one.reported is not None:
                self._write("heard", rank=rank)
            one.since, one.reported = None, None
            return
        one.since, now = one.since or one.heard or clock.now(), clock.now()
        if now - one.since >= self._patience and (one.reported is None or now - one.reported >= _AGAIN):
            one.reported = now
            self._report(rank, one, status, stack, cpu)

    def _report(self, rank: int, one: _Watched, status: str, stack: str, cpu: float) -> None:
        silent = max(clock.now() - one.since, 1e-3)
        self._write(
            "silent",
            rank=rank,
            since=one.since,
            process=str(status),
            computed=round(min(1.0, (cpu - one.cpu) / silent), 3),
            stack=stack or clipped(str(one.position.get("stack", ""))),
        )


def last_position(folder: RunFolder, rank: int) -> str:
    """The last stack that a rank recorded before its process ended, at most one second old; empty if there is none."""
    return clipped(str(_position(folder, rank).get("stack", "")))


def crash_stack(folder: RunFolder, rank: int) -> str:
    """The stack of the fatal signal that ended a rank; empty if nothing was written."""
    dump = folder.end_of(folder.crash_of(rank))
    return clipped(of_crash(dump)) if "Fatal Python error" in dump else ""


def stack_beside(folder: RunFolder, rank: int) -> str:
    """The stack of a thread beside the main one that was in a collective when a fatal signal ended a rank; empty if
    there was none.
    """
    dump = folder.end_of(folder.crash_of(rank))
    return clipped(in_collective(dump)) if "Fatal Python error" in dump else ""


def _held_by_c(folder: RunFolder, rank: int) -> str:
    dump = folder.end_of(folder.crash_of(rank))
    return clipped(of_crash(dump)) if dump.startswith("Timeout") else ""


def _position(folder: RunFolder, rank: int) -> dict[str, Any]:
    try:
        value = json.loads(folder.end_of(folder.position_of(rank)) or "{}")
    except ValueError:
        return {}  # it is being written
    valid = isinstance(value, dict) and isinstance(value.get("t", 0.0), (int, float))
    return value if valid else {}
