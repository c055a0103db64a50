"""Which of several optimizers sets the pace: its steps are the steps of the run."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

_PATIENCE = 20  # so many steps of another optimizer, and the pacemaker has none: it is replaced


class Pace:
    """The first optimizer that stepped; `maker` gives it, or None when it is gone.

    In the place of an optimizer may stand an object whose `is_alive` says whether it may step again.
    """

    def __init__(self) -> None:
        self.maker: Any = lambda: None
        self._others: Counter[int] = Counter()

    def is_set_by(self, optimizer: Any) -> bool:
        """Told that an optimizer has stepped: whether its steps are those of the run."""
        self._others[id(optimizer)] += 1
        if self.maker() is None or self._others[id(optimizer)] > _PATIENCE:
            own = isinstance(optimizer, torch.optim.Optimizer)
            self.maker = weakref.ref(optimizer) if own else lambda: optimizer if optimizer.is_alive else None
        if self.maker() is not optimizer:
            return False
        self._others.clear()
        return True


class InsideBackward:
    """Stands for all optimizers that step within backward."""

    def __init__(self) -> None:
        self.stepped = False
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def is_alive(self) -> bool:
        """Whether one of them may step again."""
        return bool(self.optimizers)
