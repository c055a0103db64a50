"""Records what an answer does on one rank: communication with its bytes, matrix products, and live memory.

Every call of torch passes the dispatcher, whichever name in Python it was called by; the recorder is a
`TorchDispatchMode` and therefore sees collectives (`c10d::…`), sends, receives and all computation of this thread,
including backward, in order. Waiting does not pass the dispatcher: `Work.wait` is replaced while recording.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.course.build.record import COMPUTE, OUTSIDE, START, WAIT, Event, Record
from labkit.record.writer import sent

_COUNTS, _BETWEEN_COUNTS = 10, 0.005  # of live memory at rest; seconds
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_PEERS = ("send", "recv", "broadcast", "reduce", "gather", "scatter")  # with a rank after the group
_KNOWN = {  # operation of the dispatcher: its name here, and the argument that holds the payload of the ring
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "reduce_": ("reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", 0),
}
_FINISHED = ("_c10d_functional", "_c10d_functional_autograd", "symm_mem")  # collectives that are written in C++
_METHODS = (*(operation.removesuffix("_") for operation in _KNOWN), "recv_anysource")


class Recorder(TorchDispatchMode):
    """Records into `record` between `with recorder:`. `calls` counts everything that was dispatched: the progress."""

    def __init__(self, record: Record):
        super().__init__()
        self.record = record
        self.calls = 0
        self.step, self.phase = OUTSIDE, START
        self.waits_for: int | None = None  # the index of the event whose end this rank waits for
        self._thread = threading.get_ident()
        self._group_size: int | None = None
        self._works: dict[int, int] = {}  # by the id of a Work, the index of its event
        self._storages: dict[int, weakref.ref] = {}
        self._peak: int | None = None  # while it is measured

    def __enter__(self) -> Recorder:
        self._replaced = contextlib.ExitStack()
        backend = torch._C._distributed_c10d
        self._replace(backend.Work, "wait", self._waiting)
        for name in _METHODS:
            self._replace(backend.ProcessGroup, name, self._calling)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._replaced.close()

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Everything inside belongs to this phase of this step (default: the current one)."""
        before = self.step, self.phase
        self.step, self.phase = self.step if step is None else step, phase
        yield
        self.step, self.phase = before  # after an error, the phase says where it was raised

    def note(self, op: str, **fields: Any) -> None:
        """Adds an event of the trial itself, such as the forward of a micro-batch."""
        self.record.events.append(Event(op, self.step, self.phase, **fields))

    # ---- memory

    def watch(self, *tensors: torch.Tensor) -> None:
        """Counts the memory of tensors that exist already, such as the parameters of a model."""
        for tensor in tensors:
            if tensor.is_meta:  # it has a size, but no memory
                continue
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)

    def live(self) -> int:
        """Bytes of all watched tensors, and of those created while recording, that still exist."""
        found = {key: storage for key, reference in self._storages.items() if (storage := reference()) is not None}
        self._storages = {key: self._storages[key] for key in found}
        return sum(storage.nbytes() for storage in found.values())

    def live_at_rest(self) -> int:
        """`live()` after the threads of gloo have released the buffers of finished collectives, which they do shortly
        after a rank continues: the smallest of several counts."""
        least = self.live()
        for _ in range(_COUNTS):
            time.sleep(_BETWEEN_COUNTS)
            least = min(least, self.live())
        return least

    def remember(self, moment: str, count: float) -> None:
        """Adds the bytes of a moment to the record, once per step or once."""
        self.record.memory.setdefault(moment, []).append(count)

    def peak_since(self, function: Callable[[], Any]) -> tuple[int, Any]:
        """The largest `live()` during `function()`, and what it returns."""
        self._peak = self.live()
        result = function()
        peak, self._peak = self._peak, None
        return peak, result

    # ---- calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        name = func._schema.name.partition("::")
        if name[0] == "c10d" and name[2] in _KNOWN:
            self._communicates(*_KNOWN[name[2]], args)
        elif name[0] in _FINISHED:
            self.record.finished_api = self.record.finished_api or f"torch.ops.{name[0]}.{name[2]}"
        out = func(*args, **(kwargs or {}))
        if name[2] in _PRODUCTS:
            *_, left, right = (argument for argument in args if isinstance(argument, torch.Tensor))
            self.note(COMPUTE, flops=2 * left.numel() * right.shape[-1])
        if name[0] != "c10d":
            self.watch(*_tensors(out))
        if self._peak is not None:
            self._peak = max(self._peak, self.live())
        return out

    def _communicates(self, name: str, payload: int, args: Any) -> None:
        size = self._group_size or dist.get_world_size()
        count = sum(tensor.nbytes for tensor in _tensors(args[payload]))
        peer = next((argument for argument in args[1:] if type(argument) is int), None) if name in _PEERS else None
        self.note(name, sent=sent("send" if name == "gather" else name, count, size), peer=peer)

    # ---- what Python calls

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, functools.wraps(original)(make(original)))
            self._replaced.callback(setattr, owner, name, original)

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                raise RuntimeError("communication from other threads is not recorded: use the main thread")
            index, self._group_size = len(self.record.events), group.size()
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._group_size = None
            self._works[id(work)] = index
            return work

        return call

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self.waits_for = self._works.get(id(work))
            self.note(WAIT, of=self.waits_for)
            result = original(work, *args, **kwargs)
            self.waits_for = None
            self.calls += 1
            return result

        return wait


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
