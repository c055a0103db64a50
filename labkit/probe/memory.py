"""Bytes of live tensors by owner, the memory of a step, and tensors that outlive it."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from labkit.probe.journal import Guard, Journal
from labkit.probe.timeline import Allocation
from labkit.probe.torch_private import DDP_LOGGING, DUMP_SNAPSHOT, RECORD_HISTORY

# ---- the C library's memory


_LARGEST = (32 << 20) - (64 << 10)  # bytes; with what glibc adds, less than its DEFAULT_MMAP_THRESHOLD_MAX


def keep_memory() -> None:
    """From now on, blocks of up to 32 MiB come from the heap, and glibc keeps up to 64 MiB at its end. Does nothing
    with a C library other than glibc.

    glibc raises both limits when a large block is freed, which would happen in one rank and not in another, by chance.
    Before that, each step takes the memory of its activations from the system anew: on the CNN, 9,000 page faults,
    which make a step of 80 ms 15 ms longer.
    """
    if _of_glibc("malloc_trim"):
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.free(ctypes.c_void_p(library.malloc(ctypes.c_size_t(_LARGEST))))


def give_back_memory() -> None:
    """Returns all free pages of the heap; does nothing with a C library other than glibc."""
    trim = _of_glibc("malloc_trim")
    if trim:
        trim(ctypes.c_size_t(0))


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


# ---- torch's record of the CUDA allocator


_ENTRIES = 200_000  # maximum number of recorded allocations


class Snapshots:
    """Records the allocator from `begin` to `end`, which writes `<run>/snapshots/rank<r>-step<n>.pickle`."""

    def __init__(self, journal: Journal, run: str | os.PathLike[str]):
        self._guard = Guard(journal, "snapshots")
        self._folder = Path(run) / "snapshots"
        self._records = False

    def begin(self) -> None:
        self._records = self._guard(_record, _ENTRIES) is not None

    def end(self, step: int | None = None) -> None:
        """Writes the snapshot of a step, if there is one, and stops recording; without a step it is discarded."""
        if self._records:
            self._records = False
            if step is not None:
                self._guard(self._dump, step)
            self._guard(_record, 0)

    def _dump(self, step: int) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        rank = os.environ.get("RANK", "0")
        DUMP_SNAPSHOT.get()(str(self._folder / f"rank{rank}-step{step}.pickle"))


def _record(entries: int) -> bool:
    """Records up to `entries` allocations; 0 stops."""
    if entries:
        DUMP_SNAPSHOT.get()
        RECORD_HISTORY.get()(max_entries=entries)
    else:
        RECORD_HISTORY.get()(enabled=None)
    return True


# ---- tensors that outlive a step


# those of a class that overrides them may have other parameters
_MEMBERS = torch.nn.Module.named_parameters, torch.nn.Module.named_buffers
_SHARE = 1000  # minimum time between two walks, as a multiple of the duration of a walk
_MOST = 100_000  # maximum number of tensors remembered between two walks
_DEPTH = 6  # maximum nesting of lists and dictionaries in a data set


class WorkersBatches:
    """The batches that a rank has received from the workers of its data loaders and still holds. They are in shared
    memory, of which the profiler of memory knows nothing. Those that arrive before it is their turn are the loader's.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by address
        self._changes: list[Allocation] | None = None

    def received(self, batch: Any) -> None:
        for tensor in tensors_in(batch):
            if _is_shared(tensor):
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                if address not in self._sizes:
                    self._sizes[address] = size
                    self._note(address, size)
                    weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        self._note(address, -self._sizes.pop(address))

    def _note(self, address: int, change: int) -> None:
        if self._changes is not None:
            self._changes.append(Allocation(time.time_ns(), address, change))

    def waits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be of a batch that the loader has not returned yet."""
        return _is_shared(tensor) and tensor.untyped_storage().data_ptr() not in self._sizes

    def begin(self) -> None:
        """What is received and freed from now on is noted, until `changes`."""
        self._changes = []

    def changes(self) -> list[Allocation]:
        """What was noted."""
        changes, self._changes = self._changes or [], None
        return changes


class Held:
    """The modules and tensors found by the walks, as weak references, so that they are freed as usual."""

    def __init__(self, batches: WorkersBatches) -> None:
        self._batches = batches
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.replicas: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # of DistributedDataParallel
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lasting: list[weakref.ref[torch.Tensor]] = []
        self._data: list[weakref.ref[torch.Tensor]] = []
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether another walk is within the time budget."""
        return time.perf_counter() >= self._next

    def walk(self, device: torch.device) -> None:
        began = time.perf_counter()
        modules, tensors, data = _found()
        self._modules = weakref.WeakSet(module for module in modules if next(_own(module, *_MEMBERS), None) is not None)
        self.replicas = weakref.WeakSet(module for module in modules if _is_replica(module))
        counted = (tensor for tensor in tensors[:_MOST] if _is_on(tensor, device) and not self._batches.waits(tensor))
        seen = {id(tensor): tensor for tensor in counted}
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
        return _alive(self._data)


def _own(
    module: torch.nn.Module, *members: Callable[..., Iterator[tuple[str, torch.Tensor]]]
) -> Iterator[torch.Tensor]:
    """The module's own tensors, without submodules; none if its `__init__` has not run yet."""
    with suppress(AttributeError):
        for named in members:
            yield from (tensor for _, tensor in named(module, recurse=False))


def _is_replica(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    try:
        return tensor.device.type == device.type
    except (RuntimeError, NotImplementedError):  # for example a fake tensor outside of its mode
        return False


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory of the host that processes share."""
    try:
        return tensor.device.type == "cpu" and tensor.is_shared()
    except (RuntimeError, NotImplementedError, ValueError):  # ValueError: a parameter without a shape
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


# ---- bytes of live tensors by owner, and the memory of a step


_WALKED = 2  # steps after the newest model or optimizer in which all objects are searched
_SAMPLED = 3  # the step after the newest model or optimizer that is profiled; DDP rebuilds static graphs in it
_SETTLED = 3  # steps after which the owners no longer change, and are counted rarely
_RARELY = 100
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and mappings, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)
        elif isinstance(value, (dict, Mapping)):  # a dict is recognised faster
            yield from tensors_in(*value.values())


def parameters_of(*optimizers: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that optimizers hold, in order."""
    return (parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])


def is_fsdp_unit(module: torch.nn.Module) -> bool:
    """Whether a module is wrapped by FSDP, of either version."""
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor, without communication; any other tensor is returned unchanged."""
    if type(tensor) in _PLAIN or not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


class Census:
    """Counts each storage on one device type once; `counted` maps an address to owner and bytes."""

    def __init__(self, device: torch.device):
        self._type = device.type
        self.counted: dict[int, tuple[str, int]] = {}

    def add(self, tensors: Iterable[torch.Tensor | None], owner: str) -> int:
        """Assigns the storages that are not counted yet to `owner` and returns their bytes."""
        total = 0
        for tensor in tensors:
            address, size = self._storage(tensor)
            if address and address not in self.counted:
                self.counted[address] = owner, size
                total += size
        return total

    def size(self, tensor: torch.Tensor) -> int:
        """Bytes of its storage; 0 if it is not of this device type, or has none."""
        return self._storage(tensor)[1]

    def owner(self, tensor: torch.Tensor) -> str:
        """Whose storage it is; empty if it is not counted."""
        return self.counted.get(self._storage(tensor)[0], ("", 0))[0]

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Excludes the storages of these tensors, unless they are already counted."""
        for tensor in tensors:
            address, _ = self._storage(tensor)
            self.counted.setdefault(address, ("", 0))

    def _storage(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None or tensor.device.type != self._type:
            return 0, 0
        try:
            storage = local(tensor).untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError, ValueError):  # a sparse, fake or lazy tensor has no storage
            return 0, 0


class MemoryWatch:
    """The models and optimizers of a rank, and their bytes."""

    def __init__(self, journal: Journal):
        self._write, self._guard = journal.write, Guard(journal, "bucket sizes")
        self.device = torch.device("cpu")
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._owners: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._peak = self._activations = 0
        self._age = 0
        self._is_sampled = False
        self.batches = WorkersBatches()
        self._held = Held(self.batches)
        self.walked = False  # whether the end of the newest step included a walk over all objects

    @property
    def is_due(self) -> bool:
        """Whether the next step must be profiled: by then the optimizer has its state, and DDP its final buckets."""
        if self._is_sampled:
            return False
        return self._age + 1 >= _SAMPLED + any(model.static_graph for model in self._replicas())

    def add_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """Adds a trained model; memory on its device is counted."""
        self._models.add(model)
        self.device, self._age, self._is_sampled = device, 0, False

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._age, self._is_sampled = 0, False

    def at_step(self, step: int) -> dict[str, int | None]:
        """The memory of the step that just ended, in bytes: allocated, reserved (None on the CPU) and peak."""
        self._age += 1
        self.walked = False
        if self._age <= _SETTLED or self._age % _RARELY == 0:
            if self._age <= _WALKED or self._held.is_due:
                self._held.walk(self.device)
                self.walked = True
            self.look(step)
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            return {"allocated": allocated["current"], "reserved": reserved["current"], "peak": allocated["peak"]}
        return {"allocated": sum(self._owners.values()), "reserved": None, "peak": self._peak}

    def _replicas(self) -> set[Any]:
        """Every live model in DistributedDataParallel, also if the script calls what is in it."""
        return {*filter(_is_replica, self._models), *self._held.replicas}

    def owners(self) -> dict[str, int]:
        """Current bytes by owner, also in the middle of a step; without owners that are known only in profiled
        steps."""
        owners = self.count(Census(self.device))
        if self.device.type == "cuda":
            owners["activations"] = self._unknown(owners)
        return owners

    def _unknown(self, owners: Mapping[str, int]) -> int:
        """The bytes that the caching allocator has handed out beyond those of the owners; 0 on CPU ranks."""
        if self.device.type != "cuda":
            return 0
        return max(0, torch.cuda.memory_allocated(self.device) - sum(owners.values()))

    def look(self, step: int) -> None:
        """Counts now, and writes an event if the owners have changed."""
        self._owners = self.count(Census(self.device))
        self._owners["other"] += self._unknown(self._owners)
        self._peak = max(self._peak, sum(self._owners.values()))
        owners = self._owners | ({"activations": self._activations} if self._activations else {})
        if owners != self._reported:
            self._reported = owners
            self._write("memory", owners=owners, step=step)

    def sampled(self, step: int, fields: dict[str, Any]) -> None:
        """Records the memory curve of a profiled step."""
        self._is_sampled = True
        self._peak = max(self._peak, fields["peak"])
        self._activations = max(fields["owners"]["activations"])
        self._write("memory_step", step=step, **fields)
        self.look(step)

    def held(self, released: dict[int, float] | None = None) -> tuple[dict[int, tuple[str, int]], dict[str, int]]:
        """Owner and bytes of every counted address, and by owner the bytes without a known address.

        Given `released`, what the last step left behind in CPU memory counts, too, as "other": `released` receives the
        times (ns) at which it and the gradients are freed, by address, infinite until then. A profile that starts now
        does not have them.
        """
        census = Census(self.device)
        owners = self.count(census)
        if released is not None and self.device.type == "cpu":
            self.batches.begin()
            buckets = {size for model in self._replicas() for size in self._guard(_hooked, model) or ()}
            for tensor in self._held.tensors():
                is_bucket = census.size(tensor) in buckets  # DDP tells only their sizes, and they are counted
                if is_bucket or self.batches.waits(tensor):
                    census.leave_out([tensor])
                elif census.add([tensor], "other") or census.owner(tensor) == "gradients":
                    _watch(local(tensor).untyped_storage(), released)
        apart = {"communication": owners["communication"], "other": self._unknown(owners)}
        return {address: (owner, size) for address, (owner, size) in census.counted.items() if size}, apart

    def fetched(self, batch: Any) -> None:
        if self.device.type == "cpu":
            self.batches.received(batch)

    def alive(self, census: Census | None = None) -> set[int]:
        """The addresses of all tensors that Python objects refer to; those not yet counted by a census count in it as
        "other"."""
        census = census or Census(self.device)
        census.add(self._held.tensors(), "other")
        return set(census.counted)

    def count(self, census: Census) -> dict[str, int]:
        """Counts everything that outlives a step with a census; returns the bytes by owner."""
        owned = states_of([*self._models], [*self._optimizers], self._held.parameters())
        found = {owner: census.add(tensors, owner) for owner, tensors in owned.items()} | {
            "communication": sum(self._guard(_buckets, model) or 0 for model in self._replicas())
        }
        if self.device.type == "cpu":
            census.leave_out(self._held.data())  # in a GPU run they would be in host memory
        return found | {
            "other": (
                census.add((buffer for model in self._models for buffer in model.buffers()), "other")
                + census.add(self._held.rest(), "other")
            )
        }


def _watch(storage: torch.UntypedStorage, released: dict[int, float]) -> None:
    address = storage.data_ptr()
    released[address] = math.inf
    weakref.finalize(storage, lambda: released.update({address: time.time_ns()})).atexit = False


def states_of(
    models: Iterable[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], more: Iterable[torch.Tensor] = ()
) -> dict[str, Iterator[torch.Tensor | None]]:
    """The model states by owner: parameters, also of `more` modules, their gradients, and the optimizers' tensors."""
    parameters = [*parameters_of(*optimizers)]
    parameters += [p for model in models for p in model.parameters()]
    parameters += more
    return {
        "parameters": iter(parameters),
        "gradients": (p.grad for p in parameters if p.is_leaf),
        "optimizer": tensors_in([list(optimizer.state.values()) for optimizer in optimizers]),
    }


def _buckets(model: Any) -> int:
    """Bytes of DDP's buckets, without those of which gradients are views."""
    total = sum(_bucket_sizes(DDP_LOGGING.of(model)()))
    if not model.gradient_as_bucket_view:
        return total
    storages = [parameter.grad.untyped_storage() for parameter in model.parameters() if parameter.grad is not None]
    viewed = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return max(0, total - sum(viewed.values()))


def _hooked(model: Any) -> list[int]:
    """Bytes of each bucket that a communication hook receives, and may keep."""
    reported = DDP_LOGGING.of(model)()
    return _bucket_sizes(reported) if reported.get("comm_hook") else []


def _bucket_sizes(reported: Mapping[str, str]) -> list[int]:
    sizes = reported.get("rebuilt_bucket_sizes") or reported.get("bucket_sizes") or ""
    return [int(size) for size in sizes.split(",") if size.strip()]
