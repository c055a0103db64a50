"""The loss of a step per optimizer: the values that backward was called on, combined as the script combines them.

**Assignment.** A loss belongs to the optimizers whose gradients its backward changed; if that is unknown, to the next
one that steps. If an optimizer's gradients were reset before a backward, its earlier losses are discarded, so that a
generator's loss, which also reaches the critic's parameters, is not counted as the critic's.

**Value.** A step with one backward has its loss. With several backwards, as in gradient accumulation, it has their
mean. If the script divides each loss by their number, or weights it, the parts are added instead; they are recognised
by their shares, which add up to 1. Losses that are sums over samples, divided by the number of samples of the whole
step, are added too. A share is read from the autograd graph: the factors by which the script multiplied or divided
last.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.probe.optimizers import Optimizers, gradients, name_of
from labkit.probe.torch_private import DDP_SINK, SAVED_OTHER, SAVED_REDUCTION, SAVED_SELF

_SUM = 2  # the saved reduction of a loss that is summed instead of averaged
_SCALINGS = 6  # maximum number of scalings of one loss that are followed
_UNUSED = 256  # maximum number of stored losses of an optimizer that has not stepped
_REDUCED = ("MseLossBackward0", "NllLossBackward0", "NllLoss2DBackward0")  # losses that always save their reduction
MOST = 32  # maximum number of optimizers with separate losses
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
        full = len(self._named) >= MOST and optimizer not in self._numbers
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
