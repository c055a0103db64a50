"""Journal: writes one rank's events without ever breaking the script."""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from labkit.probe.torch_private import ACTION, SET_EVAL_FRAME, SET_STRATEGY, SKIP_CODE, STRATEGY, MissingName
from labkit.record import clock
from labkit.record.stacks import MESSAGE_LIMIT, clipped
from labkit.record.writer import FULL, Reserve, Writer

# ---- keeps torch.compile from tracing or compiling any part of the probe
#
# Compiled code reaches the probe in two ways. While Dynamo *traces* a function, it also traces the hooks that the
# function calls. Each hook begins with `if compiling(): return`, which Dynamo evaluates while tracing, so that the hook
# leaves nothing in the graph. Between two graphs, hooks are really called, and Dynamo would compile every Python frame
# below them: `skip_frames` excludes the frames of the probe from compilation, and `untraced` disables Dynamo for
# everything that they call.


T = TypeVar("T")

compiling = torch.compiler.is_compiling
_set_eval_frame = SET_EVAL_FRAME.get() if SET_EVAL_FRAME.exists() else lambda callback: None


def untraced(function: Callable[..., T], *args: Any) -> T:
    """Calls a function with Dynamo disabled."""
    callback = _set_eval_frame(None)
    try:
        return function(*args)
    finally:
        _set_eval_frame(callback)


def skip_frames() -> None:
    """Excludes all loaded functions of labkit from compilation. Raises `MissingName` if only a part of that is
    possible.
    """
    skip = _skipper()
    for name, module in list(sys.modules.items()):
        if name == "labkit" or name.startswith("labkit."):
            for code in _codes(vars(module).values(), name, set()):
                skip(code)
    SET_EVAL_FRAME.get()


def _skipper() -> Callable[[types.CodeType], Any]:
    """A function that makes Dynamo skip a function's own frame, but not those of its callees."""
    if SKIP_CODE.exists():
        return SKIP_CODE.get()
    set_strategy, action = SET_STRATEGY.get(), ACTION.get()
    strategy = STRATEGY.get()(action.SKIP, action.DEFAULT)
    return lambda code: set_strategy(code, strategy)


def _codes(things: Any, module: str, seen: set[int]) -> Iterator[types.CodeType]:
    for thing in things:
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.CodeType):
            yield thing
            yield from _codes(thing.co_consts, module, seen)
        elif isinstance(thing, types.FunctionType) and thing.__module__ == module:
            yield from _codes([thing.__code__], module, seen)
        elif isinstance(thing, type) and thing.__module__ == module:
            yield from _codes(vars(thing).values(), module, seen)
        elif isinstance(thing, (staticmethod, classmethod)):
            yield from _codes([thing.__func__], module, seen)
        elif isinstance(thing, property):
            yield from _codes([thing.fget], module, seen)


_BUDGET = 4 << 20  # bytes after which periodic events become half as frequent
_MOST_DOUBLINGS = 30
_LAST = ("error", "end")  # kinds that are written even on a full disk, into reserved space
_RESERVED = 1 << 15  # bytes


# ---- the journal of a rank


class Journal:
    """Appends a rank's events to `<run>/events/rank<r>.jsonl`. It never raises, and writes nothing in a forked child.

    While the disk is full, events are dropped and counted; the next event that fits is `dropped`, with the count.
    """

    def __init__(self, run: str | os.PathLike[str], rank: int):
        self.run = Path(run)
        folder = self.run / "events"
        folder.mkdir(parents=True, exist_ok=True)
        self.started = clock.now()
        self._dropped = 0
        self._lost: set[tuple[str, str]] = set()
        self._writer: Writer | None = Writer(folder / f"rank{rank}.jsonl", rank)
        self._reserve = Reserve(folder / f".rank{rank}.reserve")
        with suppress(OSError):  # the disk is already full: no reserve
            self._reserve.make(_RESERVED)
        os.register_at_fork(after_in_child=self._silence)

    def _silence(self) -> None:
        self._writer = None

    @property
    def silent(self) -> bool:
        """Whether writing is disabled: in a child of the rank, or after a write failed for another reason than a full
        disk.
        """
        return self._writer is None

    def spaced(self, every: int) -> int:
        """The current interval, in steps, of an event that is written every `every` steps in a short run.

        The interval doubles with each 4 MiB that the rank has written, so the file grows with the logarithm of the
        run's length. It is a multiple of `every`, so that ranks with files of different sizes still record common
        steps.
        """
        return every << min(self._writer.size // _BUDGET if self._writer else 0, _MOST_DOUBLINGS)

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event. If that fails, the script continues."""
        if self._writer is None:
            return
        if kind in _LAST:
            self._reserve.release()
        try:
            if self._dropped:
                self._writer.write("dropped", events=self._dropped)
                self._dropped = 0
            self._writer.write(kind, **fields)
        except OSError as error:
            self._dropped += 1
            if error.errno not in FULL:
                self._writer = None

    def lost(self, part: str, error: Exception) -> None:
        """A part of the probe is disabled by an error; records it once."""
        part = error.part if isinstance(error, MissingName) else part
        if (part, str(error)) not in self._lost:
            self._lost.add((part, str(error)))
            self.write(
                "probe_error",
                part=part,
                type=type(error).__name__,
                message=clipped(str(error), MESSAGE_LIMIT),
                traceback=clipped("".join(traceback.format_exception(error))),
            )


class Guard:
    """Calls one part of the probe; after its first exception, recorded as a `probe_error`, that part is disabled."""

    def __init__(self, journal: Journal, part: str):
        self.off = False
        self._journal = journal
        self._part = part

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.off or self._journal.silent:
            return None
        try:
            return untraced(function, *args)
        except Exception as error:
            self.off = True
            self._journal.lost(self._part, error)
            return None
