"""Records the script's position for a process that can no longer report it: crashed, killed, stopped, or blocked with
the GIL held.

Each rank has two files in the run folder. `position` contains the script's current line as one short JSON object; the
waiting thread rewrites it twice per second, so it also shows that Python code still runs. `crash` is written by
faulthandler, which needs neither the GIL nor a working interpreter: the stacks at a fatal signal, or the stacks if the
waiting thread has not run for so long that a C call must be holding the GIL. If the script uses faulthandler itself,
its file, timer and signals are not changed.
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
_FRAMES = 3  # innermost frames outside of libraries that are shown
_SIZE = 1024  # bytes of a position file
_REARM = 1.0  # seconds between two resets of the timer, each of which starts a thread (0.1 to 0.3 ms)


class Position:
    """The position and crash files of one rank. `note` is called by the waiting thread; `end` when the script has
    ended."""

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
        self._yield_to_script()

    def note(self, frame: Any, limit: float) -> None:
        """Records that the script is at `frame`; faulthandler dumps the stacks if this is not called again within
        `limit` seconds.

        Without a frame the script is alive at its last known position.
        """
        lines: list[str] = []
        while frame is not None and len(lines) < _FRAMES and frame.f_code.co_filename != RUNNER:
            code = frame.f_code
            if not code.co_filename.startswith((_HERE, "<frozen")) and not any(
                part in code.co_filename for part in LIBRARIES
            ):
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
            frame = frame.f_back
        with self._lock:
            if not self._ended:
                self._stack = "\n".join(reversed(lines)) or self._stack
                self._write(t=clock.now(), stack=self._stack)
                self._set_timer(limit)

    def end(self) -> None:
        """The script has ended: cancels the timer and marks the position as over."""
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
        if self._crash.tell():  # the timer expired, but Python code runs again
            self._crash.seek(0)
            self._crash.truncate()
        self._armed = now
        self._dump_later(limit, exit=False, file=self._crash)

    def _yield_to_script(self) -> None:
        """A process has one handler and one timer: once the script calls a function of either, the probe no longer uses
        it.
        """

        def released(original: Callable[..., Any], owner: str) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                setattr(self, owner, False)
                return original(*args, **kwargs)

            return call

        for name in ("enable", "disable"):
            setattr(faulthandler, name, released(getattr(faulthandler, name), "_handler_is_ours"))
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            setattr(faulthandler, name, released(getattr(faulthandler, name), "_timer_is_ours"))

    def _disable_in_child(self) -> None:
        """A crash of a forked process must not be attributed to this rank."""
        if self._handler_is_ours:
            faulthandler.disable()
