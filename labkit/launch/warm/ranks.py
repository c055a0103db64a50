"""The processes of a warm run, each forked from its parent: supervisor, torchrun's own agent, ranks; and the process
that traces for predictions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from labkit.launch import supervisor
from labkit.launch.warm.fork import Child, Origin, fork, has_gpu_open
from labkit.probe import __main__ as probe
from labkit.probe.torch_private import CALLER, START_PROCESS, STDERR, STDOUT

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
