"""A replay of the CUDA caching allocator: how much it rounds up and reserves for the allocations of a step.

The sizes and rules are those of torch (c10/cuda/CUDACachingAllocator.cpp), with the default settings: blocks are
multiples of 512 bytes; those of up to 1 MiB are cut from segments of 2 MiB, others from segments of 20 MiB, or of their
own size in multiples of 2 MiB from 10 MiB on; the smallest free block that is large enough is taken; neighbours that
are free are joined. Streams, and segments that are returned to the driver, are not replayed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MIB = 1 << 20
_BLOCK = 512
_SMALL = _MIB  # the largest allocation from a small segment
_SMALL_SEGMENT, _SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT, _MULTIPLE = 10 * _MIB, 2 * _MIB


@dataclass(eq=False)
class Block:
    """A part of a segment, and its neighbours."""

    start: int
    size: int
    is_small: bool
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None


class Allocator:
    """Allocates and frees by address; `rounded` and `reserved` are bytes now."""

    def __init__(self) -> None:
        self.rounded = self.reserved = 0
        self._taken: dict[int, Block] = {}
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size and start

    def allocate(self, address: int, size: int) -> None:
        """Takes a block of at least `size` bytes."""
        size = _up(size, _BLOCK)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, -1), key=lambda one: one[:2])
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= _BLOCK if small else rest > _SMALL:
            other = Block(block.start + size, rest, small, True, block, block.after)
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            self._keep(other)
        block.is_free = False
        self._taken[address] = block
        self.rounded += block.size

    def free(self, address: int) -> None:
        """Gives back a block; an unknown address is ignored."""
        block = self._taken.pop(address, None)
        if block is None:
            return
        self.rounded -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._free[block.is_small].remove((other.size, other.start, other))
                block = _joined(*((other, block) if other.start < block.start else (block, other)))
        block.is_free = True
        self._keep(block)

    def _keep(self, block: Block) -> None:
        insort(self._free[block.is_small], (block.size, block.start, block), key=lambda one: one[:2])

    def _segment(self, size: int, small: bool) -> Block:
        whole = _SMALL_SEGMENT if small else _SEGMENT if size < _OWN_SEGMENT else _up(size, _MULTIPLE)
        start, self.reserved = self.reserved, self.reserved + whole
        return Block(start, whole, small)


def overhead(before: Mapping[int, int], changes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Bytes that rounding adds at the peak of a step, and bytes reserved beyond the tensors at that peak.

    `before` has the sizes by address of what is allocated when the step begins, `changes` are addresses and bytes,
    negative if they are freed, in order.
    """
    allocator, tensors, peak, rounding = Allocator(), 0, 0, 0
    begin = [(address, size) for address, size in sorted(before.items()) if size > 0]
    for address, size in (*begin, *changes):
        tensors += size
        if size > 0:
            allocator.allocate(address, size)
        else:
            allocator.free(address)
        if tensors > peak:
            peak, rounding = tensors, allocator.rounded - tensors
    return rounding, allocator.reserved - peak


def _joined(first: Block, second: Block) -> Block:
    first.size += second.size
    first.after = second.after
    if second.after:
        second.after.before = first
    return first


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
