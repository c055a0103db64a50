"""The losses of a step: what backward was called on, as the script means it, for each optimizer.

**Whose loss.** A loss belongs to the optimizers whose gradients its backward changed; if that cannot be seen, to the next one that steps.
The gradients of an optimizer that were reset before a backward forget the losses before it, so that the generator's loss, which reaches
the critic's parameters too, is not taken for the critic's.

**How large.** A step with one backward shows its loss as it is. Of several backwards, as gradient accumulation has them, it shows the
mean. Where the script has divided each loss by their number, or weighted it, the parts of one mean add up to it: they are recognised by
their shares, which add up to 1. Losses that are sums over samples, divided by how many there are in the whole step, add up too. A share is
read from the graph: the numbers by which the script multiplied or divided last.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.probe.optimizers import Optimizers, gradients, name_of

_SUM = 2  # how a loss that is summed up, and not averaged, saves its reduction
_SCALINGS = 6  # of one loss, that are looked through
_UNUSED = 256  # losses of an optimizer that has not stepped, that are kept
_DDP_SINK = "_DDPSinkBackward"
MOST = 32  # optimizers with losses of their own, whatever the script calls them
_SAME_VALUE = (
    *("CloneBackward0", "ToCopyBackward0", "AliasBackward0", "ViewBackward0"),
    *("ReshapeAliasBackward0", "SqueezeBackward0", "UnsqueezeBackward0"),
)

Edge = tuple[torch.autograd.graph.Node, int]  # an operation of the graph, and which of its outputs


@dataclass(frozen=True)
class Share:
    """What part of the step's loss a loss is: one of `parts`, by how many of the script's scalings belong to it; `summed` as above."""

    parts: tuple[float, ...] = ()
    summed: bool = False


@dataclass(eq=False)
class Loss:
    """A loss that backward was called on; its value may still be on its way from the device."""

    copy: Any
    share: Share


class LossWatch:
    """The losses since the last steps; `write` takes a kind and fields, as a journal does."""

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
        """Those since any optimizer has stepped."""
        return self._since

    def forget(self) -> None:
        """The losses so far cannot be read any more."""
        self._since, self._paced = [], []
        self._reached.clear()

    # ---- whose

    def backward_begins(self) -> None:
        """Backward is called on something."""
        several = self._optimizers.few()
        self._before = [several, gradients(several)] if len(several) > 1 else []

    def backward_ends(self, loss: Loss | None) -> None:
        """It has ended; `loss` is None if it was not called on a loss."""
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
        """The losses of the step that an optimizer has made. One that shares all of them with the pacemaker has none of its own."""
        losses = list(self._reached.pop(optimizer, ())) or self._since
        self._since = []
        if sets_the_pace:
            self._paced = losses
            return losses
        shared = all(any(loss is paced for paced in self._paced) for loss in losses)
        full = len(self._named) >= MOST and optimizer not in self._numbers
        return [] if shared or full else losses

    def number(self, optimizer: Any, sets_the_pace: bool) -> int:
        """The number of an optimizer with losses of its own; its name is written once.

        One that the script has made anew has the number of the one before it, which had its name and is gone.
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

    # ---- how large

    def value(self, losses: Sequence[Loss], values: Sequence[float]) -> float | None:
        """The loss of a step from the values of its losses; None if it has none."""
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
    """The share that the script's last scalings give a loss, where `made_by` computed it: parts 0.25 of `loss / 4` and `loss * 0.25`.

    A scaling by a number of 1 or more is no share. One by a tensor on a GPU is looked through, since its value would have to be waited for.
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
    reduction = getattr(edge[0], "_saved_reduction", None) if edge else None
    return Share(tuple(parts), divided and reduction == _SUM)


def edge_of(tensor: torch.Tensor) -> Edge | None:
    """What computed a tensor; None if autograd does not know."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def edge_before(edge: Edge) -> Edge | None:
    """What computed the first input of an operation."""
    return edge[0].next_functions[0] if edge[0].next_functions[0][0] is not None else None


def _scaling(edge: Edge | None) -> tuple[float, Edge] | None:
    """The number that an operation multiplied its one input with, and what computed that input; None of any other operation."""
    if edge is None:
        return None
    node, output = edge
    name, inputs = node.name(), [following for following in node.next_functions if following[0] is not None]
    if name == _DDP_SINK and len(inputs) == len(node.next_functions):
        return 1.0, inputs[output]  # DDP hands all outputs of its model through this
    if len(inputs) != 1:
        return None
    if name in _SAME_VALUE:
        return 1.0, inputs[0]
    first = node.next_functions[0][0] is not None
    if name not in ("DivBackward0", "MulBackward0") or (name == "DivBackward0" and not first):
        return None
    number = node._saved_other if first else node._saved_self
    if number is None or number.numel() != 1:
        return None
    value = number.item() if number.device.type == "cpu" else math.nan
    if name == "DivBackward0":
        value = 1 / value if value else math.nan
    return value, inputs[0]
