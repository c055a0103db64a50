"""What a script decides by a number that it reads from data, such as its loss: a trace has no data, and reads 1. The
numbers that `item()` returns, and what is computed from them, remember that, and note the first line that compares one
of them. A second trace, with the contrary result of all comparisons, then tells whether its steps depend on them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_EQUALITY = ("__eq__", "__ne__")
_ARITHMETIC = (*(f"__{side}{name}__" for name in _OF_TWO for side in ("", "r")), "__neg__", "__pos__", "__abs__")


class Decisions:
    """The comparisons of a trace; if `contrary`, each of them has the contrary result. `first` is where the first one
    was, if there was one."""

    def __init__(self, contrary: bool):
        self.contrary = contrary
        self.first: traceback.StackSummary | None = None

    def follow(self) -> None:
        """Replaces `Tensor.item` for the rest of the process. Constants of the script are known."""
        item = torch.Tensor.item

        def read(tensor: torch.Tensor) -> Any:
            is_known = getattr(tensor, "constant", None) is not None
            value = item(tensor)
            return value if is_known or not isinstance(value, float) else _Unknown(value, self)

        torch.Tensor.item = read

    def compared(self, result: bool) -> bool:
        """A number that the data determine has been compared, with this result; returns the result to continue with."""
        if self.first is None:
            self.first = traceback.extract_stack()
        return result != self.contrary


class _Unknown(float):
    """A number that the data determine."""

    decisions: Decisions

    def __new__(cls, value: float, decisions: Decisions) -> _Unknown:
        number = super().__new__(cls, value)
        number.decisions = decisions
        return number

    __hash__ = float.__hash__


def _comparison(name: str) -> Callable[[_Unknown, Any], Any]:
    compare = getattr(float, name)

    def compared(number: _Unknown, other: Any) -> Any:
        result = compare(number, other)
        looks_for_nan = name in _EQUALITY and isinstance(other, _Unknown)
        is_decision = result is not NotImplemented and not looks_for_nan
        return number.decisions.compared(result) if is_decision else result

    return compared


def _operation(name: str) -> Callable[..., Any]:
    compute = getattr(float, name)

    def computed(number: _Unknown, *others: Any) -> Any:
        result = compute(number, *others)
        return _Unknown(result, number.decisions) if isinstance(result, float) else result

    return computed


for _name in _COMPARISONS:
    setattr(_Unknown, _name, _comparison(_name))
for _name in _ARITHMETIC:
    setattr(_Unknown, _name, _operation(_name))
