"""Ties the lifetimes of a run's processes together on Linux: a child dies with its parent, and the supervisor adopts
orphans.

Two kernel features are used. PR_SET_PDEATHSIG kills a process when its parent dies; the child has to request it, and
misses a parent that died before the request. Every parent therefore passes its identity (pid and start time) to its
children in the environment variable `PARENT`, and a child with a different parent kills itself. PR_SET_CHILD_SUBREAPER
makes orphaned descendants children of the supervisor instead of init, so that it finds those that have cleared their
tag and left their session.

A process that is forked without exec calls the same functions: `end_with_parent` in the child, then `announce`. The
kernel tracks the thread that forked, so fork from a thread that lives as long as its process. On other systems these
functions do nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.record import clock

PARENT = "LABKIT_PARENT"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
# loaded now, because nothing may be imported after a fork
_prctl: Callable[..., int] | None = ctypes.CDLL(None).prctl if _LINUX else None


def identity(pid: int) -> str:
    """`pid:start` of a process, with the start in clock ticks since boot, independent of clock changes. Empty if it has
    ended.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return f"{pid}:{stat.rpartition(b')')[2].split()[19].decode()}"


def began(pid: int) -> float | None:
    """The start time of a process, in Unix seconds on the run's clock, accurate to 10 ms; None if it is unavailable."""
    _, _, ticks = identity(pid).partition(":")
    if not ticks:
        return None
    return clock.now() - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


def end_with_parent(parent: str) -> None:
    """Makes the kernel kill this process when its parent dies; kills it now if its parent is no longer `parent` (an
    `identity`).
    """
    if _prctl is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if identity(os.getppid()) != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def announce() -> None:
    """Passes the identity of this process to the processes that it starts from now on."""
    if _LINUX:
        os.environ[PARENT] = identity(os.getpid())


def adopt_orphans() -> None:
    """Makes this process the new parent of all its orphaned descendants."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# ---- ends a rank's process as python does, but without tearing down the interpreter


exit_process = os._exit  # Python's own, before the probe wraps it


def leave(code: int) -> None:
    """Does what python does at exit, as far as a script can notice, and exits.

    The interpreter and libraries are not torn down, because live threads of torch's C++ libraries can then abort the
    process after a successful training ("terminate called without an active exception").
    """
    for last in (threading._shutdown, atexit._run_exitfuncs, _close_files, _flush):
        try:
            last()
        except BaseException:
            with suppress(BaseException):
                traceback.print_exc()
    exit_process(code)


def _close_files() -> None:
    """Closes files that the script left open for writing, in the order of their layers: text, compression, bytes."""
    streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    standard = {id(part) for stream in streams for part in (stream, getattr(stream, "buffer", None))}
    kinds = io.TextIOBase, io.BufferedIOBase
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds) and id(thing) not in standard]

    def layer(file: Any) -> tuple[bool, bool]:
        return not isinstance(file, io.TextIOBase), isinstance(file, (io.BufferedWriter, io.BufferedRandom))

    for file in sorted(files, key=layer):
        with suppress(Exception):
            if not file.closed and file.writable():
                file.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # output of C libraries
