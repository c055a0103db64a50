"""Forked processes with the interface of started ones: `Child` is to a function what `subprocess.Popen` is to a
command.
"""

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

_LOOK = 0.005  # seconds between two polls in `wait`
_FAILED = 1  # exit code of a process that could not start


class Child:
    """A child of this process with the subset of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int, args: Sequence[str]):
        self.pid = pid
        self.args = args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # already reaped elsewhere: the exit code is unknown
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
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
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
    """Forks a process that runs `program` as if started by `command` (python, its flags, `-m`, a module, its
    arguments).

    `files` become its standard input, output and error; all other descriptors except `keep` are closed. `before` is
    called in the new process as soon as its environment is set.
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
    """Whether this process has opened a GPU device: CUDA does not work in a forked process after initialisation."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed in the meantime
            if str(path.readlink()).startswith("/dev/nvidia"):
                return True
    return False


def _path_of(module: str) -> str:
    """The file that `python -m` passes as sys.argv[0]."""
    found = sys.modules.get(f"{module}.__main__") or sys.modules.get(module)
    return getattr(found, "__file__", None) or module


def _run(program: Callable[[], None]) -> NoReturn:
    """Runs a program and exits with the same exit code as the interpreter would."""
    from labkit.probe.leaving import leave

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
