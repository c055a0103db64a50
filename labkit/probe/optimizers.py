"""Tracks the script's optimizers, detects updates that no hook reports, and selects the one that paces the steps."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.probe.journal import Guard
from labkit.probe.memory import local
from labkit.probe.patches import Patches
from labkit.probe.torch_private import COMPILE_COUNTERS, TENSOR_VERSION

# ---- selects the pacing optimizer among several


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


# ---- tracks the script's optimizers, and detects updates of parameters that no optimizer hook reports


_MOST = 8  # maximum number of distinguished optimizers: a script with one optimizer per parameter has a single loss
_WITNESSES = 4
_NODES = 4096  # maximum number of graph nodes that are searched for parameters
_version = TENSOR_VERSION.reader(0)
_LIBRARIES = tuple(str(Path(path).parent) for path in (torch.__file__, __file__))


class Optimizers:
    """The live optimizers in order of creation."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []

    def follow(self, patches: Patches) -> None:
        """Starts recording every optimizer that is created."""

        def make(original: Callable[..., None]) -> Callable[..., None]:
            def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                self._made.append(weakref.ref(optimizer, self._made.remove))

            return init

        patches.wrap("optimizers", "torch.optim.Optimizer.__init__", make)

    def few(self) -> list[torch.optim.Optimizer]:
        """All of them; empty if there are too many to distinguish."""
        return (
            [optimizer for made in self._made if (optimizer := made()) is not None] if len(self._made) <= _MOST else []
        )


def witnesses(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A few parameters from each of its first groups."""
    found = []
    for group in optimizer.param_groups[:_WITNESSES]:
        parameters = group["params"]
        found += [parameters[index] for index in {0, len(parameters) // 2, len(parameters) - 1} if parameters]
    return found


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Its name in the script: a variable or an attribute of `self`; its class if it has none."""
    frame, found = sys._getframe(), type(optimizer).__name__
    while frame is not None:  # the outermost function with a name for it distinguishes several optimizers
        if not frame.f_code.co_filename.startswith(_LIBRARIES) and "site-packages" not in frame.f_code.co_filename:
            attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
            names = [
                name
                for scope in (attributes, frame.f_locals)
                for name, value in list(scope.items())
                if value is optimizer
            ]
            found = names[0] if names else found
        frame = frame.f_back
    return found


@dataclass
class _Witness:
    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None
    owner: Any  # an optimizer, or the UpdateWatch itself for updates by the script


class UpdateWatch:
    """Receives every backward and every step that a hook reports; detects the updates between them."""

    def __init__(self, optimizers: Optimizers, compiled: Guard):
        self._optimizers, self._compiled = optimizers, compiled
        self._kept: list[_Witness] = []
        self._leaves: list[torch.Tensor] = []
        self._reported = self._counted = self._replaced = False

    @property
    def by_hand(self) -> bool:
        """Whether the script may update its parameters itself, because it has created no optimizer."""
        return not self._reported and not self._optimizers.few()

    @property
    def is_alive(self) -> bool:
        """As an owner of updates: whether the script may update its parameters again."""
        return not self._reported

    def backward_begins(self, root: torch.Tensor | None) -> Any:
        """Backward is called; returns the owner of an update if all parameters that `root` depends on are new
        tensors."""
        if root is None or not self.by_hand:
            return None
        self._leaves = leaves(root)
        before = [kept.tensor for kept in self._kept]
        if not before or any(leaf is tensor for leaf in self._leaves for tensor in before):
            return None
        alike = [leaf.shape for leaf in self._leaves][: len(before)] == [tensor.shape for tensor in before]
        updated, self._replaced = alike or self._replaced, alike
        return self._found(self) if updated else None

    def backward_ends(self) -> None:
        """Backward has ended: from now on the parameters may be updated."""
        if self._reported and not self._compiles():
            return
        optimizers = self._optimizers.few()
        self._kept = [
            self._witness(p, optimizer)
            for optimizer in optimizers
            for p in witnesses(optimizer)
            if p.grad is not None and _has_data(p)
        ]
        if not self._kept and not self._reported:
            own = [leaf for leaf in self._leaves if _has_data(leaf)]
            self._kept = [self._witness(leaf, self) for leaf in sorted(own, key=torch.Tensor.numel)[:_WITNESSES]]
        self._leaves = []

    def reported(self) -> None:
        """An optimizer's hook reports its step."""
        self._reported = True
        self._kept = []

    def found(self, script_ends: bool = False) -> Any:
        """The owner of an unreported update since the last backward; None if there was none.

        At the end of a script that replaces its parameters by new tensors, the last backward is assumed to be followed
        by an update.
        """
        if script_ends and self._replaced and self._kept:
            return self._found(self)
        for kept in self._kept:
            if _version(kept.tensor) != kept.version:
                self._counted = True
                return self._found(kept.owner)
            if (
                kept.values is not None
                and _has_data(kept.tensor)
                and not torch.equal(kept.values, _values(kept.tensor))
            ):
                return self._found(kept.owner)
        return None

    def _found(self, owner: Any) -> Any:
        self._kept = []
        return owner

    def _witness(self, tensor: torch.Tensor, owner: Any) -> _Witness:
        compared = not (self._reported or self._counted)
        return _Witness(tensor, _version(tensor), _values(tensor).clone() if compared else None, owner)

    def _compiles(self) -> bool:
        """Whether the script has compiled anything, so that a hooked optimizer may later step without its hooks."""
        if COMPILE_COUNTERS.owner not in sys.modules:
            return False
        counters = self._compiled(COMPILE_COUNTERS.get)
        return bool(counters and counters["stats"])


def leaves(root: torch.Tensor) -> list[torch.Tensor]:
    """The first parameters that backward from `root` reaches; if none is a Parameter, any tensors that receive
    gradients.
    """
    rest, seen, found = [root.grad_fn], set(), []
    while rest and len(seen) < _NODES and len(found) < 2 * _WITNESSES:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        rest += [following for following, _ in node.next_functions]
    parameters = [leaf for leaf in found if isinstance(leaf, torch.nn.Parameter)]
    return parameters or found


def gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[tuple[int, int]]]:
    """Identity and version of the gradients of each optimizer's witnesses; a change shows that backward has reached
    them.
    """
    return [
        [(id(p.grad), _version(p.grad)) if p.grad is not None else (0, 0) for p in witnesses(optimizer)]
        for optimizer in optimizers
    ]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return local(tensor).detach().reshape(-1)[:1024]


def _has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is allocated: sharding frees that of gathered parameters."""
    try:
        return local(tensor).untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):  # sparse, fake, or of a functional transform
        return False
