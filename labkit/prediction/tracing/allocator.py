"""A replay of the CUDA caching allocator: the memory that the blocks of the first steps take, and what it reserves.

The sizes and rules are those of torch (c10/cuda/CUDACachingAllocator.cpp), with the default settings: blocks are
multiples of 512 bytes; those of up to 1 MiB are cut from segments of 2 MiB, others from segments of 20 MiB, or of their
own size in multiples of 2 MiB from 10 MiB on; the smallest free block that is large enough is taken; neighbours that
are free are joined; each stream has blocks of its own. Segments that are returned to the driver are not replayed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

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
        place = bisect_left(free, (size, -1), key=lambda one: one[:2])
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
        insort(self._free[block.pool], (block.size, block.start, block), key=lambda one: one[:2])

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
