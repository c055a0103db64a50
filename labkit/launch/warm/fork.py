"""The processes of a warm run, each forked from its parent: supervisor, torchrun's own agent, ranks; and the process
that traces for predictions. How each is reset to the state of a newly started one, with the interface of one.
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
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from labkit.launch import supervisor
from labkit.launch.warm.client import RESERVED
from labkit.probe import __main__ as probe
from labkit.probe.lifetime import leave
from labkit.probe.torch_private import CALLER, START_PROCESS, STDERR, STDOUT

# ---- the state of a newly started process


_PR_SET_NAME = 15
_MOST = os.sysconf("SC_OPEN_MAX")  # descriptors
_libc = ctypes.CDLL(None)  # loaded now, because nothing should be loaded after a fork
_comm = Path("/proc/self/comm")
_registered: list[Callable[..., Any]] = []  # exit functions of the parent
_register = atexit.register


class Origin:
    """The state of this process before it starts serving, which every forked process restores."""

    def __init__(self) -> None:
        stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        self._arguments = int(stat[45]), int(stat[46])
        block = Path("/proc/self/environ").read_bytes()
        start = block.find(f"{RESERVED}=".encode())
        self._environ = (0, 0) if start < 0 else (int(stat[47]) + start, int(stat[47]) + block.index(b"\0", start))
        self._name = _comm.read_bytes().strip()
        self._handles_faults = faulthandler.is_enabled()
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        atexit.register = _note  # functions registered from here on belong to this process

    def restore(self, argv: Sequence[str], environment: Mapping[str, str], orig_argv: Sequence[str]) -> None:
        """Sets the arguments and the environment of this process, and restores everything else."""
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
        """Sets the command line that `ps` shows."""
        start, end = self._arguments
        _write(start, end, " ".join(argv).encode(errors="surrogateescape")[: end - start - 2])
        ctypes.memset(end - 1, ord("."), 1)  # tells the kernel that the command line ends at its first zero

    def _restore_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            if (
                number not in (signal.SIGKILL, signal.SIGSTOP)
                and handler is not None
                and signal.getsignal(number) != handler
            ):
                with suppress(OSError, ValueError):  # signals reserved by the C library
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _update_proc(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Sets the command line, environment and name that `ps` and other processes see."""
        self.set_title(argv)
        first = {name: value for name, value in environment.items() if name.startswith("LABKIT_")}
        variables = [
            f"{name}={value}\0".encode(errors="surrogateescape") for name, value in (first | dict(environment)).items()
        ]
        room = self._environ[1] - self._environ[0]
        ends = itertools.accumulate(map(len, variables))
        _write(*self._environ, b"".join(variable for variable, end in zip(variables, ends) if end < room))
        _libc.prctl(_PR_SET_NAME, self._name, 0, 0, 0)


def _note(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    _registered.append(function)
    return _register(function, *args, **kwargs)


def _write(start: int, end: int, data: bytes) -> None:
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))


def _reseed() -> None:
    """Renews random state that a new process initialises on import and that forked siblings would otherwise share."""
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
    """Installs three open files as standard streams and closes all other descriptors except `keep`, including their
    objects.
    """
    kept = {0, 1, 2, *keep}
    # duplicate all first, because they may have the numbers 0 to 2
    given = [os.dup(file) for file in (stdin, stdout, stderr)]
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
    """A standard stream as `python -u` creates it."""
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = name
    buffer = raw if number else io.BufferedReader(raw)
    text = io.TextIOWrapper(buffer, like.encoding, like.errors, newline="\n" if number else None, write_through=True)
    text.mode = "w" if number else "r"
    return text


# ---- forked processes with the interface of started ones


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
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
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


# ---- the processes of a warm run


_PROBE = ("-u", "-m", "labkit.probe")  # the command of a rank after the interpreter
_STREAMS = STDOUT.attribute, STDERR.attribute
_start_process = START_PROCESS.get()


def fork_supervisor(
    origin: Origin, run_dir: str, started: str, environment: Mapping[str, str], lifeline: int, log: int, *passed: int
) -> Child:
    """Forks the supervisor of a run. `passed` are the last arguments of `supervisor.main`."""
    command = (sys.executable, "-m", supervisor.__name__, run_dir, started, *map(str, passed))

    def program() -> None:
        supervisor.main(*sys.argv[1:], popen=partial(_fork_agent, origin))

    return fork(program, origin, command, environment, (lifeline, log, log), cwd=run_dir, keep=passed, new_session=True)


def fork_tracer(origin: Origin, environment: Mapping[str, str], stdin: int, stdout: int, stderr: int) -> Child:
    """Forks a process that traces scripts for predictions until its standard input is closed."""
    command = (sys.executable, "-m", "labkit.prediction.tracing")

    def program() -> None:
        from labkit.prediction.tracing.__main__ import main

        main()

    return fork(program, origin, command, environment, (stdin, stdout, stderr), new_session=True)


def _fork_agent(
    origin: Origin,
    command: Sequence[str],
    *,
    cwd: str,
    stdin: int,
    stdout: IO[bytes],
    stderr: IO[bytes],
    preexec_fn: Callable[[], None],
) -> Child | subprocess.Popen:
    """Forks torchrun's agent. Takes the arguments of `subprocess.Popen`, which starts any other command."""
    if command[:1] != [sys.executable] or torch.distributed.run.__name__ not in command:
        return subprocess.Popen(command, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, preexec_fn=preexec_fn)
    files = stdout.fileno(), stderr.fileno()
    empty = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else stdin
    try:
        return fork(
            lambda: _run_agent(origin), origin, command, dict(os.environ), (empty, *files), cwd=cwd, before=preexec_fn
        )
    finally:
        if empty != stdin:
            os.close(empty)


def caller(depth: int = 2) -> str:
    """The name of the function `depth` calls above this one, which torchrun notes with each event of its rendezvous.
    torch's version looks up the source of every function on the stack: 0.3 s of computing in every run.
    """
    return sys._getframe(depth).f_code.co_name


def _run_agent(origin: Origin) -> None:
    """Runs torchrun, whose ranks are forked. They can use CUDA only if this process has not initialised it. torchrun
    would, because it asks whether there are GPUs, for a default of its NUMA settings that is none in any case;
    therefore the answer is that there are none.
    """
    asks = torch.cuda.is_available

    def run_rank() -> None:
        torch.cuda.is_available = asks
        probe.start()

    def popen(
        handler: SubprocessHandler, args: Sequence[str], environment: Mapping[str, str]
    ) -> Child | subprocess.Popen:
        if tuple(args[1:4]) != _PROBE or not all(hasattr(handler, name) for name in _STREAMS):
            return _start_process(handler, args, environment)
        if has_gpu_open():
            print("labkit: this rank starts cold: torchrun's process has opened a GPU", file=sys.stderr)
            return _start_process(handler, args, environment)
        streams = (getattr(handler, name) for name in _STREAMS)
        files = (0, *(stream.fileno() if stream else number for number, stream in enumerate(streams, 1)))
        return fork(run_rank, origin, args, environment, files, new_session=True)

    torch.cuda.is_available = lambda: False
    setattr(SubprocessHandler, START_PROCESS.attribute, popen)
    if CALLER.exists():
        CALLER.replace(caller)
    torch.distributed.run.main()
