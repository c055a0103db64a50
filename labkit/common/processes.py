"""The processes of a run: finding and terminating them.

A process belongs to a run if its environment contains the run's tag, or if it is a descendant of the run's supervisor.
Files cannot make a process part of a run, so the content of a run folder can never cause a process to be signalled.
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

from labkit.common.files import is_same_file

TAG = "LABKIT_RUN_DIR"
_WATCHDOG = "/watchdog"
_SUPERVISOR = "labkit.launch.supervisor"
# seconds between two readings of the start time of one process: the boot time has a resolution of 1 s
_CLOCK_TOLERANCE = 2.0
_POLL_INTERVAL = 0.02  # seconds between two checks whether processes have ended


def identity(pid: int | None = None) -> dict[str, Any]:
    """`pid` and `create_time` of a process (default: this one): together they identify it, even after its pid is
    reused."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "create_time": process.create_time()}


@cache
def here() -> dict[str, str]:
    """The scope of a pid: `host`, and `boot`, which differs after a reboot and between containers with the same host
    name.

    `boot` is empty if the system does not provide it.
    """
    boot = []
    with suppress(OSError):
        boot.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        boot.append(str(Path("/proc/self/ns/pid").readlink()))
    return {"host": socket.gethostname(), "boot": " ".join(boot)}


def living(pid: Any) -> psutil.Process | None:
    """The process with this pid; None if there is none, or if it is a zombie."""
    if not isinstance(pid, int):
        return None
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None


def is_same(process: psutil.Process, pid: int, create_time: float) -> bool:
    """Whether a process matches an `identity` by pid and start time. This is not sufficient for signalling it."""
    try:
        apart: float = abs(process.create_time() - create_time)
        return process.pid == pid and apart < _CLOCK_TOLERANCE
    except psutil.Error:
        return False


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process was stopped, for example by SIGSTOP, so that it handles only SIGKILL and SIGCONT."""
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


# ---- which run a process belongs to


def tag_of(process: psutil.Process) -> str | None:
    """The run folder in a process's environment, as of its start.

    Empty if the process has no tag, None if its environment cannot be read (it belongs to another user, or has ended).
    """
    try:
        return process.environ().get(TAG, "")
    except (psutil.Error, OSError):
        return None


def names(tag: str | None, folder: Path) -> bool:
    """Whether a tag refers to this folder, and not to one that it was copied from; False without a tag."""
    if not tag:
        return False
    return tag == str(folder) or is_same_file(tag, folder)


def watchdog_tag(folder: Path) -> str:
    """The tag of the watchdog of a run. It names no folder, so the watchdog is a process of no run, not even of one
    that contains this one, and nothing that ends a run ends the watchdog."""
    return f"{folder}{_WATCHDOG}"


def is_watchdog(process: psutil.Process) -> bool:
    """Whether a process is the watchdog of a run."""
    return (tag_of(process) or "").endswith(_WATCHDOG)


def is_supervisor(process: psutil.Process) -> bool:
    try:
        return _SUPERVISOR in process.cmdline()
    except psutil.Error:
        return False


def tagged(matches: Callable[[str], bool]) -> list[psutil.Process]:
    """All living processes, except this one, whose tag `matches`."""
    found = []
    for pid in psutil.pids():
        process = living(pid) if pid != os.getpid() else None
        tag = tag_of(process) if process is not None else None
        if process is not None and tag and matches(tag):
            found.append(process)
    return found


def of_folder(folder: Path) -> list[psutil.Process]:
    """The processes of the run in `folder`, which may have been deleted, identified only by their tag."""
    return tagged(lambda tag: names(tag, folder))


def members(tag: str) -> list[psutil.Process]:
    """The processes of the run that this process supervises: those with its tag, and its own descendants with or
    without a tag.

    A descendant with the tag of another run belongs to a run that was started within this one; it and its descendants
    are excluded.
    """
    by_pid = {process.pid: process for process in tagged(lambda other: other == tag)}
    parents = [psutil.Process()]
    while parents:
        for child in _children(parents.pop()):
            if living(child.pid) is not None and tag_of(child) in (tag, "", None):
                by_pid[child.pid] = child
                parents.append(child)
    return list(by_pid.values())


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


# ---- terminating processes


def end(find: Callable[[], list[psutil.Process]], grace: float, limit: float = 3.0) -> list[psutil.Process]:
    """Terminates the processes that `find` returns: SIGTERM, and after `grace` seconds SIGKILL (at once if `grace` is
    0).

    Returns the processes that are still alive `limit` seconds later: they are blocked in the kernel or belong to
    another user.
    """
    if grace:
        processes = find()
        send(processes, psutil.Process.terminate)
        send(filter(is_stopped, processes), psutil.Process.resume)
        _wait(processes, grace)
    deadline = time.monotonic() + limit
    while alive := find():  # repeated, because a process may have started another one in the meantime
        if time.monotonic() > deadline:
            return alive
        send(alive, psutil.Process.kill)
        _wait(alive, 0.5)
    return []


def send(processes: Iterable[psutil.Process], signal: Callable[[psutil.Process], Any]) -> None:
    """Signals each process; skips processes that have ended or belong to another user. The caller checks again."""
    for process in processes:
        with suppress(psutil.Error):
            signal(process)


def _wait(processes: list[psutil.Process], seconds: float) -> None:
    """Waits until all have ended, at most `seconds`. It does not reap them: the code that started a child needs its
    exit code."""
    deadline = time.monotonic() + seconds
    while any(_is_running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def reap(child: subprocess.Popen[Any]) -> None:
    """Reaps the children of this process that have ended; the exit code of `child` goes to its Popen."""
    if not hasattr(os, "waitid"):
        return  # orphans are not adopted here (see probe/lifetime.py), so there is no other child
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child.pid:
                child.poll()
            else:
                os.waitpid(ended.si_pid, 0)
