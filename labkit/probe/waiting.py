"""A thread that notices when the script makes no progress, and writes where it stands while that lasts.

Progress is a phase that begins or ends, or a model that is called. After `seconds` without any, a `waiting` event tells the stack of the
script's thread, the share of the time in which that thread computed, and the newest collectives of each group from torch's flight
recorder: which one the rank is in, and which it has not come to. `going_on` follows when there is progress again. Until the first step is
done nothing below `START_UP` is called a wait, since the ranks of a busy machine may start seconds apart. Where C code holds the GIL the
thread is silent, and only the launcher's samples go on.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from labkit.probe.journal import Guard, Journal
from labkit.probe.steps import StepWatch
from labkit.probe.traffic import newest

_HERE = str(Path(__file__).parent)
_FRAMES = 25
_AGAIN = 10.0  # seconds between two words of one wait
START_UP = 30.0  # seconds


class WaitWatch(threading.Thread):
    """Watches the thread that makes it. It looks four times in `seconds`, and twice a second at the most."""

    def __init__(self, journal: Journal, watch: StepWatch, seconds: float):
        super().__init__(name="labkit waiting", daemon=True)
        self._journal, self._watch, self._limit = journal, watch, seconds
        self._guard = Guard(journal, "waiting")
        self._main = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._main) if hasattr(time, "pthread_getcpuclockid") else None
        self._over = threading.Event()
        self._told: float | None = None
        self._progress, self._computed = watch.progress, self._cpu()

    def stop(self) -> None:
        """The script has ended: what comes now is no progress of its."""
        self._over.set()

    def run(self) -> None:
        """Looks until told to stop."""
        while not self._over.wait(min(0.5, self._limit / 4)):
            self._guard(self._look)

    def _look(self) -> None:
        progress, now = self._watch.progress, time.monotonic()
        if progress != self._progress:
            if self._told is not None:
                self._told = None
                self._journal.write("going_on", after=round(progress - self._progress, 3))
            self._progress, self._computed = progress, self._cpu()
        idle = now - progress
        limit = self._limit if self._watch.finished else max(self._limit, START_UP)
        if idle < limit or (self._told is not None and now - self._told < _AGAIN):
            return
        self._told = now
        computed = (self._cpu() - self._computed) / idle if self._clock is not None else None
        self._journal.write(
            "waiting",
            since=time.time() - idle,
            step=self._watch.finished,
            activity=self._watch.activity,
            phase=self._watch.phase,
            computed=None if computed is None else round(computed, 3),
            stack=self._stack(),
            ops=newest(),
        )

    def _cpu(self) -> float:
        return time.clock_gettime(self._clock) if self._clock is not None else 0.0

    def _stack(self) -> str:
        frame: Any = sys._current_frames().get(self._main)
        frames = [one for one in traceback.extract_stack(frame) if not one.filename.startswith((_HERE, "<frozen"))]
        return "".join(traceback.format_list(frames[-_FRAMES:])).rstrip()
