"""Steps whose work was submitted to the device, until their times and losses are known."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.losses import Loss, LossWatch
from labkit.record.writer import PHASES

_TOGETHER = 1000  # maximum number of losses in one event
_OFTEN = 1.0  # seconds between two such events


@dataclass
class Step:
    """A submitted step; `marks` are the times at which the phases `names` began, and the end of the step."""

    number: int
    t: float
    clock: CpuClock | CudaClock
    marks: list[Any]
    names: list[str]
    losses: list[Loss]
    samples: int
    memory: dict[str, int | None] | None

    def known(self) -> bool:
        """Whether the device has finished it, and its losses have arrived."""
        return self.clock.passed(self.marks[-1]) and all(self.clock.copied(loss.copy) for loss in self.losses)

    def fields(self, watch: LossWatch) -> dict[str, Any]:
        """The fields of its event; returns its marks and losses to their pools."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, start, end in zip(self.names, self.marks, self.marks[1:]):
            seconds[name] += self.clock.seconds(start, end)
        losses = [self.clock.value(loss.copy) for loss in self.losses]
        self.clock.release(self.marks[:-1])  # its end is the start of the next step
        total = sum(seconds.values())
        return {
            "t": self.t,
            "step": self.number,
            "loss": watch.value(self.losses, losses),
            "samples": self.samples,
            "seconds": {"step": round(total, 7)} | {name: round(value, 7) for name, value in seconds.items()},
            "memory": self.memory,
        }


@dataclass
class OtherLoss:
    """The loss of a step of another optimizer than the pacing one, at the run's step `number`."""

    number: int
    clock: CpuClock | CudaClock
    optimizer: int
    losses: list[Loss]

    def known(self) -> bool:
        """Whether its losses have arrived."""
        return all(self.clock.copied(loss.copy) for loss in self.losses)

    def value(self, watch: LossWatch) -> float | None:
        """The loss; returns its copies to their pool."""
        return watch.value(self.losses, [self.clock.value(loss.copy) for loss in self.losses])


class Pending:
    """Writes events in the order in which they are added; `write` takes a kind and fields, as in `Journal`.

    Losses of other optimizers than the pacing one are batched, at most once per second, because they would double the
    size of a run.
    """

    def __init__(self, write: Callable[..., None], losses: LossWatch):
        self._write, self._losses = write, losses
        self._queue: deque[Step | OtherLoss] = deque()
        self._others: dict[int, list[tuple[int, float | None]]] = {}  # by optimizer: step and loss
        self._due = 0.0

    def add(self, event: Step | OtherLoss) -> None:
        """Queues an event, which a later `drain` writes."""
        self._queue.append(event)

    def drain(self, seconds: float) -> None:
        """Writes known events in order; waits up to `seconds` for the others."""
        end = time.monotonic() + seconds
        while self._queue:
            if self._queue[0].known():
                self._take(self._queue.popleft())
            elif time.monotonic() < end:
                time.sleep(0.001)
            else:
                return

    def _take(self, event: Step | OtherLoss) -> None:
        if isinstance(event, Step):
            self._write("step", **event.fields(self._losses))
            return
        points = self._others.setdefault(event.optimizer, [])
        points.append((event.number, event.value(self._losses)))
        if time.monotonic() >= self._due or len(points) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Writes the batched losses."""
        for optimizer, points in self._others.items():
            self._write("losses", optimizer=optimizer, points=points)
        self._others = {}
        self._due = time.monotonic() + _OFTEN
