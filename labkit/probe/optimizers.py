"""The optimizers of a script, from when they are made; and updates of parameters that no optimizer's hook reports.

An update without a hook is found by comparing: after a backward, few parameters (`witnesses`) are remembered with their version counters;
if one of them has changed by the time the script goes on to its next batch, forward or backward, the parameters were updated in between,
by an optimizer whose step is compiled or by lines of the script's own. Torch does not count changes through `.data`, so until the first
update that a hook or a counter reports, the values of the smallest witnesses are compared too (on a GPU this waits for the device), and
so is whether the script has replaced all of them by new tensors.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.probe.memory import local

_MOST = 8  # optimizers that are told apart: one that has an optimizer for each parameter has one loss for all of them
_WITNESSES = 4
_NODES = 4096  # of the graph of a loss, that are searched for parameters
_LIBRARIES = tuple(str(Path(path).parent) for path in (torch.__file__, __file__))


class Optimizers:
    """Those that were made and are alive, in order."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []

    def follow(self) -> None:
        """From now on every optimizer that is made is known."""
        original = torch.optim.Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made.append(weakref.ref(optimizer, self._made.remove))

        torch.optim.Optimizer.__init__ = init

    def few(self) -> list[torch.optim.Optimizer]:
        """All of them; none if there are too many to tell apart."""
        return [one for made in self._made if (one := made()) is not None] if len(self._made) <= _MOST else []


def witnesses(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Few of its parameters, from all of its groups."""
    found = []
    for group in optimizer.param_groups[:_WITNESSES]:
        parameters = group["params"]
        found += [parameters[index] for index in {0, len(parameters) // 2, len(parameters) - 1} if parameters]
    return found


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """What the script calls it: the name of a variable or of an attribute of `self`; its class if it has none."""
    frame, found = sys._getframe(), type(optimizer).__name__
    while frame is not None:  # the outermost function that has a name for it knows which of several it is
        if not frame.f_code.co_filename.startswith(_LIBRARIES) and "site-packages" not in frame.f_code.co_filename:
            attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
            names = [name for scope in (attributes, frame.f_locals) for name, value in list(scope.items()) if value is optimizer]
            found = names[0] if names else found
        frame = frame.f_back
    return found


@dataclass
class _Witness:
    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None
    owner: Any  # an optimizer, or the watch itself for lines of the script's own


class UpdateWatch:
    """Told of every backward and of every step that a hook reports; finds the updates between them."""

    def __init__(self, optimizers: Optimizers):
        self._optimizers = optimizers
        self._kept: list[_Witness] = []
        self._leaves: list[torch.Tensor] = []
        self._reported = self._counted = self._replaced = False

    @property
    def by_hand(self) -> bool:
        """Whether the script may update its parameters itself: it has made no optimizer."""
        return not self._reported and not self._optimizers.few()

    @property
    def is_alive(self) -> bool:
        """As an owner of updates: whether lines of the script may update its parameters again."""
        return not self._reported

    def backward_begins(self, root: torch.Tensor | None) -> Any:
        """Backward is called; the owner of an update that shows in what it starts from: all parameters are other tensors than before."""
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
        """It has ended: from now on its parameters may be updated."""
        if self._reported and not _compiles():
            return
        optimizers = self._optimizers.few()
        self._kept = [self._witness(p, one) for one in optimizers for p in witnesses(one) if p.grad is not None and _has_data(p)]
        if not self._kept and not self._reported:
            own = [leaf for leaf in self._leaves if _has_data(leaf)]
            self._kept = [self._witness(leaf, self) for leaf in sorted(own, key=torch.Tensor.numel)[:_WITNESSES]]
        self._leaves = []

    def reported(self) -> None:
        """An optimizer's hook reports its step."""
        self._reported = True
        self._kept = []

    def found(self, script_ends: bool = False) -> Any:
        """The owner of an update that no hook has reported, since the last backward; None if there was none.

        At the end of a script that replaces its parameters by new tensors, the last backward is taken to be followed by an update too.
        """
        if script_ends and self._replaced and self._kept:
            return self._found(self)
        for kept in self._kept:
            if kept.tensor._version != kept.version:
                self._counted = True
                return self._found(kept.owner)
            if kept.values is not None and _has_data(kept.tensor) and not torch.equal(kept.values, _values(kept.tensor)):
                return self._found(kept.owner)
        return None

    def _found(self, owner: Any) -> Any:
        self._kept = []
        return owner

    def _witness(self, tensor: torch.Tensor, owner: Any) -> _Witness:
        compared = not (self._reported or self._counted)
        return _Witness(tensor, tensor._version, _values(tensor).clone() if compared else None, owner)


def leaves(root: torch.Tensor) -> list[torch.Tensor]:
    """The first parameters that backward from `root` reaches; any tensors that are given gradients, if none is a Parameter."""
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
    """What shows whether backward has reached an optimizer's parameters: identity and version of the gradients of its witnesses."""
    return [[(id(p.grad), p.grad._version) if p.grad is not None else (0, 0) for p in witnesses(one)] for one in optimizers]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return local(tensor).detach().reshape(-1)[:1024]


def _has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is there: sharding frees that of gathered parameters."""
    try:
        return local(tensor).untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):  # sparse, fake, or of a functional transform
        return False


def _compiles() -> bool:
    """Whether the script has compiled anything, so that a hooked optimizer may step unseen from some step on."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo and dynamo.counters["stats"])
