"""Two clocks with one interface: time marks and copies of a loss, both of which may become available later; and
copies of whole tensors from a GPU.

A mark is a point in the device's work. On the CPU it is known immediately. On CUDA it is an event on the current
stream; a query whether the device has passed it takes microseconds, and nothing waits for it during a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class CpuClock:
    """Marks are seconds of the monotonic clock, copies are floats."""

    device = torch.device("cpu")
    device_name = ""

    def mark(self) -> Any:
        """The current time; None if it cannot be marked."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Whether the device has passed `mark`."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two passed marks."""
        return end - start

    def release(self, marks: Iterable[Any]) -> None:
        """Releases marks that are no longer needed."""

    def copy(self, scalar: torch.Tensor) -> Any:
        """Starts a copy of a one-element tensor to the host; None if that is not possible."""
        return scalar.item()

    def copied(self, copy: Any) -> bool:
        return True

    def value(self, copy: Any) -> float:
        """The copied value, once it has arrived; releases the copy."""
        return float(copy)

    def not_finite(self, copy: Any) -> bool:
        """Whether a copy is NaN or infinite, as far as known without waiting for the device; does not release the
        copy."""
        return not math.isfinite(copy)


class CudaClock:
    """Marks are `torch.cuda.Event`s, copies are pinned tensors, and both come from pools; `cuda` is torch.cuda or a
    test double.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        self.device = device
        self._cuda = cuda
        self._events: list[Any] = []
        self._slots: list[torch.Tensor] = []

    @property
    def device_name(self) -> str:
        return self._cuda.get_device_name(self.device)

    def mark(self) -> Any:
        """An event recorded on the current stream; None while a CUDA graph is captured, because the event would be part
        of it.
        """
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._events.pop() if self._events else self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def passed(self, mark: Any) -> bool:
        """Whether the device has passed `mark`, without waiting."""
        return not self._cuda.is_current_stream_capturing() and mark.query()

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3

    def release(self, marks: Iterable[Any]) -> None:
        self._events.extend(marks)

    def copy(self, scalar: torch.Tensor) -> Any:
        """An asynchronous copy into pinned memory, and the event behind it."""
        if self._cuda.is_current_stream_capturing():
            return None
        slot = (
            self._slots.pop()
            if self._slots
            else torch.empty((), dtype=torch.float32, device="cpu", pin_memory=self._cuda is torch.cuda)
        )
        slot.copy_(scalar.reshape(()), non_blocking=True)
        return slot, self.mark()

    def copied(self, copy: Any) -> bool:
        return self.passed(copy[1])

    def value(self, copy: Any) -> float:
        slot, event = copy
        value = slot.item()
        self._slots.append(slot)
        self._events.append(event)
        return value

    def not_finite(self, copy: Any) -> bool:
        """Whether a copy has arrived and is NaN or infinite."""
        return self.copied(copy) and not math.isfinite(copy[0].item())


def is_captured() -> bool:
    """Whether a CUDA graph is being captured, during which nothing may be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class LateCopies:
    """Copies of tensors that are on their way from a GPU to the host, so that nothing waits for it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, list[torch.Tensor], Callable[[list[torch.Tensor]], None]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tensors: Sequence[torch.Tensor], arrived: Callable[[list[torch.Tensor]], None]) -> None:
        """Starts to copy tensors, one of which is on a GPU; a later `read` passes the copies to `arrived`."""
        copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        ]
        over = torch.cuda.Event()
        over.record(torch.cuda.current_stream(next(tensor.device for tensor in tensors if tensor.is_cuda)))
        self._waiting.append((over, copies, arrived))

    def read(self, wait: bool = False) -> None:
        """Passes on the copies that have arrived, in order, or all if it may `wait`."""
        if is_captured():
            return
        while self._waiting and (wait or self._waiting[0][0].query()):
            over, copies, arrived = self._waiting.pop(0)
            if wait:
                over.synchronize()
            arrived(copies)


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    """The clock of the device that the model is on."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def likely_device() -> torch.device:
    """The likely device before a model is seen: CUDA if the script has initialised it. This function never initialises
    it.
    """
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def computes_on(parameter: torch.Tensor) -> torch.device:
    """The device that computes with a parameter: its own, or that of the mesh whose shards are offloaded to the CPU."""
    mesh = getattr(parameter, "device_mesh", None)
    return likely_device() if mesh is not None and mesh.device_type != parameter.device.type else parameter.device
