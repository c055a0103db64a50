"""Checks the arguments of pictures: each one by its annotation and, for counts, by the bounds for its name.

A picture with thousands of ranks would take minutes to draw and be unreadable, so counts are bounded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from labkit.common.arguments import Number, check_choice, check_flag, shown
from labkit.training.workloads import WORKLOADS

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COUNT = Number(int, 1, 64)
_COUNTS = {  # other bounds than _COUNT; "each of" stands for the elements of a list
    "samples": Number(int, 1, 10_000),
    "batch": Number(int, 1, 10_000),
    "epochs": Number(int, 1, 16),
    "micro_batches": Number(int, 1, 128),
    "per_node": Number(int, 1, 4096),
    "axes": Number(int, 1, 256),
    "each of held": Number(int, 0, 64),
    "each of ranks": Number(int, 1, 65_536),
    **dict.fromkeys(("rank", "workers", "prefetch", "each of counts"), Number(int, 0, 64)),
    "each of order": Number(int, 0, 10**9),
    "stage": Number(int, 0, 3),
}
_MEASURE = Number(float, 0.0, 1e18)  # seconds, bytes, parameters
_ANY = Number(float, -1e300, 1e300)
_SIGNED = ("x", "a", "b", "h", "gradients", "measured", "modelled")  # arguments whose numbers may be negative
_MAX_ELEMENTS = 10_000  # of a list


def checked(function: _Function) -> _Function:
    """Wraps a picture function: invalid arguments raise `TypeError` or `ValueError` with one sentence."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{function.__name__}{signature.replace(return_annotation=signature.empty)}: {error}"
            ) from None
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                _check(name, str(parameter.annotation), value)
        return function(*bound.args, **bound.kwargs)

    return call


def _check(name: str, annotation: str, value: Any) -> None:
    wanted, _, optional = annotation.partition(" | ")
    if optional == "None" and value is None:
        return
    if wanted == "Matrix":
        wanted = "Sequence[Sequence[float]]"
    if wanted.startswith("Sequence["):
        inner = name if name.startswith("each of ") else f"each of {name}"
        for element in _elements(name, value):
            _check(inner, wanted[len("Sequence[") : -1], element)
    elif wanted.startswith("Mapping[str, "):
        for value_of_key in _values(name, value):
            _check(name, wanted[len("Mapping[str, ") : -1], value_of_key)
    else:
        _SCALARS.get(wanted, functools.partial(_instance, wanted))(name, value)


def _whole(name: str, value: Any) -> None:
    _COUNTS.get(name, _COUNT).check(name, value)


def _real(name: str, value: Any) -> None:
    (_ANY if name.rpartition(" ")[2] in _SIGNED else _MEASURE).check(name, value)


def _text(name: str, value: Any) -> None:
    if name == "workload":
        check_choice(name, value, WORKLOADS)
    elif not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")


def _run(name: str, value: Any) -> None:
    if not hasattr(value, "state"):
        raise TypeError(f"{name} must be a Run such as run('pp', nproc=2).wait(), got {shown(value)}")


_SCALARS: Mapping[str, Callable[[str, Any], Any]] = {
    "int": _whole,
    "float": _real,
    "bool": check_flag,
    "str": _text,
    "Run": _run,
}


def _instance(wanted: str, name: str, value: Any) -> None:
    """Checks by class name, because importing the class would load modules that a picture does not need."""
    if not any(kind.__name__ == wanted for kind in type(value).__mro__):
        raise TypeError(f"{name} must be a {wanted}, got {shown(value)}")


def _elements(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list, got {shown(value)}")
    if not 0 < len(value) <= _MAX_ELEMENTS and not (name == "costs" and len(value) == 0):
        raise ValueError(f"{name} must be a list of 1 to {_MAX_ELEMENTS} elements, got {shown(value)}")
    return value


def _values(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a dict with strings as keys, got {shown(value)}")
    if not value:
        raise ValueError(f"{name} must be a dict with at least one entry, got {shown(value)}")
    return value.values()
