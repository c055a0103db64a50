"""Records processes that the script starts; training in them is invisible, because the probe monitors only ranks.

A `saw` event `process` records each of the first few: `how` ("spawn", "fork", "forkserver" or "subprocess") and
`target`, the function or command that it runs. Workers of a DataLoader and of torch's compiler, and the servers of
`multiprocessing`, are not recorded.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.probe.torch_private import COMPILER

_MOST = 16  # maximum number of recorded processes
_HELPERS = ("torch.utils.data.", f"{COMPILER}.", "multiprocessing.managers", "multiprocessing.resource_")
_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")


def watch_processes(journal: Journal, patches: Patches) -> None:
    """Starts recording the processes that the script starts."""
    guard, left = Guard(journal, "processes"), _MOST

    def record(how: str, target: str) -> None:
        nonlocal left
        if left and not target.startswith(_HELPERS):
            left -= 1
            journal.write("saw", what="process", how=how, target=target)

    def starting(start: Callable[[Any], None]) -> Callable[[Any], None]:
        def start_process(process: Any) -> None:
            target = guard(_target, process)  # `start` deletes it
            start(process)
            guard(record, process._start_method or multiprocessing.get_start_method(), target)

        return start_process

    def opening(popen: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, args: Any, *rest: Any, **named: Any) -> None:
            popen(self, args, *rest, **named)
            guard(lambda: record("subprocess", command) if (command := _command(args)) else None)

        return init

    patches.wrap("processes", "multiprocessing.process.BaseProcess.start", starting)
    patches.wrap("processes", "subprocess.Popen.__init__", opening)


def _target(process: Any) -> str:
    """The function that a process runs, with its module; for `torch.multiprocessing.spawn` the script's function."""
    function, args = process._target, process._args
    if getattr(function, "__module__", "") == "torch.multiprocessing.spawn" and args:
        function = args[0]
    if function is None:
        function = type(process).run  # a subclass of Process
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _command(args: Any) -> str:
    """The first words of a command that starts Python or a training launcher; empty for any other command."""
    words = args.split() if isinstance(args, str) else [str(word) for word in args]
    if not words or not Path(words[0]).name.startswith(_LAUNCHERS):
        return ""
    if any(COMPILER.replace(".", "/") in word or "triton" in word for word in words):
        return ""
    return " ".join([Path(words[0]).name, *words[1:4]])
