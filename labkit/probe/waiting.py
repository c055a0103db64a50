"""A thread that detects when the script makes no progress, and reports its position while that lasts.

Progress is the start or end of a phase, or a call of a model. After `seconds` without progress, a `waiting` event
reports the stack of the script's thread, the fraction of the time in which that thread used the CPU, and the newest
collectives of each group from torch's flight recorder: the one the rank is in, and thereby those it never reached.
`going_on` follows when there is progress again. Only while a C++ extension is compiled is the limit larger, at least
`BUILD`. This thread cannot run while C code holds the GIL; `position.py` covers that case.

Shortly before it reports, a rank touches a file in the run folder, and every rank that sees this writes `called`: all
its stored collectives in order. So it is known from the first report on where the sequences of the ranks part.
"""

from __future__ import annotations

import threading
import time
import traceback
from contextlib import suppress

from labkit.probe.journal import Guard, Journal
from labkit.probe.position import Position
from labkit.probe.steps import StepWatch
from labkit.record import clock
from labkit.record.stacks import of_script

_FRAMES = 25
_AGAIN = 10.0  # seconds between two reports of one wait
BUILD = 900.0  # seconds


class WaitWatch(threading.Thread):
    """Monitors the thread whose steps are counted, four times within `seconds` but at least twice per second."""

    def __init__(self, journal: Journal, watch: StepWatch, seconds: float, position: Position | None = None):
        super().__init__(name="labkit waiting", daemon=True)
        self._journal, self._watch, self._limit = journal, watch, seconds
        self._guard, self._position_guard = Guard(journal, "waiting"), Guard(journal, "position")
        self._position = position
        self._poll = min(0.5, seconds / 4)
        self._asked = journal.run / "stacks" / "asked"
        self._answered = self._when_asked()
        self._over = threading.Event()
        self._reported: float | None = None
        self._has_asked = False
        self._progress, self._computed = watch.progress, watch.thread.cpu_seconds()
        if position:
            # now, because the script may enter an endless C call before this thread runs
            self._position_guard(self._note)

    def stop(self) -> None:
        """The script has ended: stops monitoring."""
        self._over.set()
        if self._position:
            self._position_guard(self._position.end)

    def run(self) -> None:
        """Checks until `stop` is called."""
        while not self._over.wait(self._poll):
            if self._position:
                self._position_guard(self._note)
            self._guard(self._look)

    def _note(self) -> None:
        """Records the script's position, except while it makes progress in a step whose memory is profiled.

        If this thread references the frame of a function that returns, this thread frees the function's tensors. The
        profiler does not see that, and short-lived outputs would count as activations.
        """
        patience = self._patience()
        moves = time.monotonic() - self._watch.progress < patience
        skipped = moves and self._watch.memory_is_profiled
        self._position.note(None if skipped else self._watch.thread.frame(), patience)

    def _patience(self) -> float:
        """Seconds without progress that do not count as waiting yet."""
        return max(self._limit, BUILD) if self._watch.builds else self._limit

    def _look(self) -> None:
        progress, now = self._watch.progress, time.monotonic()
        if progress != self._progress:
            if self._reported is not None:
                self._reported = None
                self._journal.write("going_on", waited=round(progress - self._progress, 3))
            self._has_asked = False
            self._progress, self._computed = progress, self._watch.thread.cpu_seconds()
        idle = now - progress
        due = self._patience() if self._reported is None else self._reported + _AGAIN - progress
        if idle >= due - 2 * self._poll and not self._has_asked:
            with suppress(OSError):
                self._asked.touch(mode=0o600)
            self._has_asked = True
        if (asked := self._when_asked()) != self._answered:
            self._answered = asked
            self._write("called", idle, groups=self._watch.recorder.sequences())
        if idle < due:
            return
        self._reported, self._has_asked = now, False
        self._write("waiting", idle)

    def _write(self, kind: str, idle: float, **more: object) -> None:
        spent = self._watch.thread.cpu_seconds()
        computed = (
            None if spent is None or self._computed is None else max(0.0, spent - self._computed) / max(idle, 0.1)
        )
        self._journal.write(
            kind,
            since=clock.now() - idle,
            step=self._watch.finished,
            activity=self._watch.activity,
            phase=self._watch.phase,
            computed=None if computed is None else round(computed, 3),
            stack=self._stack(),
            ops=self._watch.recorder.newest(),
            **more,
        )

    def _when_asked(self) -> int:
        """When a rank asked last, in ns; 0 if none has."""
        try:
            return self._asked.stat().st_mtime_ns
        except OSError:
            return 0

    def _stack(self) -> str:
        return "".join(traceback.format_list(of_script(self._watch.thread.frame())[-_FRAMES:])).rstrip()
