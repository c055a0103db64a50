"""What a script decides by a number that it reads from data, such as its loss: a trace has no data, and reads 1. The
numbers that `item()` and `tolist()` return, and what is computed from them, remember that, and note the first line that
compares one of them. A second trace, with the contrary result of all comparisons, then tells whether its steps depend
on them.

`float(x)` returns nothing but a float of Python, so the code of the script, and of the modules beside it, calls
another function instead, which reads a tensor as `item()` does. Functions of `math` are followed, those of NumPy and
of libraries are not.
"""

from __future__ import annotations

import ast
import builtins
import math
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_EQUALITY = ("__eq__", "__ne__")
_ARITHMETIC = (
    *(f"__{side}{name}__" for name in _OF_TWO for side in ("", "r")),
    *("__neg__", "__pos__", "__abs__", "__round__"),
)
_OF_MATH = ("exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "sqrt", "pow", "fsum", "tanh")
_FLOAT = "_float_or_item"  # a builtin function


class Decisions:
    """The comparisons of a trace; if `contrary`, each of them has the contrary result. `first` is where the first one
    was, if there was one."""

    def __init__(self, contrary: bool):
        self.contrary = contrary
        self.first: traceback.StackSummary | None = None

    def follow(self, libraries: tuple[str, ...]) -> None:
        """Replaces what reads numbers from tensors, and how modules outside of `libraries` are loaded, for the rest of
        the process. Constants of the script are known."""

        def reading(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
            def read(tensor: torch.Tensor) -> Any:
                is_known = getattr(tensor, "constant", None) is not None
                value = original(tensor)
                return value if is_known else self._unknown(value)

            return read

        torch.Tensor.item = item = reading(torch.Tensor.item)
        torch.Tensor.tolist = reading(torch.Tensor.tolist)

        def number(*values: Any) -> Any:
            is_read = len(values) == 1 and isinstance(values[0], torch.Tensor) and values[0].is_floating_point()
            return item(values[0]) if is_read else values[0] if _are_unknown(values) else float(*values)

        setattr(builtins, _FLOAT, number)
        for name in _OF_MATH:
            if hasattr(math, name):  # exp2 is of Python 3.11
                setattr(math, name, self._followed(getattr(math, name)))
        load = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, name: str) -> Any:
            path = loader.get_filename(name)
            return load(loader, name) if path.startswith(libraries) else compiled(path)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]

    def _unknown(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._unknown(each) for each in value]
        return _Unknown(value, self) if isinstance(value, float) else value

    def _followed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*values: Any) -> Any:
            return self._unknown(function(*values)) if _are_unknown(values) else function(*values)

        return computed

    def compared(self, result: bool) -> bool:
        """A number that the data determine has been compared, with this result; returns the result to continue with."""
        if self.first is None:
            self.first = traceback.extract_stack()
        return result != self.contrary


def compiled(path: str) -> CodeType:
    """The code of a file of the user's own, in which decisions are followed."""
    tree = ast.parse(Path(path).read_bytes(), path)
    return compile(_Floats().visit(tree), path, "exec", dont_inherit=True)


class _Floats(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Name) and node.func.id == "float":
            node.func.id = _FLOAT
        self.generic_visit(node)
        return node


def _are_unknown(values: Any) -> bool:
    return any(
        isinstance(each, _Unknown) or (isinstance(each, (list, tuple)) and _are_unknown(each)) for each in values
    )


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


def _is_true(number: _Unknown) -> bool:
    return number.decisions.compared(bool(float(number)))


_Unknown.__bool__ = _is_true  # type: ignore[method-assign]
for _name in _COMPARISONS:
    setattr(_Unknown, _name, _comparison(_name))
for _name in _ARITHMETIC:
    setattr(_Unknown, _name, _operation(_name))
