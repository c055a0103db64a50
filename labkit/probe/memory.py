"""Bytes of live tensors by owner, and the memory of a step.

What is counted: the unique storages, on the device of the models, that outlive a step. "parameters" are those of every module that is
alive: models that train, frozen ones, and copies such as an exponential moving average. "gradients" are the gradients of these,
"optimizer" the state tensors of every optimizer that stepped, and "other" the modules' buffers and whatever else Python's objects hold
(see `held.py`). A sharded tensor counts with this rank's shard, and a storage that was freed counts 0. DDP's buckets are
"communication", by DDP's own account of their sizes. What lives within a step only (activations, gathered shards, the batch, scratch
memory) is seen in a sampled step, by torch's own profiler, to the byte: see `timeline.curve`.
On a CPU rank a step's `allocated` is the sum at its end, and `peak` the largest sum that any sampled step reached; before one was
sampled it is the largest `allocated`. On CUDA, `allocated`, `reserved` and `peak` are the caching allocator's own figures.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from labkit.probe.held import Held

_WALKED = 2  # steps, counted from the newest model or optimizer, after which all objects are looked at
_SAMPLED = 3  # the step, counted from the newest model or optimizer, that is looked at closely
_SETTLED = 3  # steps after which the owners have settled, and are looked at rarely
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
    """This rank's part of a distributed tensor, without communication; any other tensor is itself."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Census:
    """Counts storages on one type of device, each of them once; `counted` has owner and bytes by address."""

    def __init__(self, device: torch.device):
        self._type = device.type
        self.counted: dict[int, tuple[str, int]] = {}

    def add(self, tensors: Iterable[torch.Tensor | None], owner: str) -> int:
        """Bytes of the storages that were not counted before; they are `owner`'s from now on."""
        total = 0
        for tensor in tensors:
            address, size = self._storage(tensor)
            if address and address not in self.counted:
                self.counted[address] = owner, size
                total += size
        return total

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """The storages of these tensors count for nobody, unless they were counted before."""
        for tensor in tensors:
            address, _ = self._storage(tensor)
            self.counted.setdefault(address, ("", 0))

    def _storage(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None or tensor.device.type != self._type:
            return 0, 0
        try:
            storage = local(tensor).untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError, ValueError):  # a sparse, fake or lazy tensor has no storage of its own
            return 0, 0


class MemoryWatch:
    """The models and optimizers of a rank, and their bytes. `write` takes a kind and fields, as a journal does."""

    def __init__(self, write: Any):
        self._write = write
        self.device = torch.device("cpu")
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._owners: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._peak = self._activations = 0
        self._age = 0
        self._is_sampled = False
        self._held = Held()
        self.walked = False  # whether the newest step's end took a walk over all objects

    @property
    def is_due(self) -> bool:
        """Whether the coming step is to be sampled: the optimizer has its state by then, and DDP its last buckets."""
        return self._age + 1 >= _SAMPLED and not self._is_sampled

    def add_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """A model that trains; its device is the one that is counted."""
        self._models.add(model)
        self.device, self._age, self._is_sampled = device, 0, False

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that steps."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._age, self._is_sampled = 0, False

    def at_step(self, step: int) -> dict[str, int | None]:
        """The memory of a step that just ended: allocated, reserved (null on CPU) and peak, in bytes."""
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
        """Bytes by owner at this moment, in the middle of a step too; what is known only of sampled steps is left out."""
        owners = self._count(Census(self.device))
        if self.device.type == "cuda":
            owners["activations"] = max(0, torch.cuda.memory_allocated(self.device) - sum(owners.values()))
        return owners

    def look(self, step: int) -> None:
        """Counts now, and tells what has changed."""
        self._owners = self._count(Census(self.device))
        self._peak = max(self._peak, sum(self._owners.values()))
        owners = self._owners | ({"activations": self._activations} if self._activations else {})
        if owners != self._told:
            self._told = owners
            self._write("memory", owners=owners, step=step)

    def sampled(self, step: int, fields: dict[str, Any]) -> None:
        """The curve of a step that was looked at closely."""
        self._is_sampled = True
        self._peak = max(self._peak, fields["peak"])
        self._activations = max(fields["owners"]["activations"])
        self._write("memory_step", step=step, **fields)
        self.look(step)

    def held(self) -> tuple[dict[int, tuple[str, int]], dict[str, int]]:
        """Owner and bytes of every address that is counted, and the bytes that have no known address, by owner."""
        census = Census(self.device)
        owners = self._count(census)
        apart = {"communication": owners["communication"]}
        if self.device.type == "cuda":
            apart["other"] = max(0, torch.cuda.memory_allocated(self.device) - sum(owners.values()))
        return {address: (owner, size) for address, (owner, size) in census.counted.items() if size}, apart

    def _count(self, census: Census) -> dict[str, int]:
        parameters = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        parameters += [p for model in self._models for p in model.parameters()]
        parameters += self._held.parameters()
        found = {
            "parameters": census.add(parameters, "parameters"),
            "gradients": census.add((p.grad for p in parameters if p.is_leaf), "gradients"),
            "optimizer": census.add(tensors_in([list(optimizer.state.values()) for optimizer in self._optimizers]), "optimizer"),
            "communication": sum(map(_buckets, self._models)),
        }
        if self.device.type == "cpu":
            census.leave_out(self._held.data())  # on a GPU they would be on the host
        return found | {
            "other": census.add((buffer for model in self._models for buffer in model.buffers()), "other")
            + census.add(self._held.rest(), "other"),
        }


def _buckets(model: torch.nn.Module) -> int:
    """Bytes of DDP's buckets, by its own account; 0 for any other model, and where gradients are views of them."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    told = model._get_ddp_logging_data()
    return sum(int(size) for size in (told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or "").split(",") if size.strip())
