"""Where the script is, for the case that this process cannot say so itself any more: it crashed, was killed, was stopped, or holds the GIL.

Two files in the run folder, one pair for each rank, serve this. `position` holds the script's current line as one short JSON object; the
waiting thread rewrites it twice a second, so it also shows that Python code still runs. `crash` holds what faulthandler writes, which
needs neither the GIL nor a living interpreter: the stacks at a fatal signal, and the stacks if the waiting thread did not run for so long
that a C call must hold the GIL. A script that uses faulthandler itself keeps it: its file, its timer and its signals are not touched.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.record import clock
from labkit.record.stacks import LIBRARIES, RUNNER

_HERE = str(Path(__file__).parent)
_FRAMES = 3  # innermost ones that are no library's: more are not shown
_SIZE = 1024  # bytes of a position
_REARM = 1.0  # seconds between two settings of the timer, each of which starts a thread (0.1 to 0.3 ms)


class Position:
    """The position and crash files of one rank. `note` is called by the waiting thread; `end` when the script has ended."""

    def __init__(self, run: str | os.PathLike[str], rank: int):
        folder = Path(run) / "stacks"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._position = io.FileIO(folder / f"rank{rank}.position.json", "w")
        self._crash = io.FileIO(folder / f"rank{rank}.crash.txt", "w")
        self._handler_is_ours, self._timer_is_ours = not faulthandler.is_enabled(), True
        self._armed, self._stack = -_REARM, ""
        self._ended, self._lock = False, threading.Lock()
        self._dump_later, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
        if self._handler_is_ours:
            faulthandler.enable(self._crash)
            os.register_at_fork(after_in_child=self._disable_in_child)
        self._give_way()

    def note(self, frame: Any, limit: float) -> None:
        """Writes that the script is at `frame` now; the stacks are written if this is not called again for `limit` seconds.

        Without a frame the script is alive, and taken to be where it was last.
        """
        lines: list[str] = []
        while frame is not None and len(lines) < _FRAMES and frame.f_code.co_filename != RUNNER:
            code = frame.f_code
            if not code.co_filename.startswith((_HERE, "<frozen")) and not any(part in code.co_filename for part in LIBRARIES):
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
            frame = frame.f_back
        with self._lock:
            if not self._ended:
                self._stack = "\n".join(reversed(lines)) or self._stack
                self._write(t=clock.now(), stack=self._stack)
                self._set_timer(limit)

    def end(self) -> None:
        """The script has ended: from here on silence means nothing, and no timer runs."""
        with self._lock:
            self._ended = True
            if self._timer_is_ours:
                self._cancel()
            self._write(t=clock.now(), over=True)

    def _write(self, **fields: Any) -> None:
        text = json.dumps(fields, separators=(",", ":"))
        if len(text) >= _SIZE:
            text = json.dumps(fields | {"stack": ""}, separators=(",", ":"))
        self._position.seek(0)
        self._position.write(text.encode().ljust(_SIZE - 1) + b"\n")

    def _set_timer(self, limit: float) -> None:
        now = time.monotonic()
        if not self._timer_is_ours or now - self._armed < min(_REARM, limit / 4):
            return
        if self._crash.tell():  # the timer ran out, and Python code runs again
            self._crash.seek(0)
            self._crash.truncate()
        self._armed = now
        self._dump_later(limit, exit=False, file=self._crash)

    def _give_way(self) -> None:
        """There is one handler and one timer in a process: once the script calls a function of either, it is the script's."""

        def told(original: Callable[..., Any], owner: str) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                setattr(self, owner, False)
                return original(*args, **kwargs)

            return call

        for name in ("enable", "disable"):
            setattr(faulthandler, name, told(getattr(faulthandler, name), "_handler_is_ours"))
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            setattr(faulthandler, name, told(getattr(faulthandler, name), "_timer_is_ours"))

    def _disable_in_child(self) -> None:
        """A crash of a forked process is not this rank's, and its stacks must not be taken for this rank's."""
        if self._handler_is_ours:
            faulthandler.disable()
