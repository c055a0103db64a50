"""Steps whose work was handed out to the device, until their times and losses are known."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.losses import Loss, LossWatch
from labkit.record.events import PHASES

_TOGETHER = 1000  # losses of an optimizer in one event
_OFTEN = 1.0  # seconds between two


@dataclass
class Step:
    """A step whose work was handed out; `marks` are the moments where its phases changed to `names`, and its end."""

    number: int
    t: float
    clock: CpuClock | CudaClock
    marks: list[Any]
    names: list[str]
    losses: list[Loss]
    samples: int
    memory: dict[str, int | None] | None

    def known(self) -> bool:
        """Whether the device has come by its end, and its losses have arrived."""
        return self.clock.passed(self.marks[-1]) and all(self.clock.copied(loss.copy) for loss in self.losses)

    def fields(self, watch: LossWatch) -> dict[str, Any]:
        """The fields of its event; its marks and losses go back to their pools."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, start, end in zip(self.names, self.marks, self.marks[1:]):
            seconds[name] += self.clock.seconds(start, end)
        losses = [self.clock.value(loss.copy) for loss in self.losses]
        self.clock.release(self.marks[:-1])  # its end is the beginning of the next
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
    """The loss of a step of an optimizer that does not set the pace; it belongs to the run's step `number`."""

    number: int
    clock: CpuClock | CudaClock
    optimizer: int
    losses: list[Loss]

    def known(self) -> bool:
        """Whether its losses have arrived."""
        return all(self.clock.copied(loss.copy) for loss in self.losses)

    def value(self, watch: LossWatch) -> float | None:
        """The loss; what it is made of goes back to its pool."""
        return watch.value(self.losses, [self.clock.value(loss.copy) for loss in self.losses])


class Pending:
    """Writes events in the order in which they are added; `write` takes a kind and fields, as a journal does.

    Losses of optimizers that do not set the pace are written together, once a second at the most, since they would double a long run.
    """

    def __init__(self, write: Callable[..., None], losses: LossWatch):
        self._write, self._losses = write, losses
        self._queue: deque[Step | OtherLoss] = deque()
        self._others: dict[int, list[tuple[int, float | None]]] = {}  # by optimizer: step and loss
        self._due = 0.0

    def add(self, event: Step | OtherLoss) -> None:
        """An event, which is written by a later `drain`."""
        self._queue.append(event)

    def drain(self, seconds: float) -> None:
        """Writes those that are known, in order; waits at most so many seconds for the rest."""
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
        """Writes the losses that were held back."""
        for optimizer, points in self._others.items():
            self._write("losses", optimizer=optimizer, points=points)
        self._others = {}
        self._due = time.monotonic() + _OFTEN
