"""Bytes of live tensors by owner, and the memory of a step.

What is counted: the unique storages of parameters, their gradients, the optimizers' state tensors and the models' buffers ("other"),
of every model that trained and every optimizer that stepped, on the device of the models; a sharded tensor counts with this
rank's shard, and a storage that was freed counts 0. Activations are what the outermost forward saved for backward, without
parameters, buffers and inputs, measured in ONE early step: the largest sum alive at the end of a forward.
On a CPU rank a step's `allocated` is the sum without activations, `peak` the largest sum that was alive at the end of a phase.
On CUDA, `allocated`, `reserved` and `peak` are the caching allocator's own figures.

What is not counted: the loss function's own activations where it is no part of the model, what activation checkpointing keeps,
DDP's buckets, gathered shards between their gathering and their freeing, scratch memory of operations, the batch itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

_SAMPLED = 2  # the step, counted from the newest model or optimizer, whose activations are measured: the optimizer has its state then
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
    """Counts storages on one type of device, each of them once."""

    def __init__(self, device: torch.device):
        self._type = device.type
        self._counted: set[int] = set()

    def add(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Bytes of the storages that were not counted before."""
        total = 0
        for tensor in tensors:
            address, size = self._storage(tensor)
            if address and address not in self._counted:
                self._counted.add(address)
                total += size
        return total

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor's storage was counted, or holds nothing."""
        address, _ = self._storage(tensor)
        return not address or address in self._counted

    def _storage(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None or tensor.device.type != self._type:
            return 0, 0
        try:
            storage = local(tensor).untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a sparse or fake tensor has no storage of its own
            return 0, 0


class _Saved:
    """A tensor that autograd keeps. It is alive exactly as long as autograd keeps it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # the tensor itself could close a circle with its own node, which nobody collects


class ActivationSample:
    """What forwards save for backward, while they run inside `watching`."""

    def __init__(self, device: torch.device):
        self.peak = 0
        self._device = device
        self._alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees every tensor that is saved, and steps aside for what bears no such hooks (torch.func's transforms)."""
        disable = graph.disable_saved_tensors_hooks
        with graph.saved_tensors_hooks(self._pack, _unpack):
            graph.disable_saved_tensors_hooks = self._aside(disable)
            try:
                yield
            finally:
                graph.disable_saved_tensors_hooks = disable

    def _aside(self, disable: Any) -> Any:
        @contextmanager
        def disable_saved_tensors_hooks(message: str) -> Iterator[None]:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            try:
                with disable(message):
                    yield
            finally:
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, _unpack)

        return disable_saved_tensors_hooks

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._alive.add(saved)
        return saved

    def settle(self, others: Census) -> int:
        """Bytes alive now, at the end of a forward, without what `others` has counted."""
        for saved in list(self._alive):
            if others.has(saved.tensor):
                self._alive.discard(saved)
        live = Census(self._device).add(saved.tensor for saved in self._alive)
        self.peak = max(self.peak, live)
        return live


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


class MemoryWatch:
    """The models and optimizers of a rank, and their bytes. `write` takes a kind and fields, as a journal does."""

    def __init__(self, write: Any):
        self._write = write
        self._device = torch.device("cpu")
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._owners: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._peak = 0
        self._age = 0
        self._sample: ActivationSample | None = None
        self._watching: Any = None

    def add_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """A model that trains; its device is the one that is counted."""
        self._models.add(model)
        self._device, self._age, self._sample = device, 0, None

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that steps."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._age, self._sample = 0, None

    # ---- the one step in which activations are looked at

    def forward_begins(self, model: torch.nn.Module) -> None:
        """Before an outermost training forward."""
        if self._age + 1 != _SAMPLED or _is_compiled(model):
            return
        self._sample = self._sample or ActivationSample(self._device)
        self._watching = self._sample.watching()
        self._watching.__enter__()

    def forward_ends(self, inputs: Any) -> None:
        """After an outermost forward, whatever became of it; `inputs` are its arguments, nested as they are."""
        watching, self._watching = self._watching, None
        if watching is None:
            return
        watching.__exit__(None, None, None)
        census, owners = self._count()
        census.add(tensors_in(inputs))
        census.add(getattr(p, "_full_param_padded", None) for model in self._models for p in model.parameters())  # what FSDP1 gathered
        self._peak = max(self._peak, sum(owners.values()) + self._sample.settle(census))

    # ---- every step

    def at_step(self, step: int) -> dict[str, int | None]:
        """The memory of a step that just ended: allocated, reserved (null on CPU) and peak, in bytes."""
        self._age += 1
        if self._age <= _SETTLED or self._age % _RARELY == 0:
            self._look(step)
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            return {"allocated": allocated["current"], "reserved": reserved["current"], "peak": allocated["peak"]}
        return {"allocated": sum(self._owners.values()), "reserved": None, "peak": self._peak}

    def _look(self, step: int) -> None:
        _, self._owners = self._count()
        self._peak = max(self._peak, sum(self._owners.values()))
        owners = dict(self._owners)
        if self._sample is not None:
            owners["activations"] = self._sample.peak
        if owners != self._told:
            self._told = owners
            self._write("memory", owners=owners, step=step)

    def _count(self) -> tuple[Census, dict[str, int]]:
        census = Census(self._device)
        parameters = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        parameters += [p for model in self._models for p in model.parameters()]
        return census, {
            "parameters": census.add(parameters),
            "gradients": census.add(p.grad for p in parameters if p.is_leaf),
            "optimizer": census.add(tensors_in([list(optimizer.state.values()) for optimizer in self._optimizers])),
            "other": census.add(buffer for model in self._models for buffer in model.buffers()),
        }


def _is_compiled(model: torch.nn.Module) -> bool:
    """Whether parts of a model are compiled: saved-tensor hooks would have them compiled anew."""
    return any(type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
