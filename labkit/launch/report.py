"""Reports on behalf of ranks that cannot: those that are stopped by a signal, or blocked in a C call that holds the
GIL, and those that died without a message.

Once per second the supervisor checks the process of each rank and writes a `silent` event on behalf of such a rank; a
`heard` event follows when the rank responds again. A C call that holds the GIL is detected by the stacks that
faulthandler writes in the rank when its monitoring thread has not run for too long; see `probe/threads.py`. Both are
reported after as many seconds as a rank that waits, `hang_after` of the Spec: a debugger or a shell may stop a process
briefly. The only record of a rank that died without a message is torchrun's final report.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from labkit.record import clock
from labkit.record.documents import Failed
from labkit.record.folder import RunFolder
from labkit.record.stacks import clipped, in_collective, of_crash

# ---- ranks that cannot report themselves


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
                watched = self._watched.get(rank)
                if watched is None or watched.process.pid != pid:
                    watched = self._watched[rank] = _Watched(psutil.Process(pid))
                self._look_at(rank, watched)
            except psutil.Error:
                self._watched.pop(rank, None)

    def _look_at(self, rank: int, watched: _Watched) -> None:
        with watched.process.oneshot():
            status, times = watched.process.status(), watched.process.cpu_times()
        cpu = times.user + times.system
        position = _position(self._folder, rank)
        if position.get("t", 0.0) != watched.heard:
            watched.heard, watched.cpu, watched.position = position.get("t", 0.0), cpu, position
        stack = "" if position.get("over") else _held_by_c(self._folder, rank)
        if not stack and status not in _STOPPED:
            if watched.reported is not None:
                self._write("heard", rank=rank)
            watched.since, watched.reported = None, None
            return
        watched.since, now = watched.since or watched.heard or clock.now(), clock.now()
        if now - watched.since >= self._patience and (watched.reported is None or now - watched.reported >= _AGAIN):
            watched.reported = now
            self._report(rank, watched, status, stack, cpu)

    def _report(self, rank: int, watched: _Watched, status: str, stack: str, cpu: float) -> None:
        silent = max(clock.now() - watched.since, 1e-3)
        self._write(
            "silent",
            rank=rank,
            since=watched.since,
            process=str(status),
            computed=round(min(1.0, (cpu - watched.cpu) / silent), 3),
            stack=stack or clipped(str(watched.position.get("stack", ""))),
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


# ---- what torchrun reports


# One entry of ChildFailedError's report (torch.distributed.elastic.multiprocessing.errors); only the needed fields are
# read.
_ENTRY = re.compile(
    r"\btime\s*:\s*(?P<time>\S+)\s*\n(?:.*\n)??"
    r".*\brank\s*:\s*(?P<rank>\d+)\s*\(.*\n"
    r".*\bexitcode\s*:\s*(?P<code>-?\d+)\s*\(pid:\s*(?P<pid>\d+)\)"
)


def failures(folder: RunFolder) -> dict[int, Failed]:
    """The failed ranks by rank: exit_code, pid, signal (its name or None), t (Unix seconds, resolution 1 s), message.

    `traceback` is the stack at the fatal signal; without one it is the last recorded stack, and `last_seen` is true.
    """
    failed = {}
    for entry in _ENTRY.finditer(folder.end_of(folder.launcher_log)):
        code, rank = int(entry["code"]), int(entry["rank"])
        crash = crash_stack(folder, rank) or _printed_crash(folder, rank)
        stack = crash or last_position(folder, rank)
        failed[rank] = Failed(
            message=(_aborted if code < 0 else _last_stderr_line)(folder, rank),
            traceback=stack,
            beside=stack_beside(folder, rank),
            last_seen=bool(stack) and not crash,
            exit_code=code,
            pid=int(entry["pid"]),
            signal=signal_name(code),
            t=_seconds(entry["time"]),
        )
    return failed


def unanswered(folder: RunFolder, endpoint: str | None) -> str:
    """Why the nodes of a run did not meet at `endpoint`; empty if they did, or if there is one node."""
    said = folder.end_of(folder.launcher_log) if endpoint else ""
    if "RendezvousConnectionError" in said:
        return (
            f"nobody answers at {endpoint}; start node 0 first, and check that this host reaches it and that no"
            " firewall closes the port"
        )
    if "RendezvousTimeoutError" in said:
        return f"not all nodes have met at {endpoint} in time; start the same command on every node, each with its rank"
    return ""


def _printed_crash(folder: RunFolder, rank: int) -> str:
    """The stack of a fatal signal on stderr, which is there if the script enabled faulthandler itself."""
    path = folder.log_of(rank, "stderr")
    printed = folder.end_of(path).rpartition("Fatal Python error")[2] if path else ""
    return of_crash(printed)


def signal_name(exit_code: int) -> str | None:
    """`SIGKILL` for -9; None for an exit code without a signal."""
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else None
    except ValueError:
        return f"signal {-exit_code}"


def last_line(folder: RunFolder, path: Path) -> str:
    """The last line of a log that is not blank; empty if there is none."""
    lines = [line.strip() for line in folder.end_of(path).splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def _aborted(folder: RunFolder, rank: int) -> str:
    """The message of an uncaught C++ exception; empty if there was none."""
    path = folder.log_of(rank, "stderr")
    said = re.findall(r"^ *what\(\): *(.+)$", folder.end_of(path), re.MULTILINE) if path else []
    return said[-1][:500] if said else ""


def _last_stderr_line(folder: RunFolder, rank: int) -> str:
    path = folder.log_of(rank, "stderr")
    return last_line(folder, path) if path else ""


def _seconds(text: str) -> float:
    try:
        return round(time.mktime(time.strptime(text, "%Y-%m-%d_%H:%M:%S")) + clock.shift(), 3)
    except ValueError:
        return clock.now()
