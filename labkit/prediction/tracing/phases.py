"""The phases of a traced step, as the probe has them in a run: data, forward, backward, optimizer, other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

OTHER = "other"


class Phases:
    """Marks the phases with the times that `mark` returns, from the calls of modules, `backward` and optimizers;
    `models` and `optimizers` are those that were used."""

    def __init__(self, mark: Callable[[], int]):
        self.models: dict[torch.nn.Module, None] = {}
        self.optimizers: dict[torch.optim.Optimizer, None] = {}
        self._mark = mark
        self._stack: list[str] = []
        self._marks: list[tuple[str, int]] = []
        self._depth = 0

    def follow(self) -> None:
        """Installs the hooks, for the rest of the process."""
        register_module_forward_pre_hook(self._forward_begins)
        register_module_forward_hook(self._forward_ends, always_call=True)
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(lambda *_: self._leave())
        for name in ("backward", "grad"):  # pipelines compute a backward in halves with `grad`
            setattr(torch.autograd, name, self._as_backward(getattr(torch.autograd, name)))

    def _as_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            with self.phase("backward"):
                return original(*args, **kwargs)

        return backward

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase, inside of which others may begin."""
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    @property
    def inside(self) -> bool:
        """Whether a phase has begun and not ended."""
        return bool(self._stack)

    def restart(self) -> None:
        """A step begins."""
        self._marks, self._stack = [(OTHER, self._mark())], []

    def spans(self) -> list[tuple[str, int, int]]:
        """The step ends now: its phases in order, as (name, first, last time on the tape)."""
        marks = [*self._marks, ("", self._mark())]
        return [(name, first, last) for (name, first), (_, last) in pairwise(marks)]

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._marks.append((name, self._mark()))

    def _leave(self) -> None:
        self._stack.pop()
        self._marks.append((self._stack[-1] if self._stack else OTHER, self._mark()))

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and "backward" not in self._stack:
            self.models[module] = None
            self._enter("forward")

    def _forward_ends(self, *_: Any) -> None:
        if self._depth == 1 and self._stack and self._stack[-1] == "forward":
            self._leave()
        self._depth -= 1

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizers[optimizer] = None
        self._enter("optimizer")
