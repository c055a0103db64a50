"""The processes of a run: who they are, whether they live, how they are ended. Found by the run's own tag, never by name."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil

TAG = "LABKIT_RUN_DIR"
_CLOCK = 2.0  # seconds that two readings of one process's start may differ by: the time of boot is known to a second


def identity(pid: int | None = None) -> dict[str, Any]:
    """`pid` and `create_time` of a process (this one by default): together they name it, even after its pid is used again."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "create_time": process.create_time()}


def living(pid: Any) -> psutil.Process | None:
    """The process of this pid; None where there is none, or it is only waiting to be reaped."""
    if not isinstance(pid, int):
        return None
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, ValueError):
        return None


def is_same(process: psutil.Process, who: dict[str, Any]) -> bool:
    """Whether a process is the one of an `identity`, as far as the two starting times tell."""
    try:
        return process.pid == who["pid"] and abs(process.create_time() - who["create_time"]) < _CLOCK
    except (psutil.Error, KeyError, TypeError):
        return False


def tag_of(process: psutil.Process) -> str | None:
    """The run folder that a process belongs to, as its environment had it at the start; None where it has none or hides it."""
    try:
        return process.environ().get(TAG)
    except (psutil.Error, OSError):
        return None


def tagged(tag: str) -> list[psutil.Process]:
    """Every process whose environment carries exactly this tag, but for this process itself."""
    found = []
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            continue
        if pid != os.getpid() and tag_of(process) == tag:
            found.append(process)
    return found


def end(tag: str, grace: float, limit: float = 3.0) -> list[psutil.Process]:
    """Ends every process of the tag: SIGTERM, after `grace` seconds SIGKILL (at once where it is 0).

    Gives back those that did not go within `limit` seconds more: such a process waits inside the kernel, for a device or a disk.
    """
    if grace:
        asked = tagged(tag)
        _send(asked, psutil.Process.terminate)
        psutil.wait_procs(asked, timeout=grace)
    last = time.monotonic() + limit
    while left := tagged(tag):  # once more after each round: one of them may have made another meanwhile
        _send(left, psutil.Process.kill)
        psutil.wait_procs(left, timeout=0.5)
        if time.monotonic() > last:
            return tagged(tag)
    return []


def _send(processes: list[psutil.Process], signal) -> None:
    for process in processes:
        try:
            signal(process)
        except psutil.Error:
            continue  # gone by itself, or not ours to end: the caller looks again
