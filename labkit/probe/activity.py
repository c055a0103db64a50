"""The activity of a rank (training, evaluating, compiling an extension) and the phases of its current step.

Phases form a stack, and time counts for the innermost one. Each change is a mark of the device's clock; the marks of a
step, and the names of the phases that begin at them, are read when the step ends.
"""

from __future__ import annotations

import time
from typing import Any

from labkit.probe.clocks import CpuClock, CudaClock, clock_for, likely_device
from labkit.probe.journal import Journal

OTHER = "other"  # the phase of a step outside of all others


class Activity:
    """Writes `activity` and `device`; holds the marks of the current step."""

    def __init__(self, journal: Journal):
        self.progress = time.monotonic()  # the time of the last report
        self._journal = journal
        self._clock: CpuClock | CudaClock | None = None
        self._activity: str | None = None
        self._before_build: tuple[str | None] | None = None
        self._stack: list[str] = []
        self._marks: list[Any] = []
        self._names: list[str] = []

    @property
    def activity(self) -> str | None:
        """training or evaluating; None before either."""
        return self._activity

    @property
    def phase(self) -> str:
        """The current innermost phase."""
        return self._stack[-1] if self._stack else OTHER

    @property
    def between(self) -> bool:
        """Whether the script is in a step but in no phase of it."""
        return bool(self._names) and not self._stack

    @property
    def in_backward(self) -> bool:
        """Whether backward runs in the followed thread."""
        return "backward" in self._stack

    @property
    def builds(self) -> bool:
        """Whether torch is compiling a C++ extension, which can take minutes."""
        return self._before_build is not None

    def enter(self, phase: str) -> int:
        """A phase begins; returns the depth to pass to `leave`."""
        self._stack.append(phase)
        self._mark(phase)
        return len(self._stack) - 1

    def leave(self, depth: int | None) -> None:
        """Ends the phase that began at this depth, and all phases inside it; None does nothing."""
        if depth is None or depth >= len(self._stack):
            return
        del self._stack[depth:]
        self._mark(self.phase)

    def build_begins(self, extension: str) -> None:
        """torch starts compiling a C++ extension, or waiting for another process that compiles it."""
        self._before_build = self._before_build or (self._activity,)
        self._do(f"building the C++ extension {extension} (first use only)")

    def build_ends(self) -> None:
        """The extension is compiled; restores the previous activity."""
        if self._before_build is not None:
            (before,), self._before_build = self._before_build, None
            self._do(before)

    def _do(self, activity: str | None) -> None:
        if activity != self._activity:
            self._activity = activity
            self._journal.write("activity", name=activity)

    def _mark(self, phase: str) -> None:
        self.progress = time.monotonic()
        if not self._names and phase == OTHER:
            return  # no step has started
        if self._names and self._names[-1] == phase:
            return
        if self._clock is None:
            self.use(clock_for(likely_device()))
        mark = self._clock.mark()
        if mark is not None:
            self._marks.append(mark)
            self._names.append(phase)

    def use(self, clock: CpuClock | CudaClock) -> None:
        """Uses another clock from now on."""
        self._clock = clock
        self._marks, self._names = [], []  # marks of the previous clock cannot be compared
        self._journal.write("device", device=str(clock.device), device_name=clock.device_name)

    def _begin_at(self, mark: Any) -> None:
        """Discards the current marks; the next step begins at `mark`, or with the next phase if that is None."""
        if self._clock is not None:
            self._clock.release(self._marks[1:] if mark is None else ())
        self._marks, self._names = ([], []) if mark is None else ([mark], [self.phase])
