"""Records what an answer does on one rank: communication with its bytes, operations, and live memory.

Every call of torch passes the dispatcher, whichever name in Python it was called by; the recorder is a
`TorchDispatchMode` and therefore sees collectives (`c10d::…`), sends, receives and all computation of this thread,
including backward, in order. Waiting and the stores do not pass the dispatcher: `Work.wait` and the methods of `Store`
are replaced while recording.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from labkit.course.build.record import COMPUTE, OUTSIDE, START, STORE, WAIT, Event, Record
from labkit.record.stacks import wait_for_other_threads
from labkit.record.writer import sent

_UNPROFILED = 2  # steps before the probe begins to profile
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
_FUNCTIONAL = {  # operations of _c10d_functional, which DTensor calls: the name here; the input is what a rank has
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_OF_THIS_RANK = {"all_gather": 1}  # the argument that holds what a rank contributes, if it is not the payload
REDUCED = ("all_reduce", "reduce_scatter", "reduce")
_FINISHED = ("_c10d_functional", "_c10d_functional_autograd", "symm_mem")  # collectives that are written in C++
_SINGLE = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")  # since torch 2.13
_METHODS = (*(operation.removesuffix("_") for operation in _KNOWN), "recv_anysource", *_SINGLE)
_STORED = ("set", "get", "add", "append", "compare_set", "multi_set", "multi_get", "queue_push", "queue_pop")
_BACKEND = torch._C._distributed_c10d
_numel, _element_size = torch._C.TensorBase.numel, torch._C.TensorBase.element_size  # an answer may replace the names
_CPU_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *rest, **more: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda out, q, k, v, *rest, **more: (
        sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape)
    ),
}
_FREE = ("detach", "view", "t", "transpose", "expand", "slice", "split", "select", "unsqueeze", "squeeze", "as_strided")
_SYNCS = ("_local_scalar_dense", "equal", "nonzero", "masked_select")  # operators whose result the CPU has to wait for
_VIEWS = {*_FREE, "alias", "_unsafe_view", "permute", "chunk", "narrow", "unbind", "empty", "empty_like", "new_empty"}


class Recorder(TorchDispatchMode):
    """Records into `record` between `with recorder:`. `calls` counts everything that was dispatched: the progress.
    `intact` is called at each phase and each communication, and `product` with each matrix product; `answers` says
    whether the answer runs, and not the probe of its run. With `counts_functional` the answer may use DTensor: its
    collectives and what it does with its local tensors count."""

    def __init__(
        self,
        record: Record,
        intact: Callable[[], None] = lambda: None,
        answers: Callable[[], bool] = lambda: True,
        counts_functional: bool = False,
    ):
        super().__init__()
        self.record = record
        self._counts_functional = counts_functional
        self._wrappers = _wrappers() if counts_functional else ()
        self.calls = 0
        self.step, self.phase = OUTSIDE, START
        self.waits_for: int | None = None  # the index of the event whose end this rank waits for
        self.results: dict[str, torch.Tensor] = {}  # what the examiner compares with a single device
        self.product: Callable[[str, Any], None] = lambda name, args: None
        self._intact, self._answers = intact, answers
        self._group: dist.ProcessGroup | None = None  # of the call that Python makes
        self._works: dict[int, int] = {}  # by the id of a Work, the index of its event
        self._storages: dict[int, weakref.ref] = {}
        self._ignored: set[int] = set()
        self._peak: int | None = None  # while it is measured
        self._may_hold = False  # whether a thread of gloo may hold buffers of a collective that has been waited for
        self._resident = psutil.Process()
        self._before = (0, 0)  # bytes: resident set and live tensors when `rest` was called

    def __enter__(self) -> Recorder:
        self._replaced = contextlib.ExitStack()
        self._replace(_BACKEND.Work, "wait", self._waiting)
        for name in _METHODS:
            self._replace(_BACKEND.ProcessGroup, name, self._calling)
        for store in (_BACKEND.Store, _BACKEND.TCPStore, _BACKEND.FileStore, _BACKEND.HashStore, _BACKEND.PrefixStore):
            for name in _STORED:
                if name in vars(store):
                    self._replace(store, name, self._storing)
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
        self._intact()
        self.step, self.phase = before  # after an error, the phase says where it was raised

    def note(self, op: str, **fields: Any) -> None:
        """Adds an event of the trial itself, such as the forward of a micro-batch."""
        self.record.events.append(Event(op, self.step, self.phase, **fields))

    def synchronizes(self) -> None:
        """Counts a value of a tensor that Python gets."""
        self._count(self.record.syncs)

    # ---- results, which the examiner compares with those of a single device

    def keep_gradients(self, when: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The gradients of these tensors, with their names, are results `gradient of …`, such as of step 0."""
        for name, tensor in tensors:
            gradient = torch.zeros(()) if tensor.grad is None else tensor.grad
            self.results[f"gradient of {when}: {name}"] = gradient.clone()

    def keep_parameters(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """These tensors, with their names, are results `parameter …`."""
        for name, tensor in tensors:
            self.results[f"parameter {name}"] = tensor.detach()

    # ---- memory

    def watch(self, *tensors: torch.Tensor) -> None:
        """Counts the memory of tensors that exist already, such as the parameters of a model."""
        for tensor in tensors:
            if tensor.is_meta:  # it has a size, but no memory
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._ignored:
                self._storages[storage._cdata] = weakref.ref(storage)

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Does not count tensors that exist already and stay, such as the samples of a rank, nor views of them."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def live(self) -> int:
        """Bytes of all watched tensors, and of those created while recording, that still exist."""
        alive = {key: storage for key, reference in self._storages.items() if (storage := reference()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def live_at_rest(self) -> int:
        """`live()` when the threads of gloo have released the buffers of finished collectives."""
        wait_for_other_threads()
        self._may_hold = False
        return self.live()

    def rest(self) -> None:
        """The process is as large as it is without an answer: later growth is the answer's."""
        self._before = self._resident.memory_info().rss, self.live()

    def remember(self, moment: str, count: float) -> None:
        """Adds the bytes of a moment to the record, once per step or once."""
        self.record.memory.setdefault(moment, []).append(count)

    def remember_process(self, moment: str, step: int) -> None:
        """Adds what the process has grown since `rest`, beyond the tensors of torch, in bytes. In an ordinary run,
        whose probe profiles a later step and needs memory for that, only in the first steps."""
        if step >= _UNPROFILED and any(name.startswith("labkit.probe") for name in sys.modules):
            return
        resident, live = self._before
        grown = self._resident.memory_info().rss - resident - (self.live() - live)
        self.record.process.setdefault(moment, []).append(grown)

    def peak_since(self, function: Callable[[], Any]) -> tuple[int, Any]:
        """The largest `live()` during `function()`, and what it returns."""
        self._peak = self.live()
        result = function()
        peak, self._peak = self._peak, None
        return peak, result

    # ---- calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if any(issubclass(kind, self._wrappers) for kind in types):
            return NotImplemented  # the wrapper comes first, and calls the operation on the tensors inside
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name in _KNOWN:
            self._communicates(*_KNOWN[name], args)
        elif self._counts_functional and space == "_c10d_functional":
            if name in _FUNCTIONAL:
                self._communicates_functionally(_FUNCTIONAL[name], args)
        elif space in _FINISHED:
            self.record.finished_api = self.record.finished_api or f"torch.ops.{space}.{name}"
        out = func(*args, **(kwargs or {}))
        if space != "c10d":
            self._count(self.record.operators)
            if name in _SYNCS and self._answers():
                self.synchronizes()
            self._computes(func, name, args, kwargs or {}, out)
            self.watch(*_tensors(out))
        if self._peak is not None and (live := self.live()) > self._peak:
            self._peak = max(self._peak, self.live_at_rest() if self._may_hold else live)
        return out

    def _computes(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if name == "from_file":
            self.record.forbidden = self.record.forbidden or "maps a file into memory (torch.from_file)"
        formula = _CPU_ATTENTION.get(name) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = formula(*args, **kwargs) if name in _CPU_ATTENTION else formula(*args, **kwargs, out_val=out)
            self.note(COMPUTE, flops=int(flops))
            self.product(name, args)
        elif name not in _VIEWS:
            count = max(sum(map(_numel, _tensors(out))), sum(map(_numel, _tensors(args))))
            self._count(self.record.elements, count)

    def _count(self, counts: dict[str, int], count: int = 1) -> None:
        """Adds to what the record counts by step and phase."""
        key = f"{self.step} {self.phase}"
        counts[key] = counts.get(key, 0) + count

    def _communicates(self, name: str, payload: int, args: Any) -> None:
        self._intact()
        among = None if self._group is None else _ranks_of(self._group)
        size = dist.get_world_size() if self._group is None else self._group.size()
        count = sum(_numel(tensor) * _element_size(tensor) for tensor in _tensors(args[payload]))
        peer = next((argument for argument in args[1:] if type(argument) is int), None) if name in _PEERS else None
        if among and peer is not None:
            peer = among[peer]
        contributed = list(_tensors(args[_OF_THIS_RANK.get(name, payload)]))
        self._sends(name, count, size, contributed, peer, among)

    def _communicates_functionally(self, name: str, args: Any) -> None:
        self._intact()
        group = args[-1]
        size = (dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group).size()
        contributed = list(_tensors(args[0]))
        count = sum(_numel(tensor) * _element_size(tensor) for tensor in contributed)
        self._sends(name, count * size if name == "all_gather" else count, size, contributed)

    def _sends(
        self,
        name: str,
        count: int,
        size: int,
        contributed: list[torch.Tensor],
        peer: int | None = None,
        among: list[int] | None = None,
    ) -> None:
        """Notes an operation with a payload of `count` bytes in a group of `size` ranks."""
        moved = sent("send" if name == "gather" else name, count, size)
        fields: dict[str, Any] = {"sent": moved, "peer": peer, "among": among}
        if moved:
            elements = sum(map(_numel, contributed))
            zeros = elements - sum(int(torch.count_nonzero(tensor)) for tensor in contributed)
            fields["zeros"] = moved * zeros / max(elements, 1)
            if name in REDUCED:
                squares = sum(float(tensor.detach().double().square().sum()) for tensor in contributed)
                fields["squares"] = squares if math.isfinite(squares) else -1.0
        self.note(name, **fields)

    # ---- what Python calls

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            replacement = make(original)
            replacement.__name__ = name
            setattr(owner, name, replacement)
            self._replaced.callback(setattr, owner, name, original)

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            index, self._group = len(self.record.events), group
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._group = None
            self._works[id(work)] = index
            return work

        return call

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self.waits_for = self._works.get(id(work))
            self.note(WAIT, of=self.waits_for)
            result = original(work, *args, **kwargs)
            self.waits_for, self._may_hold = None, True
            self.calls += 1
            return result

        return wait

    def _storing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(store, *args, **kwargs)
            values = [*args, *kwargs.values(), result]
            self.note(STORE, sent=float(sum(len(value) for value in _strings(values))))
            return result

        return call


def _wrappers() -> tuple[type, ...]:
    """The tensors that wrap others: those of a mesh, and results of collectives that nothing has waited for yet."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor


def _ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """The ranks of a group; None for that of all ranks, and for one that torch has not made."""
    with contextlib.suppress(KeyError):
        ranks = dist.get_process_group_ranks(group)
        return ranks if len(ranks) < dist.get_world_size() else None
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _strings(value: Any) -> Iterator[str | bytes]:
    if isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
