"""The end of a step: its marks, losses, samples and memory are written when the device has finished it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.probe.activity import Activity
from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.journal import Guard, Journal
from labkit.probe.losses import Loss, LossWatch
from labkit.probe.memory import MemoryWatch
from labkit.probe.optimizers import Optimizers
from labkit.probe.pace import Pace
from labkit.probe.pending import OtherLoss, Pending, Step
from labkit.probe.sampler import StepSampler
from labkit.probe.samples import SampleCount
from labkit.record import clock


class FinishedSteps(Activity):
    """Writes `step`, `losses` and `optimizer`, and calls `after_step` after each step."""

    def __init__(self, journal: Journal):
        super().__init__(journal)
        self.finished = 0
        self.memory = MemoryWatch(journal)
        self.sampler: StepSampler | None = None
        self.after_step: list[Callable[[], None]] = []
        self.optimizers = Optimizers()
        self._sample, self._look = Guard(journal, "timelines"), Guard(journal, "memory")
        self._pace = Pace()
        self._losses = LossWatch(self.optimizers, journal.write)
        self._pending = Pending(journal.write, self._losses)
        self._samples = SampleCount()

    @property
    def memory_is_profiled(self) -> bool:
        """Whether every allocation of the current step is recorded."""
        return self.sampler is not None and self.sampler.profiles_memory

    def use(self, clock: CpuClock | CudaClock) -> None:
        """Uses another clock from now on."""
        super().use(clock)
        self._losses.forget()

    def _restart(self, mark: Any = None) -> None:
        """Discards the current marks; the next step begins at `mark`, or else with the next phase."""
        self._begin_at(mark)
        self._samples.restart()

    def _stepped(self, optimizer: Any) -> None:
        """An optimizer, or an object that represents one, has stepped."""
        paces = self._pace.is_set_by(optimizer)
        losses = self._losses.of(optimizer, paces)
        if paces:
            self._finish(losses)
        elif losses:
            number = self._losses.number(optimizer, False)
            self._losses.number(self._pace.maker(), True)
            self._pending.add(OtherLoss(max(1, self.finished), self._clock, number, losses))
            self.drain()

    def _finish(self, losses: list[Loss]) -> None:
        mark = self._clock.mark() if self._names else None
        if mark is None:
            return
        self.finished += 1
        samples = self._samples.take()
        memory = self._look(self.memory.at_step, self.finished)
        marks = [*self._marks, mark]
        self._pending.add(Step(self.finished, clock.now(), self._clock, marks, self._names, losses, samples, memory))
        sampled = self.sampler and self._sample(
            self.sampler.step_ends, self.finished, list(zip(self._names, marks, marks[1:])), self._clock
        )
        if sampled or self.memory.walked:
            mark = self._clock.mark()  # the time of profiling and the walk is not part of the next step
        self._restart(mark)
        for call in self.after_step:
            call()
        self.drain()

    def drain(self, seconds: float = 0.0) -> None:
        """Writes known steps in order; waits up to `seconds` for the others."""
        self._pending.drain(seconds)
