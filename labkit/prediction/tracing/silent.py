"""A process group without communication: every collective is over at once, and leaves plausible values behind.

Ranks that share it with nobody run a script's real computation, with real tensors. What a rank would receive is made of
what it has: its own part in place of everyone's, or else small random numbers, so that no
computation meets uninitialised memory (denormal numbers, for example, are slow).

torch calls the methods of a group by different names in different versions; both are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work

from labkit.prediction.tracing.torch_private import WORLD

Tensors = Sequence[torch.Tensor]
Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]

_RECEIVED = 0.01  # standard deviation of random numbers


class Listener(Protocol):
    """Receives what a rank does with its process groups."""

    def started(self, op: str, size: int, ranks: list[int]) -> int:
        """An operation starts on `size` bytes, those of a `traffic` event: the whole tensor of an all-gather, a
        reduce-scatter or an all-to-all. `ranks` are those of the group, or the other end of a message. Returns the
        number of the operation."""

    def waited(self, number: int) -> None:
        """The script waits for an operation."""

    def paused(self) -> AbstractContextManager[None]:
        """What happens meanwhile is no part of the script's computation."""


class _Over(Work):
    """An operation that is over. It refers to its result until that is asked for or waited for: with memory that is
    never freed, every step would allocate new pages, which takes time."""

    def __init__(self, number: int, listener: Listener, result: Any):
        super().__init__()
        self._number, self._listener, self._result = number, listener, result

    def wait(self, timeout: Any = None) -> bool:
        self._listener.waited(self._number)
        self.forget()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        self.forget()
        return future

    def forget(self) -> None:
        """The result is not needed any more."""
        self._result = None


def _last(works: Sequence[_Over]) -> Work:
    """The last of some operations of a group: when it is over, so are the others."""
    for work in works[:-1]:
        work.forget()
    return works[-1]


class Silent(dist.ProcessGroup):
    """The group, as torch calls it."""

    def __init__(self, rank: int, size: int, listener: Listener):
        super().__init__(rank, size)
        self._listener = listener
        self._works: list[_Over] = []  # torch refers to some of them from C++ only

    def getBackendName(self) -> str:
        return "silent"

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return WORLD.get().pg_names[self]

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._starts("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._starts("broadcast", tensors, tensors)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._starts("reduce", tensors, tensors)

    def barrier(self, opts: Any = None) -> Work:
        return self._starts("barrier", [], [])

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._starts("all_gather", outputs[0], outputs, zip(outputs[0], repeat(inputs[0])))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Over:
        parts = output.view(-1).chunk(self.size())
        return self._starts("all_gather", [output], [output], zip(parts, repeat(tensor)))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return _last([self.all_gather_single(*pair) for pair in zip(outputs, inputs)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """As gloo does it: a copy of each part is all-reduced, one after the other."""
        parts = [part.clone() for part in inputs[0]]
        own = [(outputs[0], parts[self.rank()])]
        return _last([self._starts("all_reduce", [part], outputs, own) for part in parts])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Over:
        own = tensor.reshape(-1).chunk(self.size())[self.rank()]
        return self._starts("reduce_scatter", [tensor], [output], [(output, own)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return _last([self.reduce_scatter_single(*pair) for pair in zip(outputs, inputs)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._starts("all_to_all", inputs, outputs, zip(outputs, inputs))

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, *sizes: Any) -> Work:
        return self._starts("all_to_all", [tensor], [output], [(output, tensor)])

    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        return self._starts("send", tensors, tensors, peer=peer)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        self._fill(tensors)
        return self._starts("recv", tensors, tensors, peer=peer)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        if not inputs:
            self._fill(outputs)
        own = [(outputs[0], inputs[0][self.rank()])] if inputs else []
        return self._starts("scatter", outputs, outputs, own)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        parts = outputs[0] if outputs else []
        return self._starts("gather", inputs, outputs, zip(parts, repeat(inputs[0])))

    def _fill(self, tensors: Tensors) -> None:
        """Fills what comes from another rank."""
        with self._listener.paused(), torch.no_grad():
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.normal_(0, _RECEIVED)
                else:
                    tensor.fill_(1)  # pipeline stages vote with it, and agree

    def _starts(self, op: str, tensors: Tensors, result: Any, copies: Copies = (), peer: int | None = None) -> _Over:
        """An operation on `tensors`; `copies` are the outputs to fill, each with what it is filled with."""
        with self._listener.paused():
            for output, tensor in copies:
                count = min(output.numel(), tensor.numel())
                output.view(-1)[:count].copy_(tensor.reshape(-1)[:count])
            ranks = dist.get_process_group_ranks(self)
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            number = self._listener.started(op, size, ranks if peer is None else [ranks[peer]])
            self._works.append(_Over(number, self._listener, result))
        return self._works[-1]


def join(rank: int, ranks: int, listener: Listener) -> None:
    """From now on, `dist.init_process_group` creates this group, in which this process is rank `rank` of `ranks`."""

    def create(store: Any, group_rank: int, size: int, timeout: Any) -> Silent:
        return Silent(group_rank, size, listener)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original("silent", rank=rank, world_size=ranks, store=dist.HashStore())

    dist.Backend.register_backend("silent", create, devices=["cpu"])
    original, dist.init_process_group = dist.init_process_group, init_process_group
