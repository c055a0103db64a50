"""Finds tensors that outlive a step: models that are not trained, copies of weights, and tensors in lists and
dictionaries.

It walks over all objects that the garbage collector tracks. A walk takes tens of milliseconds, so it runs after the
first two steps of a model or optimizer, and later only as often as takes 0.1 % of the time. A tensor counts if two
consecutive walks find it, because a batch, a loss or an output lives only within a step. On CPU ranks the tensors of
data sets do not count, because they would not be in a GPU's memory.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

# those of a class that overrides them may have other parameters
_MEMBERS = torch.nn.Module.named_parameters, torch.nn.Module.named_buffers
_SHARE = 1000  # minimum time between two walks, as a multiple of the duration of a walk
_MOST = 100_000  # maximum number of tensors remembered between two walks
_DEPTH = 6  # maximum nesting of lists and dictionaries in a data set


class Held:
    """The modules and tensors found by the walks, as weak references, so that they are freed as usual."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lasting: list[weakref.ref[torch.Tensor]] = []
        self._data: list[weakref.ref[torch.Tensor]] = []
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether another walk is within the time budget."""
        return time.perf_counter() >= self._next

    def walk(self, device: torch.device) -> None:
        """Walks over all objects."""
        began = time.perf_counter()
        modules, tensors, data = _found()
        self._modules = weakref.WeakSet(module for module in modules if next(_own(module, *_MEMBERS), None) is not None)
        seen = {id(tensor): tensor for tensor in tensors[:_MOST] if _is_on(tensor, device)}
        lasting = [tensor for key, tensor in seen.items() if key in self._seen and self._seen[key]() is tensor]
        self._lasting = [weakref.ref(tensor) for tensor in lasting]
        self._data = [weakref.ref(tensor) for tensor in islice(_tensors_of(data), _MOST)]
        self._seen = {key: weakref.ref(tensor) for key, tensor in seen.items()}
        ended = time.perf_counter()
        self._next = ended + _SHARE * (ended - began)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors now, which takes tens of milliseconds."""
        return _found()[1]

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of every live module, trained or not."""
        for module in list(self._modules):
            yield from _own(module, _MEMBERS[0])

    def rest(self) -> Iterator[torch.Tensor]:
        """The modules' buffers, and every other tensor that outlives a step."""
        for module in list(self._modules):
            yield from _own(module, _MEMBERS[1])
        yield from _alive(self._lasting)

    def data(self) -> Iterator[torch.Tensor]:
        """The tensors of data sets."""
        return _alive(self._data)


def _own(
    module: torch.nn.Module, *members: Callable[..., Iterator[tuple[str, torch.Tensor]]]
) -> Iterator[torch.Tensor]:
    """The module's own tensors, without submodules; none if its `__init__` has not run yet."""
    with suppress(AttributeError):
        for each in members:
            yield from (tensor for _, tensor in each(module, recurse=False))


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    try:
        return tensor.device.type == device.type
    except (RuntimeError, NotImplementedError):  # for example a fake tensor outside of its mode
        return False


def _alive(references: list[weakref.ref[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return (tensor for reference in references if (tensor := reference()) is not None)


def _found() -> tuple[list[torch.nn.Module], list[torch.Tensor], list[Any]]:
    """All modules, tensors, and data sets and loaders."""
    sorts: dict[type, list[Any] | None] = {}
    modules, tensors, data = [], [], []
    for thing in gc.get_objects():
        kind = type(thing)  # not __class__, which an object can override
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
    """The tensors in data sets, including data sets that are plain objects or lists."""
    for thing in data:
        if isinstance(thing, DataLoader):
            thing = thing.dataset
        yield from _tensors_below(
            thing if isinstance(thing, (list, tuple, Mapping)) else getattr(thing, "__dict__", {}), _DEPTH
        )


def _tensors_below(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_below(part, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_below(part, depth - 1)
