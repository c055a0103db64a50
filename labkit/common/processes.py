"""The processes of a run: how they are found and how they are terminated.

A process belongs to a run if its own environment carries the run's tag, or if it is a descendant of the run's supervisor. No file can
make a process part of a run, so nothing that a run folder says is enough to have a process signalled.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

TAG = "LABKIT_RUN_DIR"
_SUPERVISOR = "labkit.launch.supervisor"
_CLOCK = 2.0  # seconds that two readings of one process's start may differ by: the time of boot is known to a second
_LOOK = 0.02  # seconds between two looks at processes that are to end


def identity(pid: int | None = None) -> dict[str, Any]:
    """`pid` and `create_time` of a process (this one by default): together they name it, even after its pid is used again."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "create_time": process.create_time()}


@cache
def here() -> dict[str, Any]:
    """Where a pid names a process: `host`, and `boot`, which differs after a restart, and in containers that share the name of the host.

    `boot` is empty where the system does not tell.
    """
    boot = []
    with suppress(OSError):
        boot.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        boot.append(str(Path("/proc/self/ns/pid").readlink()))
    return {"host": socket.gethostname(), "boot": " ".join(boot)}


def living(pid: Any) -> psutil.Process | None:
    """The process of this pid; None where there is none, or it is only waiting to be reaped."""
    if not isinstance(pid, int):
        return None
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None


def is_same(process: psutil.Process, who: dict[str, Any]) -> bool:
    """Whether a process is the one of an `identity`, as far as the two starting times tell. Not enough to signal it."""
    try:
        return process.pid == who["pid"] and abs(process.create_time() - who["create_time"]) < _CLOCK
    except (psutil.Error, KeyError, TypeError):
        return False


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process was halted by SIGSTOP or the like, and so handles no signal but SIGKILL and SIGCONT."""
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


# ---- whose a process is


def tag_of(process: psutil.Process) -> str | None:
    """The run folder that a process's environment names, as it was at its start.

    Empty if the process carries no tag, None if its environment cannot be read (it is another user's, or has ended).
    """
    try:
        return process.environ().get(TAG, "")
    except (psutil.Error, OSError):
        return None


def names(tag: str | None, folder: Path) -> bool:
    """Whether a tag names this folder, and not one that it was copied from. No tag names none."""
    if not tag:
        return False
    if tag == str(folder):
        return True
    try:
        return Path(tag).samefile(folder)
    except (OSError, ValueError):
        return False


def is_supervisor(process: psutil.Process) -> bool:
    """Whether a process runs the supervisor's module."""
    try:
        return _SUPERVISOR in process.cmdline()
    except psutil.Error:
        return False


def tagged(matches: Callable[[str], bool]) -> list[psutil.Process]:
    """Every living process but this one whose tag `matches`."""
    found = []
    for pid in psutil.pids():
        process = living(pid) if pid != os.getpid() else None
        tag = tag_of(process) if process is not None else None
        if process is not None and tag and matches(tag):
            found.append(process)
    return found


def of_folder(folder: Path) -> list[psutil.Process]:
    """The processes of the run in `folder`, which may have been deleted, as any process of this user sees them: by their tag alone."""
    return tagged(lambda tag: names(tag, folder))


def members(tag: str) -> list[psutil.Process]:
    """The processes of the run that this process supervises: those with its tag, and its own descendants whatever they carry.

    A descendant with another run's tag is a run that was started from within this one; it and what belongs to it are left out.
    """
    found = {process.pid: process for process in tagged(lambda other: other == tag)}
    parents = [psutil.Process()]
    while parents:
        for child in _children(parents.pop()):
            if living(child.pid) is not None and tag_of(child) in (tag, "", None):
                found[child.pid] = child
                parents.append(child)
    return list(found.values())


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


# ---- how processes end


def end(find: Callable[[], list[psutil.Process]], grace: float, limit: float = 3.0) -> list[psutil.Process]:
    """Terminates what `find` finds: SIGTERM, after `grace` seconds SIGKILL (at once if it is 0).

    Returns those that are still there `limit` seconds later: such a process is blocked inside the kernel, or another user's.
    """
    if grace:
        asked = find()
        send(asked, psutil.Process.terminate)
        send(filter(is_stopped, asked), psutil.Process.resume)
        _wait(asked, grace)
    last = time.monotonic() + limit
    while left := find():  # again after each round: one of them may have started another meanwhile
        if time.monotonic() > last:
            return left
        send(left, psutil.Process.kill)
        _wait(left, 0.5)
    return []


def send(processes: Iterable[psutil.Process], signal: Callable[[psutil.Process], Any]) -> None:
    """Signals each process; one that is gone, or another user's, is skipped: the caller looks again."""
    for process in processes:
        with suppress(psutil.Error):
            signal(process)


def _wait(processes: list[psutil.Process], seconds: float) -> None:
    """Waits until all have ended, or `seconds`. It reaps none: the exit code of a child belongs to whoever started it."""
    last = time.monotonic() + seconds
    while any(_is_running(process) for process in processes) and time.monotonic() < last:
        time.sleep(_LOOK)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def reap(child: subprocess.Popen) -> None:
    """Collects the exit codes of this process's children that have ended; `child`'s goes to its Popen."""
    if not hasattr(os, "waitid"):
        return  # without orphans to adopt (see probe/lifetime.py) there is no other child
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child.pid:
                child.poll()
            else:
                os.waitpid(ended.si_pid, 0)
