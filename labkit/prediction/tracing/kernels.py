"""The memory that no trace shows: the temporary memory of kernels, for example the reordered images inside a
convolution, and what the caching allocator of CUDA makes of the blocks of a trace.

Temporary memory is measured on this machine: every distinct operation of a step (name, shapes, strides and types of its
tensors) is executed once with tensors of zeros. The temporary memory is the largest sum of what the kernel allocates,
minus its results, as torch's profiler reports it. An operation on more than `MOST` bytes, results included, is not
executed: the gradient of a weight is far larger than what a small batch computes it from.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.prediction.tracing.torch_private import SCHEMA, TREE_ITER, TREE_MAP
from labkit.probe.sampler import LogLevel, taken
from labkit.probe.torch_private import EVENT_TYPE, KINETO_TREE

MOST = 128 << 20
_SCOPE = "labkit kernel "
KNOWN: dict[str, int] = {}  # the bytes of kernels that other ranks have executed
_WORKSPACES: dict[str, int] = {}  # by kernel

tree_iter, tree_map_only = TREE_ITER.get(), TREE_MAP.get()


@cache
def is_kernel(function: Any) -> bool:
    """Whether an operation computes: it is no view, no collective and no plain allocation."""
    schema = SCHEMA.of(function)
    if schema.name.startswith(("c10d::", "_c10d_functional::", "prim::", "aten::empty")):
        return False
    return not any(argument.alias_info and not argument.alias_info.is_write for argument in schema.arguments)


@dataclass(frozen=True)
class Meta:
    """A tensor's shape, strides and type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    type: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.type.itemsize

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.type).zero_()


@dataclass(frozen=True)
class Kernel:
    """An operation with descriptions in place of its tensors; kernels with equal keys are equal."""

    function: Any
    args: Any
    kwargs: Any
    key: str
    bytes: int  # of its arguments and results

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
        """The kernel of a call; None if it computes nothing."""
        if not is_kernel(function):
            return None
        args, kwargs, result = tree_map_only(torch.Tensor, Meta.of, (args, kwargs or {}, result))
        size = sum(tensor.bytes for tensor in tree_iter((args, kwargs, result)) if isinstance(tensor, Meta))
        return cls(function, args, kwargs, repr((str(function), args, kwargs)), size)

    def arguments(self) -> tuple[Any, Any]:
        """Its arguments, with real tensors."""
        return tree_map_only(Meta, Meta.make, (self.args, self.kwargs))


def workspace(kernel: Kernel) -> int:
    """The bytes of the workspace that a layer of an LSTM leaves for its backward as its last result, of which torch's
    fake tensors have none. Zeros are computed once to learn it."""
    if kernel.key not in _WORKSPACES:
        args, kwargs = kernel.arguments()
        made = kernel.function(*args, **kwargs)[-1]
        _WORKSPACES[kernel.key] = 0 if made is None else made.nbytes
    return _WORKSPACES[kernel.key]


@torch.no_grad()
def temporaries(kernels: Iterable[Kernel]) -> dict[str, int]:
    """The bytes of temporary memory of kernels, by key; without those that were not executed, and of those that are
    `KNOWN` without executing them again."""
    kernels = [*kernels]
    new = [kernel for kernel in kernels if kernel.key not in KNOWN]
    known = {kernel.key: KNOWN[kernel.key] for kernel in kernels if kernel.key in KNOWN}
    return known | (_executed(new) if new else {})


def _executed(kernels: Iterable[Kernel]) -> dict[str, int]:
    scopes: dict[str, str] = {}
    level = LogLevel()
    level.errors_only()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    for kernel in kernels:
        if kernel.key not in scopes and kernel.bytes <= MOST:
            scope = scopes[kernel.key] = f"{_SCOPE}{len(scopes)}"
            args, kwargs = kernel.arguments()
            results = []  # released after the scope
            with record_function(scope), suppress(RuntimeError):  # the CPU may lack a kernel for types of a GPU
                results.append(kernel.function(*args, **kwargs))
            results.clear()
    profiler.stop()
    level.restore()
    changes = dict(_changes(taken(profiler)))
    return {key: _most(changes.get(scope, ())) for key, scope in scopes.items()}


def _changes(results: Any) -> Iterator[tuple[str, list[int]]]:
    """By scope, the bytes allocated (negative: released) in it, in order."""
    allocation = EVENT_TYPE.get().Allocation
    for event in KINETO_TREE.of(results)():
        if event.name.startswith(_SCOPE):
            found, rest = [], [*event.children]
            while rest:
                node = rest.pop()
                rest.extend(node.children)
                if node.tag == allocation:
                    found.append((node.start_time_ns, node.extra_fields.alloc_size))
            yield event.name, [size for _, size in sorted(found)]


def _most(changes: Iterable[int]) -> int:
    """The largest sum of allocated bytes, minus the bytes that are allocated at the end."""
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most - now


# ---- the caching allocator: the memory that the blocks of the first steps take, and what it reserves
#
# The sizes and rules are those of torch (c10/cuda/CUDACachingAllocator.cpp), with the default settings: blocks are
# multiples of 512 bytes; those of up to 1 MiB are cut from segments of 2 MiB, others from segments of 20 MiB, or of
# their own size in multiples of 2 MiB from 10 MiB on; the smallest free block that is large enough is taken; neighbours
# that are free are joined; each stream has blocks of its own. Segments that are returned to the driver are not
# replayed.

_MIB = 1 << 20
_BLOCK = 512
_SMALL = _MIB  # the largest allocation from a small segment
_SMALL_SEGMENT, _SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT, _MULTIPLE = 10 * _MIB, 2 * _MIB
WORKSPACE = 0

Change = tuple[int, int, int]  # an address, the bytes that are allocated there, negative if freed, and the stream


@dataclass(eq=False)
class Block:
    """A part of a segment of a pool, which is the stream and whether it is for small blocks; and its neighbours."""

    start: int
    size: int
    pool: tuple[int, bool]
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None


class Allocator:
    """Allocates and frees by address; `allocated` and `reserved` are bytes now."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._taken: dict[int, Block] = {}
        self._free: defaultdict[tuple[int, bool], list[tuple[int, int, Block]]] = defaultdict(list)  # by size and start

    def allocate(self, address: int, size: int, stream: int = 0) -> None:
        """Takes a block of at least `size` bytes of a stream."""
        size = _up(size, _BLOCK)
        small = size <= _SMALL
        free = self._free[stream, small]
        place = bisect_left(free, (size, -1), key=lambda entry: entry[:2])
        block = free.pop(place)[2] if place < len(free) else self._segment(size, (stream, small))
        rest = block.size - size
        if rest >= _BLOCK if small else rest > _SMALL:
            other = Block(block.start + size, rest, block.pool, True, block, block.after)
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            self._keep(other)
        block.is_free = False
        self._taken[address] = block
        self.allocated += block.size

    def free(self, address: int) -> None:
        """Gives back a block; an unknown address is ignored."""
        block = self._taken.pop(address, None)
        if block is None:
            return
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._free[block.pool].remove((other.size, other.start, other))
                block = _joined(*((other, block) if other.start < block.start else (block, other)))
        block.is_free = True
        self._keep(block)

    def _keep(self, block: Block) -> None:
        insort(self._free[block.pool], (block.size, block.start, block), key=lambda entry: entry[:2])

    def _segment(self, size: int, pool: tuple[int, bool]) -> Block:
        whole = _SMALL_SEGMENT if pool[1] else _SEGMENT if size < _OWN_SEGMENT else _up(size, _MULTIPLE)
        start, self.reserved = self.reserved, self.reserved + whole
        return Block(start, whole, pool)


def peaks(history: Iterable[Change], workspace: int) -> dict[str, int]:
    """The largest sum of blocks that are allocated at a time, and of segments,
    in the form of `AllocatorPeak` in `record/documents.py`.

    `WORKSPACE` in place of the bytes of a change stands for a workspace of cuBLAS, of `workspace` bytes.
    """
    allocator, allocated = Allocator(), 0
    for address, size, stream in history:
        if size == WORKSPACE:
            allocator.allocate(address, workspace, stream)
        elif size > 0:
            allocator.allocate(address, size, stream)
        else:
            allocator.free(address)
        allocated = max(allocated, allocator.allocated)
    return {"workspace": workspace, "allocated": allocated, "reserved": allocator.reserved}


def _joined(first: Block, second: Block) -> Block:
    first.size += second.size
    first.after = second.after
    if second.after:
        second.after.before = first
    return first


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
