"""The thread whose steps are counted, and processes that the script starts."""

from __future__ import annotations

import multiprocessing
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.probe.torch_private import COMPILER
from labkit.record.stacks import frame_of

# ---- records processes that the script starts; training in them is invisible, because the probe monitors only ranks


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


# ---- selects the thread whose steps are counted


class ScriptThread:
    """The followed thread. Create it in the main thread."""

    def __init__(self) -> None:
        self._follow()
        self.trains = False
        self.others: set[str] = set()
        self.on_other: Callable[[str], None] = lambda name: None

    def here(self) -> bool:
        """Whether the calling thread is the followed one. Thread idents are not compared, because they can be
        reused."""
        return hasattr(self._mark, "follows")

    @property
    def may_move(self) -> bool:
        """Whether another training thread would be followed."""
        return not self.trains or not self._thread.is_alive()

    def takes_over(self) -> bool:
        """Call this when a thread other than the followed one trains; returns whether it is followed from now on."""
        thread = threading.current_thread()
        if not self.may_move:
            if thread.name not in self.others:
                self.others.add(thread.name)
                self.on_other(thread.name)
            return False
        self._follow()
        self.trains = True
        return True

    def _follow(self) -> None:
        self._thread, self._mark = threading.current_thread(), threading.local()
        self._mark.follows = True
        known = hasattr(time, "pthread_getcpuclockid")
        ident = threading.get_ident()  # of the calling thread, because an ended thread has no clock
        self._clock = time.pthread_getcpuclockid(ident) if known else None

    def cpu_seconds(self) -> float | None:
        """CPU seconds of the thread; None if unknown."""
        if self._clock is None or not self._thread.is_alive():
            return None
        return time.clock_gettime(self._clock)

    def frame(self) -> types.FrameType | None:
        """The current frame of the thread; if it has ended, that of the main thread."""
        thread = self._thread if self._thread.is_alive() else threading.main_thread()
        return frame_of(thread)


def is_foreign() -> bool:
    """Whether the calling thread was not started by Python, as those of autograd are not."""
    return isinstance(threading.current_thread(), threading._DummyThread)
