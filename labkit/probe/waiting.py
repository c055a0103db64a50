"""A thread that notices when the script makes no progress, and writes where it stands while that lasts.

Progress is a phase that begins or ends, or a model that is called. After `seconds` without any, a `waiting` event tells the stack of the
script's thread, the share of the time in which that thread computed, and the newest collectives of each group from torch's flight
recorder: which one the rank is in, and which it has not come to. `going_on` follows when there is progress again. Until the first step is
done nothing below `START_UP` is called a wait, since the ranks of a busy machine may start seconds apart; while a C++
extension is compiled, nothing below `BUILD`. This thread stands still while C code holds the GIL: `position.py` has what works then.
"""

from __future__ import annotations

import threading
import time
import traceback

from labkit.probe.journal import Guard, Journal
from labkit.probe.position import Position
from labkit.probe.steps import StepWatch
from labkit.probe.traffic import newest
from labkit.record import clock
from labkit.record.stacks import of_script

_FRAMES = 25
_AGAIN = 10.0  # seconds between two words of one wait
START_UP = 30.0  # seconds
BUILD = 900.0


class WaitWatch(threading.Thread):
    """Watches the thread whose steps are counted. It looks four times in `seconds`, and twice a second at the most."""

    def __init__(self, journal: Journal, watch: StepWatch, seconds: float, position: Position | None = None):
        super().__init__(name="labkit waiting", daemon=True)
        self._journal, self._watch, self._limit = journal, watch, seconds
        self._guard, self._position_guard = Guard(journal, "waiting"), Guard(journal, "position")
        self._position = position
        self._over = threading.Event()
        self._told: float | None = None
        self._progress, self._computed = watch.progress, watch.thread.cpu_seconds()
        if position:
            self._position_guard(self._note)  # now: a script may enter a C call that never ends before this thread runs

    def stop(self) -> None:
        """The script has ended: what comes now is no progress of it."""
        self._over.set()
        if self._position:
            self._position_guard(self._position.end)

    def run(self) -> None:
        """Looks until told to stop."""
        while not self._over.wait(min(0.5, self._limit / 4)):
            if self._position:
                self._position_guard(self._note)
            self._guard(self._look)

    def _note(self) -> None:
        """Notes where the script is; not while the memory of its step is profiled and it makes progress.

        A function that returns while this thread holds its frame leaves its tensors to that frame. This thread then frees
        them, which the profiler does not see, so outputs that live for a moment would count as activations.
        """
        patience = self._patience()
        moves = time.monotonic() - self._watch.progress < patience
        left_alone = moves and self._watch.memory_is_profiled
        self._position.note(None if left_alone else self._watch.thread.frame(), patience)

    def _patience(self) -> float:
        """Seconds without progress that are no wait yet."""
        if self._watch.builds:
            return max(self._limit, BUILD)
        return self._limit if self._watch.finished else max(self._limit, START_UP)

    def _look(self) -> None:
        progress, now = self._watch.progress, time.monotonic()
        if progress != self._progress:
            if self._told is not None:
                self._told = None
                self._journal.write("going_on", waited=round(progress - self._progress, 3))
            self._progress, self._computed = progress, self._watch.thread.cpu_seconds()
        idle = now - progress
        if idle < self._patience() or (self._told is not None and now - self._told < _AGAIN):
            return
        self._told = now
        spent = self._watch.thread.cpu_seconds()
        computed = None if spent is None or self._computed is None else max(0.0, spent - self._computed) / idle
        self._journal.write(
            "waiting",
            since=clock.now() - idle,
            step=self._watch.finished,
            activity=self._watch.activity,
            phase=self._watch.phase,
            computed=None if computed is None else round(computed, 3),
            stack=self._stack(),
            ops=newest(),
        )

    def _stack(self) -> str:
        return "".join(traceback.format_list(of_script(self._watch.thread.frame())[-_FRAMES:])).rstrip()
