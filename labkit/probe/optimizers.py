"""The script's optimizers, and the loss of a step for each of them: tracks the optimizers, detects updates that no hook
reports, selects the one that paces the steps, and combines the values that backward was called on as the script does.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.probe.journal import Guard
from labkit.probe.memory import local
from labkit.probe.patches import Patches
from labkit.probe.torch_private import (
    COMPILE_COUNTERS,
    DDP_SINK,
    SAVED_OTHER,
    SAVED_REDUCTION,
    SAVED_SELF,
    TENSOR_VERSION,
)

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
    chosen = []
    for group in optimizer.param_groups[:_WITNESSES]:
        parameters = group["params"]
        chosen += [parameters[index] for index in {0, len(parameters) // 2, len(parameters) - 1} if parameters]
    return chosen


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Its name in the script: a variable or an attribute of `self`; its class if it has none."""
    frame, known = sys._getframe(), type(optimizer).__name__
    while frame is not None:  # the outermost function with a name for it distinguishes several optimizers
        if not frame.f_code.co_filename.startswith(_LIBRARIES) and "site-packages" not in frame.f_code.co_filename:
            attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
            names = [
                name
                for scope in (attributes, frame.f_locals)
                for name, value in list(scope.items())
                if value is optimizer
            ]
            known = names[0] if names else known
        frame = frame.f_back
    return known


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
    rest, seen, reached = [root.grad_fn], set(), []
    while rest and len(seen) < _NODES and len(reached) < 2 * _WITNESSES:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.append(node.variable)
        rest += [following for following, _ in node.next_functions]
    parameters = [leaf for leaf in reached if isinstance(leaf, torch.nn.Parameter)]
    return parameters or reached


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


# ---- the losses of a step
#
# Assignment. A loss belongs to the optimizers whose gradients its backward changed; if that is unknown, to the next one
# that steps. If an optimizer's gradients were reset before a backward, its earlier losses are discarded, so that a
# generator's loss, which also reaches the critic's parameters, is not counted as the critic's.
#
# Value. A step with one backward has its loss. With several backwards, as in gradient accumulation, it has their mean.
# If the script divides each loss by their number, or weights it, the parts are added instead; they are recognised by
# their shares, which add up to 1. Losses that are sums over samples, divided by the number of samples of the whole
# step, are added too. A share is read from the autograd graph: the factors by which the script multiplied or divided
# last.


_SUM = 2  # the saved reduction of a loss that is summed instead of averaged
_SCALINGS = 6  # maximum number of scalings of one loss that are followed
_UNUSED = 256  # maximum number of stored losses of an optimizer that has not stepped
_REDUCED = ("MseLossBackward0", "NllLossBackward0", "NllLoss2DBackward0")  # losses that always save their reduction
_MOST_WITH_LOSSES = 32  # maximum number of optimizers with separate losses
_SAME_VALUE = (
    *("CloneBackward0", "ToCopyBackward0", "AliasBackward0", "ViewBackward0"),
    *("ReshapeAliasBackward0", "SqueezeBackward0", "UnsqueezeBackward0"),
)

Edge = tuple[torch.autograd.graph.Node, int]  # an operation of the graph, and the index of its output


@dataclass(frozen=True)
class Share:
    """A loss's share of the step's loss: one of `parts`, depending on how many of the scalings belong to it; `summed`
    as above.
    """

    parts: tuple[float, ...] = ()
    summed: bool = False


@dataclass(eq=False)
class Loss:
    """A loss that backward was called on; its value may not have arrived from the device yet."""

    copy: Any
    share: Share


class LossWatch:
    """The losses since the last step of each optimizer; `write` takes a kind and fields, as in `Journal`."""

    def __init__(self, optimizers: Optimizers, write: Callable[..., None]):
        self._optimizers, self._write = optimizers, write
        self._since: list[Loss] = []  # since any optimizer stepped
        self._reached: weakref.WeakKeyDictionary[Any, deque[Loss]] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._named: dict[str, weakref.ref[Any]] = {}  # in the order of their numbers
        self._written: dict[int, bool] = {}
        self._paced: list[Loss] = []
        self._usual: set[float] = set()  # shares that added up to 1
        self._before: list[Any] = []
        self._after: list[Any] = []

    @property
    def newest(self) -> list[Loss]:
        """The losses since the last step of any optimizer."""
        return self._since

    def forget(self) -> None:
        """Discards all losses, because they can no longer be read."""
        self._since, self._paced = [], []
        self._reached.clear()

    # ---- assignment

    def backward_begins(self) -> None:
        """Call this when backward starts."""
        several = self._optimizers.few()
        self._before = [several, gradients(several)] if len(several) > 1 else []

    def backward_ends(self, loss: Loss | None) -> None:
        """Call this when backward ends; `loss` is None if it was not called on a loss."""
        before, self._before = self._before, []
        if not before:
            if loss is not None:
                self._since.append(loss)
            return
        several, (were, now) = before[0], (before[1], gradients(before[0]))
        reset = dict(self._after)
        for number, optimizer in enumerate(several):
            if were[number] == now[number]:
                continue
            reached = self._reached.setdefault(optimizer, deque(maxlen=_UNUSED))
            if reset.get(id(optimizer), were[number]) != were[number]:
                reached.clear()
            if loss is not None:
                reached.append(loss)
        self._after = [(id(optimizer), state) for optimizer, state in zip(several, now)]
        if loss is not None:
            self._since.append(loss)

    def of(self, optimizer: Any, sets_the_pace: bool) -> list[Loss]:
        """The losses of an optimizer's step; empty for an optimizer that shares all of them with the pacing
        optimizer."""
        losses = list(self._reached.pop(optimizer, ())) or self._since
        self._since = []
        if sets_the_pace:
            self._paced = losses
            return losses
        shared = all(any(loss is paced for paced in self._paced) for loss in losses)
        full = len(self._named) >= _MOST_WITH_LOSSES and optimizer not in self._numbers
        return [] if shared or full else losses

    def number(self, optimizer: Any, sets_the_pace: bool) -> int:
        """The number of an optimizer with separate losses; its name is recorded once.

        An optimizer that the script has created again gets the number of its predecessor of the same name.
        """
        if optimizer not in self._numbers:
            name = own = name_of(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else "updates"
            copies = 1
            while name in self._named and self._named[name]() is not None:
                copies += 1
                name = f"{own} {copies}"
            self._named[name] = weakref.ref(optimizer)
            self._numbers[optimizer] = list(self._named).index(name)
        number = self._numbers[optimizer]
        if self._written.get(number) != sets_the_pace:
            self._written[number] = sets_the_pace
            self._write("optimizer", optimizer=number, name=list(self._named)[number], sets_pace=sets_the_pace)
        return number

    # ---- value

    def value(self, losses: Sequence[Loss], values: Sequence[float]) -> float | None:
        """The loss of a step, computed from the values of its losses; None if it has none."""
        if not losses:
            return None
        total, shares = sum(values), [loss.share for loss in losses]
        if len(losses) > 1:
            if all(share.summed for share in shares):
                return total
            for depth in range(max(len(share.parts) for share in shares)):
                parts = [share.parts[min(depth, len(share.parts) - 1)] if share.parts else 1.0 for share in shares]
                if math.isclose(sum(parts), 1.0, rel_tol=1e-4):
                    self._usual.update(parts)
                    return total
        parts = [next((part for part in share.parts if part in self._usual), 1.0) for share in shares]
        return total / sum(parts)


def share_of(made_by: Edge | None) -> Share:
    """The share of a loss by the script's last scalings; `made_by` computed it. `loss / 4` and `loss * 0.25` have the
    part 0.25.

    A factor of 1 or more is not a share. A factor that is a tensor on a GPU is skipped, because reading it would
    synchronize.
    """
    parts, factor, edge, divided = [], 1.0, made_by, False
    for _ in range(_SCALINGS):
        scaled = _scaling(edge)
        if scaled is None:
            break
        number, edge = scaled
        divided = divided or number != 1
        factor *= number
        if 0 < factor < 1 and number != 1:
            parts.append(factor)
    return Share(tuple(parts), divided and edge is not None and _is_sum(edge[0]))


def _is_sum(node: torch.autograd.graph.Node) -> bool:
    """Whether an operation is a loss that is summed over samples."""
    reduction = getattr(node, SAVED_REDUCTION.attribute, None)
    return (SAVED_REDUCTION.of(node) if node.name() in _REDUCED else reduction) == _SUM


def edge_of(tensor: torch.Tensor) -> Edge | None:
    """The operation that computed a tensor; None if it is not in the autograd graph."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def edge_before(edge: Edge) -> Edge | None:
    """The operation that computed the first input of an operation."""
    return edge[0].next_functions[0] if edge[0].next_functions[0][0] is not None else None


@functools.cache
def _ddp_sink() -> str:
    """The name of the operation that all outputs of a model in DDP pass through."""
    return f"{DDP_SINK.get().__name__}Backward"


def _scaling(edge: Edge | None) -> tuple[float, Edge] | None:
    """The factor by which an operation multiplied its single input, and the edge of that input; None for any other
    operation.
    """
    if edge is None:
        return None
    node, output = edge
    name, inputs = node.name(), [following for following in node.next_functions if following[0] is not None]
    if name == _ddp_sink() and len(inputs) == len(node.next_functions):
        return 1.0, inputs[output]
    if len(inputs) != 1:
        return None
    if name in _SAME_VALUE:
        return 1.0, inputs[0]
    first = node.next_functions[0][0] is not None
    if name not in ("DivBackward0", "MulBackward0") or (name == "DivBackward0" and not first):
        return None
    number = (SAVED_OTHER if first else SAVED_SELF).of(node)
    if number is None or number.numel() != 1:
        return None
    value = number.item() if number.device.type == "cpu" else math.nan
    if name == "DivBackward0":
        value = 1 / value if value else math.nan
    return value, inputs[0]
