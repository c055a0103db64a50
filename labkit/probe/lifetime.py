"""What binds the processes of a run together on Linux: a child dies with its parent, and orphans come to the supervisor.

Two promises of the kernel are used. PR_SET_PDEATHSIG kills a process when its parent dies; it has to be requested by the child, and a
parent that died before the request is not noticed. So every parent tells its children who it is (pid and start time, in the environment
variable `PARENT`), and a child whose parent is another process by then kills itself. PR_SET_CHILD_SUBREAPER makes orphaned descendants
children of the supervisor instead of init's, so that it finds those that have hidden their tag and left their session.

A process that is forked without exec calls the same functions: `end_with_parent` in the child, then `announce`. The kernel watches the
thread that forked, so fork from a thread that lives as long as its process. On other systems than Linux nothing here has an effect.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from labkit.record import clock

PARENT = "LABKIT_PARENT"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
_prctl: Callable[..., int] | None = ctypes.CDLL(None).prctl if _LINUX else None  # loaded now: after a fork nothing may be imported


def identity(pid: int) -> str:
    """`pid:start` of a process, with the start in clock ticks since boot: setting a clock does not change it. Empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return f"{pid}:{stat.rpartition(b')')[2].split()[19].decode()}"


def began(pid: int) -> float | None:
    """When a process of this machine began, in unix seconds on the run's clock, to 10 ms; None where the system does not tell."""
    _, _, ticks = identity(pid).partition(":")
    if not ticks:
        return None
    return clock.now() - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


def end_with_parent(parent: str) -> None:
    """Has the kernel kill this process when its parent dies; kills it now if its parent is not `parent` (an `identity`) any more."""
    if _prctl is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if identity(os.getppid()) != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def announce() -> None:
    """Tells the processes that this one starts from now on who their parent is."""
    if _LINUX:
        os.environ[PARENT] = identity(os.getpid())


def adopt_orphans() -> None:
    """Makes this process the new parent of all its descendants whose own parent dies."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
