"""Ends a rank that makes no progress, and says in which call of the answer it waits."""

from __future__ import annotations

import linecache
import os
import threading
import time
from collections.abc import Callable
from types import FrameType

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import END, START, Event
from labkit.record.stacks import frame_of

_GRACE = 1.0  # seconds in which the other ranks can say where they wait, before the first one ends
STUCK = 3  # exit code of a rank that made no progress


class Watchdog(threading.Thread):
    """Calls `report` and exits the process after `patience` seconds without a call of torch, until `stop`."""

    def __init__(self, recorder: Recorder, patience: float, source: str, report: Callable[[], None]):
        super().__init__(name="labkit watchdog", daemon=True)
        self._recorder, self._patience, self._source, self._report = recorder, patience, source, report
        self._over = threading.Event()

    def stop(self) -> None:
        """The answer has ended."""
        self._over.set()

    def run(self) -> None:
        """Checks until `stop` is called."""
        seen, since = self._recorder.calls, time.monotonic()
        while not self._over.wait(self._patience / 10):
            if self._recorder.calls != seen:
                seen, since = self._recorder.calls, time.monotonic()
            elif time.monotonic() - since > self._patience:
                self._recorder.record.stuck = self._position()
                self._report()
                self._over.wait(_GRACE)
                os._exit(STUCK)

    def _position(self) -> str:
        """`waits in recv from rank 1 in step 0, at: dist.recv(x, 1)`."""
        if self._recorder.phase == END:
            return "has returned"
        waits_for, events = self._recorder.waits_for, self._recorder.record.events
        call = "is" if waits_for is None else f"waits in {call_in_words(events[waits_for])}"
        return f"{call}{where(self._recorder)}{line_of(frame_of(threading.main_thread()), self._source)}"


def call_in_words(event: Event) -> str:
    """`recv from rank 1`, `send to rank 0`, `all_reduce`."""
    direction = {"send": " to", "recv": " from"}.get(event.op)
    return event.op if direction is None or event.peer is None else f"{event.op}{direction} rank {event.peer}"


def where(recorder: Recorder) -> str:
    """` in backward of step 2`, or ` before the first step`."""
    return " before the first step" if recorder.phase == START else f" in {recorder.phase} of step {recorder.step}"


def line_of(frame: FrameType | None, source: str) -> str:
    """`, at: dist.recv(x, 1)`: the innermost line of the file `source`; empty if there is none."""
    while frame is not None and frame.f_code.co_filename != source:
        frame = frame.f_back
    return "" if frame is None else f", at: {linecache.getline(source, frame.f_lineno).strip()}"
