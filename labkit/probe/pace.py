"""Selects the pacing optimizer among several: its steps are the steps of the run."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

_PATIENCE = 20  # steps of another optimizer without a step of the pacing one, after which the pacing one is replaced


class Pace:
    """The first optimizer that stepped; `maker` returns it, or None if it no longer exists.

    Instead of an optimizer it can be an object whose `is_alive` tells whether it may step again.
    """

    def __init__(self) -> None:
        self.maker: Any = lambda: None
        self._others: Counter[int] = Counter()

    def is_set_by(self, optimizer: Any) -> bool:
        """Registers a step of an optimizer and returns whether its steps are those of the run."""
        self._others[id(optimizer)] += 1
        if self.maker() is None or self._others[id(optimizer)] > _PATIENCE:
            own = isinstance(optimizer, torch.optim.Optimizer)
            self.maker = weakref.ref(optimizer) if own else lambda: optimizer if optimizer.is_alive else None
        if self.maker() is not optimizer:
            return False
        self._others.clear()
        return True


class InsideBackward:
    """Represents all optimizers that step within backward."""

    def __init__(self) -> None:
        self.stepped = False
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def is_alive(self) -> bool:
        """Whether one of them may step again."""
        return bool(self.optimizers)
