"""Bytes of live tensors by owner, and the memory of a step.

Counted are the unique storages on the models' device that outlive a step. "parameters" are those of every live module:
trained models, frozen ones, and copies such as an exponential moving average. "gradients" are the gradients of these,
"optimizer" the state tensors of every optimizer that stepped, and "other" the modules' buffers and tensors referenced
by other Python objects (see `held.py`). A sharded tensor counts with this rank's shard, and a freed storage counts 0.
DDP's buckets are "communication", with the sizes that DDP reports. Memory that lives only within a step (activations,
gathered shards, the batch, temporary buffers) is measured to the byte in a profiled step, with torch's profiler: see
`timeline.curve`. On a CPU rank, `allocated` of a step is the sum at its end, and `peak` the largest sum in any profiled
step; before the first profiled step it is the largest `allocated`. On CUDA, `allocated`, `reserved` and `peak` are
figures of the caching allocator, and "other" also has what is allocated there and belongs to no tensor above:
workspaces of cuBLAS, and the ends of blocks. The sum of all owners is then what the allocator has handed out.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from labkit.probe.held import Held
from labkit.probe.journal import Guard, Journal
from labkit.probe.torch_private import DDP_LOGGING

_WALKED = 2  # steps after the newest model or optimizer in which all objects are searched
_SAMPLED = 3  # the step after the newest model or optimizer that is profiled
_SETTLED = 3  # steps after which the owners no longer change, and are counted rarely
_RARELY = 100


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and mappings, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from tensors_in(*value.values())
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor, without communication; any other tensor is returned unchanged."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
        self._held = Held()
        self.walked = False  # whether the end of the newest step included a walk over all objects

    @property
    def is_due(self) -> bool:
        """Whether the next step must be profiled: by then the optimizer has its state, and DDP its final buckets."""
        return self._age + 1 >= _SAMPLED and not self._is_sampled

    def add_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """Adds a trained model; memory on its device is counted."""
        self._models.add(model)
        self.device, self._age, self._is_sampled = device, 0, False

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds an optimizer that steps."""
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
        times (ns) at which it is freed, by address, infinite until then. A profile that starts now does not have them.
        """
        census = Census(self.device)
        owners = self.count(census)
        if released is not None and self.device.type == "cpu":
            for tensor in self._held.tensors():
                if census.add([tensor], "other"):
                    _watch(local(tensor).untyped_storage(), released)
        apart = {"communication": owners["communication"], "other": self._unknown(owners)}
        return {address: (owner, size) for address, (owner, size) in census.counted.items() if size}, apart

    def alive(self) -> set[int]:
        """The addresses of all tensors that Python objects refer to."""
        census = Census(self.device)
        census.add(self._held.tensors(), "other")
        return set(census.counted)

    def count(self, census: Census) -> dict[str, int]:
        """Counts everything that outlives a step with a census; returns the bytes by owner."""
        owned = states_of([*self._models], [*self._optimizers], self._held.parameters())
        found = {owner: census.add(tensors, owner) for owner, tensors in owned.items()} | {
            "communication": sum(self._guard(_buckets, model) or 0 for model in self._models),
        }
        if self.device.type == "cpu":
            census.leave_out(self._held.data())  # in a GPU run they would be in host memory
        return found | {
            "other": (
                census.add((buffer for model in self._models for buffer in model.buffers()), "other")
                + census.add(self._held.rest(), "other")
            ),
        }


def _watch(storage: torch.UntypedStorage, released: dict[int, float]) -> None:
    address = storage.data_ptr()
    released[address] = math.inf
    weakref.finalize(storage, lambda: released.update({address: time.time_ns()})).atexit = False


def states_of(
    models: Iterable[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    more: Iterable[torch.Tensor] = (),
) -> dict[str, Iterator[torch.Tensor | None]]:
    """The model states by owner: parameters, also of `more` modules, their gradients, and the optimizers' tensors."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    parameters += [p for model in models for p in model.parameters()]
    parameters += more
    return {
        "parameters": iter(parameters),
        "gradients": (p.grad for p in parameters if p.is_leaf),
        "optimizer": tensors_in([list(optimizer.state.values()) for optimizer in optimizers]),
    }


def _buckets(model: torch.nn.Module) -> int:
    """Bytes of DDP's buckets as DDP reports them; 0 for any other model, and if gradients are views of them."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    data = DDP_LOGGING.of(model)()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return sum(int(size) for size in sizes.split(",") if size.strip())
