"""Makes a forked process like one that was started anew: nothing of its parent is left that the program could notice.

The parent's objects are all still there. They are never destroyed, because the program runs on top of the parent's frames and leaves
by `os._exit`; but those that hold a file or a socket are closed, since their numbers will be given to files of the program.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import itertools
import multiprocessing.process
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.launch.warm.wire import RESERVED

_PR_SET_NAME = 15
_MOST = os.sysconf("SC_OPEN_MAX")  # descriptors
_libc = ctypes.CDLL(None)  # loaded now: after a fork nothing should be
_comm = Path("/proc/self/comm")
_registered: list[Callable[..., Any]] = []  # functions that the parent wants called at its own exit
_register = atexit.register


class Origin:
    """What this process was like before it began to serve: what every process that is forked from it goes back to."""

    def __init__(self) -> None:
        stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        self._arguments = int(stat[45]), int(stat[46])
        block = Path("/proc/self/environ").read_bytes()
        start = block.find(f"{RESERVED}=".encode())
        self._environ = (0, 0) if start < 0 else (int(stat[47]) + start, int(stat[47]) + block.index(b"\0", start))
        self._name = _comm.read_bytes().strip()
        self._handles_faults = faulthandler.is_enabled()
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        atexit.register = _note  # from here on, what is registered is this process's own

    def restore(self, argv: Sequence[str], environment: Mapping[str, str], orig_argv: Sequence[str]) -> None:
        """Gives this process arguments and an environment, and everything else as it was."""
        self._restore_signals()
        if faulthandler.is_enabled() and not self._handles_faults:
            faulthandler.disable()
        for function in _registered:
            atexit.unregister(function)
        _registered.clear()
        atexit.register = _register
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        sys.argv[:], sys.orig_argv[:] = argv, orig_argv
        sys.path[0] = os.getcwd()  # noqa: PTH109 - as python names it
        importlib.invalidate_caches()
        self._update_proc(orig_argv, environment)
        _reseed()

    def set_title(self, argv: Sequence[str]) -> None:
        """Writes a command line where `ps` reads it."""
        start, end = self._arguments
        _write(start, end, " ".join(argv).encode(errors="surrogateescape")[: end - start - 2])
        ctypes.memset(end - 1, ord("."), 1)  # tells the kernel that the command line ends at its first zero

    def _restore_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            if number not in (signal.SIGKILL, signal.SIGSTOP) and handler is not None and signal.getsignal(number) != handler:
                with suppress(OSError, ValueError):  # those of the C library's own
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _update_proc(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Writes command line, environment and name where `ps` and other processes read them."""
        self.set_title(argv)
        first = {name: value for name, value in environment.items() if name.startswith("LABKIT_")}
        variables = [f"{name}={value}\0".encode(errors="surrogateescape") for name, value in (first | dict(environment)).items()]
        room = self._environ[1] - self._environ[0]
        ends = itertools.accumulate(map(len, variables))
        _write(*self._environ, b"".join(one for one, end in zip(variables, ends) if end < room))
        _libc.prctl(_PR_SET_NAME, self._name, 0, 0, 0)


def _note(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    _registered.append(function)
    return _register(function, *args, **kwargs)


def _write(start: int, end: int, data: bytes) -> None:
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))


def _reseed() -> None:
    """What a new process draws from the system when it imports a module, and a forked one would have in common with its siblings."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    tempfile.tempdir = None
    process = multiprocessing.process
    process.current_process().authkey = os.urandom(32)
    process._children.clear()
    process._process_counter = itertools.count(1)


def redirect(stdin: int, stdout: int, stderr: int, keep: Sequence[int] = ()) -> None:
    """Makes three open files the standard ones and closes all others but `keep`, also in the objects that hold them."""
    kept = {0, 1, 2, *keep}
    given = [os.dup(file) for file in (stdin, stdout, stderr)]  # first all, because one may be in another's place
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, socket.socket):
            if thing.fileno() > 2:
                thing.detach()
        elif issubclass(kind, io.FileIO) and not thing.closed and thing.fileno() not in kept:
            thing.close()
    for number, file in enumerate(given):
        os.dup2(file, number)
    last = 3
    for number in sorted({*kept, _MOST}):
        if number > 2:
            os.closerange(last, number)
            last = number + 1
    sys.stdin = sys.__stdin__ = _stream(0, "<stdin>", sys.stdin)
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>", sys.stdout)
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>", sys.stderr)


def _stream(number: int, name: str, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard stream as `python -u` makes it."""
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = name
    buffer = raw if number else io.BufferedReader(raw)
    text = io.TextIOWrapper(buffer, like.encoding, like.errors, newline="\n" if number else None, write_through=True)
    text.mode = "w" if number else "r"
    return text
