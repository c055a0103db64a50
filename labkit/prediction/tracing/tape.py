"""The tape: every allocation, release and collective of a traced step, in order.

Time on the tape is the number of operations so far, in units of `OPERATION`, so that a memory curve, whose times are
nanoseconds, shows an operation as a second. The tape is a dispatch mode above torch's fake tensor mode, so it
sees each operation on local tensors after autograd and after DTensor, as the memory tracker of torch
(`MemTracker`) does. A storage counts with its size in bytes from the operation that creates
it until Python or C++ releases its last reference, or until it is resized (FSDP frees gathered parameters like this).
"""

from __future__ import annotations

import math
import traceback
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from labkit.prediction.tracing.kernels import WORKSPACE, Change, Kernel, is_kernel, workspace
from labkit.prediction.tracing.torch_private import (
    DISPATCH_MODE,
    FAKE_TENSOR,
    GRAPH_TASK,
    GROUP_OF,
    NO_VALUES,
    READ_NUMBER,
    SCHEMA,
    TREE_ITER,
    WAIT,
    WITHOUT_MODES,
)
from labkit.prediction.tracing.world import batch, load
from labkit.probe.memory import Census
from labkit.probe.timeline import Allocation
from labkit.probe.traffic import operation

# ---- floating-point operations (FLOPs) of a traced step: matrix products, convolutions and attention, by the formulas
# of torch's own counter (`torch.utils.flop_counter`)
#
# A multiplication and an addition are two; a causal mask saves nothing.
#
# What a backward pass computes a second time is counted apart: blocks with activation checkpointing, and the scores of
# attention, which fused kernels do not store. Such a block runs in backward with gradients enabled. So does a backward
# pass that is itself differentiated (`create_graph`), whose FLOPs therefore also count as recomputed.

_NONE = -1  # the number of the backward pass outside of one


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# torch's counter has no formula for the kernels of a CPU, on which every trace runs
_FORWARD, _BACKWARD = (
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}", None) for end in ("", "_backward")
)
FORMULAS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {**flop_registry, _FORWARD: _attention, _BACKWARD: _attention_backward}
)


class Flops:
    """The FLOPs of a rank: all that it `executed`, and how many of them were `recomputed`."""

    def __init__(self) -> None:
        self.executed = self.recomputed = 0

    def add(self, function: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Counts an operation on local tensors, and returns its FLOPs."""
        formula = FORMULAS.get(function.overloadpacket)
        if formula is None:
            return 0
        count = int(formula(*args, **kwargs, out_val=result))
        self.executed += count
        if torch.is_grad_enabled() and GRAPH_TASK.get()() != _NONE:
            self.recomputed += count
        elif function.overloadpacket is _BACKWARD:
            self.recomputed += _scores(args[1], args[2])
        return count


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    """FLOPs of the scores of attention."""
    return 2 * math.prod(query.shape) * key.shape[-2]


class _Counter(DISPATCH_MODE.get()):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.flops = Flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops.add(func, args, kwargs or {}, result)
        return result


def of_a_sample(path: str, source: str, sample: Any) -> int:
    """The FLOPs that the model of a script for one device needs for forward and backward of one sample of a shape,
    without what it recomputes. To be called under fake tensors."""
    script = load(path, source)
    inputs, targets = batch(script, sample, 1).tensors
    model = torch.nn.Sequential(*script.build_blocks())
    with _Counter() as counter:
        cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    return counter.flops.executed - counter.flops.recomputed


# ---- what a rank computes and sends in a traced step, in order: of each kernel its FLOPs and the bytes that it reads
# and writes, each collective, and where its result is needed
#
# - A kernel reads its arguments and writes its results once; views and allocations cost nothing. The rows that a lookup
#   reads are as large as its result.
# - The result of a collective is needed by the first kernel that uses it, or at once, if the script waits for it.
# - On a GPU the host runs ahead. A collective in a separate stream (FSDP) therefore starts as soon as its input is
#   computed and the result of the one before it is in use, which is the implicit prefetch of FSDP; a kernel in such a
#   stream passes on what it waits for.
# - torch's optimizers update all parameters of a GPU together (foreach): equal operations of an optimizer are one
#   kernel.

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # of others: fp32
_LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")

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
            for needed in self._needed.values():
                needed -= numbers

    def program(self, spans: list[tuple[str, int, int]]) -> list[Any]:
        """The program of the step with these phases, in the form of `compute`; in place of the seconds of a
        computation stand its kernels, as [type, FLOPs, bytes, number of them]."""
        begins = [first for _, first, _ in spans]

        def phase_of(entry: tuple[int, int, Any]) -> str:
            item = entry[2]
            return spans[max(0, bisect_right(begins, item.time) - 1)][0] if isinstance(item, _Kernel) else ""

        found: list[Any] = []
        for phase, items in groupby(sorted(self._items, key=lambda entry: entry[:2]), phase_of):
            if phase:
                together = self.on_gpu and phase == "optimizer"
                found.append(["compute", phase, _counted([item for *_, item in items], together)])
            else:
                found += [item for *_, item in items]
        return found


def _counted(kernels: list[_Kernel], together: bool) -> list[list[Any]]:
    if together:
        ordered = sorted(kernels, key=lambda kernel: (kernel.name, kernel.type))
        sums = [[*group] for _, group in groupby(ordered, lambda kernel: (kernel.name, kernel.type))]
        return [[g[0].type, sum(kernel.flops for kernel in g), sum(kernel.bytes for kernel in g), 1] for g in sums]
    return [[*key, count] for key, count in Counter(kernel[2:] for kernel in kernels).items()]


def _bytes(operand: tuple[int, torch.Tensor]) -> int:
    """Those of a tensor; an expanded one has no more than its storage."""
    return min(operand[1].numel() * operand[1].element_size(), operand[1].untyped_storage().nbytes())


def _is_synchronous(func: Any, args: Any) -> bool:
    """Whether the script waits for a collective as soon as it has started it."""
    place = _place_of_async(func)
    return place is not None and len(args) > place and not args[place]


@cache
def _place_of_async(func: Any) -> int | None:
    names = [argument.name.lower().replace("_", "") for argument in SCHEMA.of(func).arguments]
    return names.index("asyncop") if "asyncop" in names else None


tree_iter = TREE_ITER.get()
_READS, _WAIT = READ_NUMBER.get(), WAIT.get()
_DEVICE, _FAKE = torch.ops.prim.device.default, FAKE_TENSOR.get()
_COLLECTIVES = "c10d::", "_c10d_functional::"
_COPIED = "all_gather", "reduce_scatter"  # by gloo, which works on a copy of the whole tensor
_EQUAL = torch.ops.aten.equal.default
_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_BY_CUBLAS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv", "aten::dot"),
    *("aten::convolution", "aten::convolution_backward"),
)
_LSTM = "aten::mkldnn_rnn_layer"
_NO_TASK = -1
_OF_HOST = "aten::lift_fresh.default"  # of torch.tensor
_INDICES = ("aten::randint", "aten::randperm", "aten::arange")

OPERATION = 1_000_000_000


# ---- the tape


@dataclass(frozen=True)
class Call:
    """A collective: the operation, the bytes of its payload as in a `traffic` event, the number of ranks of its
    group, and of tensors that it is split into; `peers` are the ranks of the group, or the other end of a message."""

    op: str
    bytes: int
    ranks: int
    parts: int
    peers: tuple[int, ...]


def called(func: Any, args: Any) -> Call | None:
    """The collective that an operation of torch's distributed package starts; None if it starts none."""
    name = SCHEMA.of(func).name.split("::")[1].rstrip("_")
    op = operation(name)
    if "wait" in op or "monitored" in op:
        return None
    group = next((value for value in args if isinstance(value, (torch.ScriptObject, dist.ProcessGroup))), None)
    functional = group is None  # its arguments are a tensor, numbers and the name of the group
    group = GROUP_OF.get()(args[-1]) if functional else dist.ProcessGroup.unbox(group)
    ranks = group.size()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tree_iter(args) if isinstance(tensor, torch.Tensor))
    if functional:
        size *= ranks if op == "all_gather" else 1
    elif op in ("all_gather", "reduce_scatter"):  # outputs and inputs: the whole, and one share of it
        size = size * ranks // (ranks + 1)
    elif op == "all_to_all":
        size //= 2
    peers = _members(group)
    if name in ("send", "recv"):
        peers = (peers[args[2]],)
    return Call(op, size, ranks, ranks if name == "reduce_scatter" else 1, peers)


@cache
def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of a group, which all of its collectives share: there may be thousands."""
    return tuple(dist.get_process_group_ranks(group))


class Tape(DISPATCH_MODE.get()):
    """Records while it is active; `restart` forgets what it has recorded, except what is still allocated. Kernels and
    `work` are recorded if `keeps_kernels` is set; `on_gpu` is as for `Work`. Integers are computed if
    `computes_numbers` is set, because scripts read positions in their data from them; all other tensors have no data.

    A script that reads an integer without data gets `number`; `first_read` is where it was first, if it was.

    `changes`, in the form of `allocator.peaks`, has everything since the first `restart`; `history` the same
    except `elsewhere`, the addresses of tensors in host memory. On a GPU, the two threads that compute products, the
    script's and that of backward, each keep a workspace of cuBLAS from their first product on; numbers that optimizers
    count with are on the host.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()
        self.time = 0
        self.work = Work(on_gpu)
        self.keeps_kernels = self.computes_numbers = False
        self.number = 1
        self.first_read: traceback.StackSummary | None = None
        self.allocations: list[Allocation] = []
        self.calls: list[Call] = []
        self.flops = Flops()
        self.kernels: list[tuple[int, Kernel]] = []  # by time
        self.elsewhere: set[int] = set()
        self.changes: list[Change] = []
        self._has_begun = False
        self._workspaces: set[int] = set()
        self.scopes: list[str] = []  # names of open `record_function` contexts
        self._addresses: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._last = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is _FAKE:  # most calls by far
            self.time += OPERATION + 1
            return args[0].fake_device
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and calls the operation on its local tensors
        computes = self.computes_numbers and _has_numbers(func, args, kwargs or {})
        if func in (_READS, _EQUAL) and not computes:
            return self._read(func, args[0])
        if func is _WAIT:
            self.work.wait(self._known(args[0]))
            return args[0]  # the fake kernel would return a copy
        result = _executed(func, args, kwargs or {}, computes)
        self.time += OPERATION
        flops = self.flops.add(func, args, kwargs or {}, result)
        if self.keeps_kernels and (kernel := Kernel.of(func, args, kwargs, result)):
            self.kernels.append((self.time, kernel))
        name = _name(func)
        call = called(func, args) if name.startswith(_COLLECTIVES) else None
        if call:
            self.calls.append(call)
            if not self.work.on_gpu and call.op in _COPIED:
                self.needs(self.time, call.bytes, (name,))
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.address(tensor, name)
        if SCHEMA.of(func).name in _BY_CUBLAS:
            self._takes_workspace()
        if self.keeps_kernels:
            read, written = self._known(args, kwargs), self._known(result)
            if not written or name.startswith(_COLLECTIVES[0]):  # outputs are arguments
                written = self._known((kwargs or {}).get("out", args[:1]))
            if call:
                self.work.start(func, args, (call.op, call.bytes, call.peers), read, written)
            else:
                self.work.operation(self.time, func, flops, read, written)
        self.time += 1  # what is released from now on was allocated together with the result
        return result

    def _read(self, func: Any, tensor: torch.Tensor) -> Any:
        """What a script reads from a tensor without data. Raises the error of torch for a bool that is not known: it
        decides what the script does next."""
        if func is _EQUAL:
            return True
        if self.computes_numbers and tensor.dtype == torch.bool and getattr(tensor, "constant", None) is None:
            raise NO_VALUES.get()(func)
        value = _value(tensor, self.number)
        if self.first_read is None and value == self.number and not tensor.dtype.is_floating_point:
            self.first_read = traceback.extract_stack()
        return value

    def restart(self) -> None:
        """Begins a new record."""
        self.allocations, self.calls, self.kernels, self.flops = [], [], [], Flops()
        self.work = Work(self.work.on_gpu)
        if not self._has_begun:
            self._has_begun = True
            self.changes += [(address, self._sizes[address], 0) for address in sorted(self._sizes)]

    @property
    def history(self) -> list[Change]:
        """What was allocated and freed, in order."""
        return [change for change in self.changes if change[0] not in self.elsewhere]

    def _takes_workspace(self) -> None:
        thread = -1 if GRAPH_TASK.get()() == _NO_TASK else -2
        if thread not in self._workspaces:
            self._workspaces.add(thread)
            self.changes.append((thread, WORKSPACE, 0))

    def needs(self, time: int, size: int, inside: tuple[str, ...] = ()) -> None:
        """The operation at a time on the tape allocates and releases `size` more bytes."""
        self._last += 1
        self.allocations += Allocation(time, self._last, size, inside), Allocation(time + 1, self._last, -size)

    @contextmanager
    def in_other_processes(self) -> Iterator[None]:
        """Other processes do what is done here: of its allocations only those count that are left at its end."""
        first = len(self.allocations)
        yield
        self.allocations[first:] = [
            allocation for allocation in self.allocations[first:] if allocation.address in self._sizes
        ]

    def mark(self) -> int:
        """A time after everything so far, and before everything that follows."""
        self.time += 2
        return self.time

    @property
    def allocated(self) -> dict[int, int]:
        """Bytes by address of everything that is allocated now."""
        return dict(self._sizes)

    def allocated_at(self, address: int) -> int:
        """The bytes that are allocated at an address."""
        return self._sizes.get(address, 0)

    def address(self, tensor: torch.Tensor, name: str = "") -> int:
        """A number that identifies the tensor's storage; a storage that is seen for the first time is recorded as
        allocated by the operation `name`; on the meta device it has no memory."""
        storage = tensor.untyped_storage()
        known = self._addresses.get(storage)
        if known is None:
            self._last += 1
            known = self._addresses[storage] = self._last
            weakref.finalize(storage, self._resized, known, 0)
            is_number = self.work.on_gpu and name == _OF_HOST and not tensor.dim()
            self._resized(known, 0 if is_number or tensor.device.type == "meta" else storage.nbytes(), name)
        return known

    def _known(self, *values: Any) -> list[tuple[int, torch.Tensor]]:
        """The tensors among some values, with the addresses of their storages, 0 if it has none."""
        found = (getattr(tensor, "elem", tensor) for tensor in tree_iter(values) if isinstance(tensor, torch.Tensor))
        return [(self._addresses.get(tensor.untyped_storage(), 0), tensor) for tensor in found]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now; 0 if it was freed."""
        known = self._addresses.get(storage)
        if known is not None:
            self._resized(known, storage.nbytes())

    def _resized(self, address: int, size: int, name: str = "") -> None:
        before = self._sizes.pop(address, 0)
        if size:
            self._sizes[address] = size
        if before == size:
            return
        inside = (*([name] if name else []), *reversed(self.scopes))
        changes = [change for change in (-before, size) if change]
        self.allocations += [Allocation(self.time, address, change, inside) for change in changes]
        if self._has_begun:
            self.changes += [(address, change, self.work.stream) for change in changes]


@cache
def _name(func: Any) -> str:
    return str(func).replace(".", "::", 1)


def _has_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is on integers with data only, or makes them; `torch.load` makes some without data."""
    given = [tensor for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)]
    if given:
        return all(
            type(tensor) is torch.Tensor and tensor.dtype in _NUMBERS and tensor.device.type == "cpu"
            for tensor in given
        )
    if kwargs.get("device") == torch.device("meta"):
        return False
    return SCHEMA.of(func).name.startswith(_INDICES) or kwargs.get("dtype") in _NUMBERS


def _executed(func: Any, args: Any, kwargs: Any, computes: bool) -> Any:
    """The result of an operation, with data if it `computes` numbers."""
    with WITHOUT_MODES.get()() if computes else nullcontext():
        result = func(*args, **kwargs)
    if SCHEMA.of(func).name == _LSTM and (kernel := Kernel.of(func, args, kwargs, result)):
        with WITHOUT_MODES.get()():
            size = workspace(kernel)
        result = (*result[:-1], result[-1].new_empty(size))
    return result


def _value(tensor: torch.Tensor, number: int) -> Any:
    """What a script reads from a tensor without data: a constant of the script has its value, no flag is set (overflow,
    not finite), an integer is `number`, and other numbers are 1, which can be a divisor."""
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        with WITHOUT_MODES.get()():
            return constant.item()
    kind = tensor.dtype
    if kind in (torch.bool, torch.uint8):
        return False
    return 1.0 if kind.is_floating_point else number


class TapeCensus(Census):
    """Counts the storages of fake tensors by their addresses on the tape."""

    def __init__(self, tape: Tape):
        super().__init__(torch.device("cpu"))
        self._tape = tape

    def _storage(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None or tensor.device.type != self._type:
            return 0, 0
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        address = self._tape.address(own)
        return address, self._tape.allocated_at(address)


def scoped(tape: Tape) -> Iterator[tuple[type, str, Any]]:
    """Replacements for methods of torch that tell the tape about resized storages and named scopes, as (class, name,
    function)."""
    resize = torch.UntypedStorage.resize_
    scope = torch.autograd.profiler.record_function
    enter, leave = scope.__enter__, scope.__exit__

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tape.resized(storage)
        return result

    def begin(record: Any) -> Any:
        tape.scopes.append(record.name)
        return enter(record)

    def end(record: Any, *error: Any) -> Any:
        tape.scopes.pop()
        return leave(record, *error)

    yield torch.UntypedStorage, "resize_", resize_
    yield scope, "__enter__", begin
    yield scope, "__exit__", end
