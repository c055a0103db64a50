"""What a rank computes and sends in a traced step, in order: of each kernel its FLOPs and the bytes that it reads and
writes, each collective, and where its result is needed.

- A kernel reads its arguments and writes its results once; views and allocations cost nothing. The rows that a lookup
  reads are as large as its result.
- The result of a collective is needed by the first kernel that uses it, or at once, if the script waits for it.
- On a GPU the host runs ahead. A collective in a separate stream (FSDP) therefore starts as soon as its input is
  computed and the result of the one before it is in use, which is the implicit prefetch of FSDP; a kernel in such a
  stream passes on what it waits for.
- torch's optimizers update all parameters of a GPU together (foreach): equal operations of an optimizer are one kernel.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch

from labkit.prediction.tracing.kernels import is_kernel
from labkit.prediction.tracing.torch_private import SCHEMA, TREE_ITER

tree_iter = TREE_ITER.get()
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # of others: fp32
_LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
_MESSAGES = ("send", "recv")

Addressed = list[tuple[int, torch.Tensor]]  # tensors with the addresses of their storages
Started = tuple[str, int, tuple[int, ...]]  # operation, bytes, and the ranks of the group or the other end


class _Kernel(NamedTuple):
    time: int
    name: str
    type: str
    flops: int
    bytes: int


class Work:
    """The record of a step. `on_gpu`: the script is written for GPUs, which it does not have here."""

    def __init__(self, on_gpu: bool = False):
        self.on_gpu = on_gpu
        self._stream = torch.cpu.current_stream()
        self._items: list[tuple[int, int, Any]] = []  # place in the program, number, kernel or item
        self._needed: dict[int, set[int]] = {}  # by address, the collectives that write it
        self._computed: dict[int, int] = {}  # by address, the number of the item that computes it
        self._used: dict[tuple[Any, ...], int] = {}  # by operation and group, the number of the last wait
        self._calls: list[tuple[Any, ...]] = []  # operation and group by number of the collective

    def operation(self, time: int, func: Any, flops: int, read: Addressed, written: Addressed) -> None:
        """An operation on local tensors."""
        if not is_kernel(func):
            return
        numbers = self._needed_by((*read, *written))
        if numbers and self._is_aside:
            for address, _ in written:
                self._needed.setdefault(address, set()).update(numbers)
        else:
            self._wait(numbers)
        name = SCHEMA.of(func).name
        size = sum(map(_bytes, written))
        size += size if name in _LOOKUPS else sum(map(_bytes, read))
        kind = next((_TYPES.get(tensor.dtype, "fp32") for _, tensor in read), "fp32")
        before = max((self._computed.get(address, 0) for address, _ in read), default=0)
        self._append(_Kernel(time, name, kind, flops, size))
        for address, _ in written:
            self._computed[address] = before if self._is_aside else len(self._items)

    def start(self, func: Any, args: Any, call: Started, read: Addressed, written: Addressed) -> None:
        """A collective or message starts."""
        op, _, ranks = call
        number, key = len(self._calls), (op, ranks)
        self._calls.append(key)
        place = None
        if self.on_gpu and self._is_aside:
            ready = [self._computed.get(address, 0) for address, _ in read]
            place = max([self._used.get(key, 0), *ready])
        self._append(["start", number, *call], place)
        if op == "send":
            return
        for address, _ in written:
            self._needed.setdefault(address, set()).add(number)
        if _is_synchronous(func, args) and not (self.on_gpu and self._is_aside):
            self._wait({number})

    def wait(self, tensors: Addressed) -> None:
        """The script waits for the collectives that write some tensors."""
        if not self._is_aside:
            self._wait(self._needed_by(tensors))

    def _needed_by(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> set[int]:
        return {number for address, _ in tensors for number in self._needed.get(address, ())}

    @property
    def stream(self) -> int:
        """A number of the current stream; 0 for that of the script."""
        current = torch.cpu.current_stream()
        return 0 if current is self._stream else id(current)

    @property
    def _is_aside(self) -> bool:
        return self.stream != 0

    def _append(self, item: Any, place: int | None = None) -> None:
        number = len(self._items) + 1
        self._items.append((number if place is None else place, number, item))

    def _wait(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            self._append(["wait", number])
            self._used[self._calls[number]] = len(self._items)
        if numbers:
            for found in self._needed.values():
                found -= numbers

    def program(self, spans: list[tuple[str, int, int]]) -> list[Any]:
        """The program of the step with these phases, in the form of `compute`; in place of the seconds of a
        computation stand its kernels, as [type, FLOPs, bytes, number of them]."""
        begins = [first for _, first, _ in spans]

        def phase_of(one: tuple[int, int, Any]) -> str:
            item = one[2]
            return spans[max(0, bisect_right(begins, item.time) - 1)][0] if isinstance(item, _Kernel) else ""

        found: list[Any] = []
        for phase, items in groupby(sorted(self._items, key=lambda one: one[:2]), phase_of):
            if phase:
                together = self.on_gpu and phase == "optimizer"
                found.append(["compute", phase, _counted([item for *_, item in items], together)])
            else:
                found += [item for *_, item in items]
        return found


def _counted(kernels: list[_Kernel], together: bool) -> list[list[Any]]:
    if together:
        ordered = sorted(kernels, key=lambda one: (one.name, one.type))
        sums = [[*group] for _, group in groupby(ordered, lambda one: (one.name, one.type))]
        return [[g[0].type, sum(one.flops for one in g), sum(one.bytes for one in g), 1] for g in sums]
    return [[*key, count] for key, count in Counter(one[2:] for one in kernels).items()]


def _bytes(one: tuple[int, torch.Tensor]) -> int:
    """Those of a tensor; an expanded one has no more than its storage."""
    return min(one[1].numel() * one[1].element_size(), one[1].untyped_storage().nbytes())


def _is_synchronous(func: Any, args: Any) -> bool:
    """Whether the script waits for a collective as soon as it has started it."""
    place = _place_of_async(func)
    return place is not None and len(args) > place and not args[place]


@cache
def _place_of_async(func: Any) -> int | None:
    names = [argument.name.lower().replace("_", "") for argument in SCHEMA.of(func).arguments]
    return names.index("asyncop") if "asyncop" in names else None
