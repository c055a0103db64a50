"""What Python's objects hold beyond a step: models that do not train, copies of weights, and tensors in lists and dictionaries.

A walk over all objects that the garbage collector knows finds them. It takes some tens of milliseconds, so it happens after the first two
steps of a model or optimizer, and later only so often that it takes a thousandth of the time. A tensor counts when two walks in a row have
seen it: a batch, a loss or an output lives within a step. On CPU ranks the tensors of data sets do not count, since a GPU would not hold
them.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

_SHARE = 1000  # a walk happens again when so many times its own duration has passed
_MOST = 100_000  # tensors that are remembered from one walk to the next
_DEPTH = 6  # of lists and dictionaries in a data set


class Held:
    """The modules and tensors that the walks found; all of them weakly, so that nothing lives longer for it."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lasting: list[weakref.ref[torch.Tensor]] = []
        self._data: list[weakref.ref[torch.Tensor]] = []
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether another walk would take no more than its share of the time."""
        return time.perf_counter() >= self._next

    def walk(self, device: torch.device) -> None:
        """Looks at all objects."""
        began = time.perf_counter()
        modules, tensors, data = _found()
        self._modules = weakref.WeakSet(module for module in modules if next(_own(module, "_parameters", "_buffers"), None) is not None)
        seen = {id(tensor): tensor for tensor in tensors[:_MOST] if _is_on(tensor, device)}
        lasting = [tensor for key, tensor in seen.items() if key in self._seen and self._seen[key]() is tensor]
        self._lasting = [weakref.ref(tensor) for tensor in lasting]
        self._data = [weakref.ref(tensor) for tensor in islice(_tensors_of(data), _MOST)]
        self._seen = {key: weakref.ref(tensor) for key, tensor in seen.items()}
        ended = time.perf_counter()
        self._next = ended + _SHARE * (ended - began)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of every module that is alive, trained or not."""
        for module in list(self._modules):
            yield from _own(module, "_parameters")

    def rest(self) -> Iterator[torch.Tensor]:
        """The modules' buffers, and every other tensor that outlives a step."""
        for module in list(self._modules):
            yield from _own(module, "_buffers")
        yield from _alive(self._lasting)

    def data(self) -> Iterator[torch.Tensor]:
        """The tensors of data sets."""
        return _alive(self._data)


def _own(module: torch.nn.Module, *names: str) -> Iterator[torch.Tensor]:
    """What a module itself holds; nothing for one whose `__init__` has not run yet."""
    held = (getattr(module, name, None) for name in names)
    return (tensor for tensors in held if hasattr(tensors, "values") for tensor in tensors.values() if tensor is not None)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    try:
        return tensor.device.type == device.type
    except (RuntimeError, NotImplementedError):  # a tensor that only stands for another, and is used outside of its mode
        return False


def _alive(references: list[weakref.ref[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return (tensor for reference in references if (tensor := reference()) is not None)


def _found() -> tuple[list[torch.nn.Module], list[torch.Tensor], list[Any]]:
    """All modules, tensors, and data sets with their loaders."""
    sorts: dict[type, list[Any] | None] = {}
    modules, tensors, data = [], [], []
    for thing in gc.get_objects():
        kind = type(thing)  # and not its __class__, which an object may make up
        try:
            sort = sorts[kind]
        except KeyError:
            sort = sorts[kind] = _list_for(kind, modules, tensors, data)
        if sort is not None:
            sort.append(thing)
    return modules, tensors, data


def _list_for(kind: type, modules: list[Any], tensors: list[Any], data: list[Any]) -> list[Any] | None:
    if issubclass(kind, torch.nn.Module):
        return modules
    if issubclass(kind, torch.Tensor):
        return tensors
    return data if issubclass(kind, (Dataset, DataLoader)) else None


def _tensors_of(data: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that data sets hold, also those that are plain objects or lists."""
    for thing in data:
        if isinstance(thing, DataLoader):
            thing = thing.dataset
        yield from _tensors_below(thing if isinstance(thing, (list, tuple, Mapping)) else getattr(thing, "__dict__", {}), _DEPTH)


def _tensors_below(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_below(part, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_below(part, depth - 1)
