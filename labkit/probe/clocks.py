"""Two clocks of one interface: marks in time and copies of a loss, both of which may be known only later.

A mark is a moment in the device's own work. On the CPU it is known at once. On CUDA it is an event on the current stream that the
device has passed or not: asking costs microseconds and nothing ever waits for it during a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch


class CpuClock:
    """Marks are seconds of the monotonic clock, copies are floats."""

    device = torch.device("cpu")
    device_name = ""

    def mark(self) -> Any:
        """This moment; None where it cannot be marked."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Whether the device has come by `mark`."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks that are passed."""
        return end - start

    def release(self, marks: Iterable[Any]) -> None:
        """Gives marks back that nobody will ask about again."""

    def copy(self, scalar: torch.Tensor) -> Any:
        """The beginning of a copy of a one-element tensor to the host; None where none can be made."""
        return scalar.item()

    def copied(self, copy: Any) -> bool:
        """Whether a copy has arrived."""
        return True

    def value(self, copy: Any) -> float:
        """What was copied, once it has arrived; gives the copy back."""
        return float(copy)

    def not_finite(self, copy: Any) -> bool:
        """Whether a copy is NaN or infinite, as far as that is known without waiting for the device; the copy stays."""
        return not math.isfinite(copy)


class CudaClock:
    """Marks are `torch.cuda.Event`s, copies are pinned tensors, and both come from pools; `cuda` is torch.cuda, or its double in a test."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        self.device = device
        self._cuda = cuda
        self._events: list[Any] = []
        self._slots: list[torch.Tensor] = []

    @property
    def device_name(self) -> str:
        """The GPU's name."""
        return self._cuda.get_device_name(self.device)

    def mark(self) -> Any:
        """An event, recorded on the current stream; None while a CUDA graph is captured, which no outsider may touch."""
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._events.pop() if self._events else self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def passed(self, mark: Any) -> bool:
        """Whether the device has come by `mark`; asked without waiting."""
        return not self._cuda.is_current_stream_capturing() and mark.query()

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds of the device between two marks."""
        return start.elapsed_time(end) / 1e3

    def release(self, marks: Iterable[Any]) -> None:
        """Takes marks back into the pool."""
        self._events.extend(marks)

    def copy(self, scalar: torch.Tensor) -> Any:
        """An asynchronous copy into pinned memory, and the event behind it."""
        if self._cuda.is_current_stream_capturing():
            return None
        slot = self._slots.pop() if self._slots else torch.empty((), dtype=torch.float32, device="cpu", pin_memory=self._cuda is torch.cuda)
        slot.copy_(scalar.reshape(()), non_blocking=True)
        return slot, self.mark()

    def copied(self, copy: Any) -> bool:
        """Whether a copy has arrived."""
        return self.passed(copy[1])

    def value(self, copy: Any) -> float:
        """What was copied, once it has arrived."""
        slot, event = copy
        value = slot.item()
        self._slots.append(slot)
        self._events.append(event)
        return value

    def not_finite(self, copy: Any) -> bool:
        """The same; a copy that has not arrived is not known to be."""
        return self.copied(copy) and not math.isfinite(copy[0].item())


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    """The clock of the device that the model is on."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def likely_device() -> torch.device:
    """Where the script works before its model was seen: on CUDA if it has woken it. It is never woken from here."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
