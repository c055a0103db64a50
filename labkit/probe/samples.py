"""Counts the samples of a step: those whose forward happened in it.

Batches may be fetched long before they are used, so a batch counts in the step in which a model is called, with
gradients, on an input whose first dimension (or second, for inputs with the sequence dimension first) is the size of a
fetched, unused batch. Several calls of one step may share a batch, as micro-batches do; then their first dimensions add
up to it. If the inputs match no batch (graphs, nested inputs, a model that is called twice per batch), the batches
fetched in the step count. Without a DataLoader, the inputs of the step's first model count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from labkit.probe.memory import tensors_in

_AHEAD = 4096  # maximum number of prefetched batches

Shape = tuple[int, ...]


class SampleCount:
    """The samples of the current step."""

    def __init__(self) -> None:
        self._unused: deque[int] = deque(maxlen=_AHEAD)  # sizes of fetched, unused batches, oldest first
        self.restart()

    def restart(self) -> None:
        """A new step begins. Prefetched batches stay."""
        self._fetched = self._called = self._used = 0
        self._model: int | None = None

    def forget(self) -> None:
        """Discards all fetched batches and calls."""
        self._unused.clear()
        self.restart()

    @property
    def has_batch(self) -> bool:
        """Whether a batch was fetched in this step."""
        return bool(self._fetched)

    def fetched(self, batch: Any) -> None:
        """A DataLoader returned a batch."""
        size = next((shape[0] for shape in shapes_in(batch)), 0)
        if size:
            self._fetched += size
            self._unused.append(size)

    def called(self, model: int, shapes: Sequence[Shape]) -> bool:
        """A model was called with gradients on tensors of these shapes. Returns whether this model counts in the step.

        Only one model per step counts: the first that is called on a batch, or the first of all if none is.
        """
        size = self._unused_batch(shapes) if not self._used or model == self._model else 0
        if size:
            if model != self._model:  # earlier models did not use a batch
                self._called = 0
            self._model = model
            while self._unused.popleft() != size:
                pass  # a batch that was skipped
            self._used += size
        self._model = self._model or model
        if model == self._model and shapes:
            self._called += size or shapes[0][0]
        return model == self._model

    def raised(self, shapes: Sequence[Shape]) -> None:
        """A model was called on tensors of these shapes and raised, so its batch does not count."""
        size = self._unused_batch(shapes)
        if size:
            while self._unused.popleft() != size:
                pass
            self._fetched -= size

    def _unused_batch(self, shapes: Sequence[Shape]) -> int:
        for dimension in (0, 1):
            for shape in shapes:
                if len(shape) > dimension and shape[dimension] in self._unused:
                    return shape[dimension]
        return 0

    def take(self) -> int:
        """Ends the step and returns its samples."""
        if self._used:
            return self._used
        if self._shared():
            return self._called
        self._unused.clear()
        return self._fetched or self._called

    def _shared(self) -> bool:
        """Whether the first dimensions of all calls add up to the oldest batches, which then count as used."""
        left, number = self._called, 0
        for size in self._unused:
            if left <= 0:
                break
            left, number = left - size, number + 1
        if left or not number:
            return False
        for _ in range(number):
            self._unused.popleft()
        return True


def shapes_in(values: Any) -> list[Shape]:
    """The shapes of all tensors with at least one dimension, in order."""
    return [tuple(tensor.shape) for tensor in tensors_in(values) if tensor.dim()]
