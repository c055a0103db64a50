"""A forked process in the place of a started one: what `subprocess.Popen` is to a command, `Child` is to a function."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from labkit.launch.warm.fresh import Origin, redirect

_LOOK = 0.005  # seconds between two looks at a process that is waited for
_FAILED = 1  # exit code of a process that could not begin


class Child:
    """A child of this process, by its pid; the part of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int, args: Sequence[str]):
        self.pid = pid
        self.args = args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has asked: what it was is not known
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code. Raises `subprocess.TimeoutExpired`."""
        last = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if last is not None and time.monotonic() > last:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_LOOK)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signals the process if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


def fork(
    program: Callable[[], None],
    origin: Origin,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: tuple[int, int, int],
    *,
    cwd: str | None = None,
    keep: Sequence[int] = (),
    new_session: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Child:
    """Forks a process that runs `program` as if `command` (python, its flags, `-m`, a module, its arguments) had started it.

    `files` become its standard input, output and errors; of the others it has only `keep`. `before` is called in the new process once it
    has its environment, and before anything else can go wrong.
    """
    pid = os.fork()
    if pid:
        return Child(pid, command)
    try:
        if new_session:
            os.setsid()
        redirect(*files, keep)
        if cwd is not None:
            os.chdir(cwd)
        module = command.index("-m") + 1
        origin.restore([_path_of(command[module]), *command[module + 1 :]], environment, command)
        before()
    except BaseException:
        traceback.print_exc()
        os._exit(_FAILED)
    return _run(program)


def has_gpu_open() -> bool:
    """Whether this process has a GPU's device open: CUDA, once initialised, does not work in a copy of the process."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            if str(path.readlink()).startswith("/dev/nvidia"):
                return True
    return False


def _path_of(module: str) -> str:
    """The file that `python -m` names as sys.argv[0]."""
    found = sys.modules.get(f"{module}.__main__") or sys.modules.get(module)
    return getattr(found, "__file__", None) or module


def _run(program: Callable[[], None]) -> NoReturn:
    """Runs a program as the interpreter does, to the exit code."""
    from labkit.probe.runner import leave

    code = 0
    try:
        program()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    leave(code & 0xFF)
