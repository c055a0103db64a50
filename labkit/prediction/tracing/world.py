"""One rank of a process group that does not exist: torch's fake backend, in which every collective returns at once and
leaves its tensors as they are.

What a rank does only with its peers, or what fake tensors cannot do, is replaced here: reading and slicing device
meshes happens without fake tensors, pipeline stages know the shapes of their inputs without asking their neighbours,
moves to the traced device do nothing, threads run their calls at once, FSDP1 asks for the bytes of a tensor, not for
its address, and a deep copy of a tensor is a clone. `DistributedDataParallel` is replaced by `replicas.Replica`.

All tensors of a trace are on one fake device. FSDP2 with `cpu_offload` is therefore not traced, and formulas take its
place: the trace ends at `pin_memory`, for which fake tensors have no kernel. Replacing it would not be enough. Moving a
tensor to the device where it is returns the same tensor, so shards, gradients and optimizer state in host memory would
count as the device's, and the copies that FSDP2 makes before an all-gather and after a reduce-scatter would be missing.
With fake tensors on a GPU, FSDP2 creates streams of `torch.cuda`, which torch refuses on a machine without CUDA.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from labkit.prediction.tracing.replicas import FirstDevice, Replica
from labkit.prediction.tracing.script import batch
from labkit.prediction.tracing.torch_private import (
    CHUNKS,
    FAKE_STORE,
    FOREACH,
    GLOBAL_SHAPES,
    IS_ALLOCATED,
    MODULE_APPLY,
    SCALER_STEP,
    STRIDED_SIZES,
    WITHOUT_MODES,
)

_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "get_local_rank", "get_coordinate", "size")
_ASYNCHRONOUS = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("isend", "irecv", "batch_isend_irecv"),
)


class Pending:
    """An asynchronous operation: it refers to its tensors, as backends do until it has been waited for."""

    def __init__(self, *arguments: Any):
        self._arguments = arguments

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that already has the result: the first argument, in place."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._arguments[0]])
        return future


class Chunks:
    """The chunks of a tensor, one for each rank, empty ones included. FSDP2 needs two of them, and creating all takes
    seconds at a thousand ranks."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int):
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // number)  # as torch.chunk

    def __getitem__(self, rank: int) -> torch.Tensor:
        first, end = rank * self._size, self._tensor.size(self._dim)
        if first >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, min(self._size, end - first))


def take_place(rank: int, ranks: int) -> None:
    """Gives this process the environment of rank `rank` of `ranks`, as torchrun does."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        ROLE_NAME="default",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # nothing connects to it
        TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        DS_ACCELERATOR="cpu",
    )


def join(rank: int, ranks: int) -> None:
    """Makes this process rank `rank` of `ranks`, in every group that a script creates."""
    take_place(rank, ranks)
    create = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        create("fake", rank=rank, world_size=ranks, store=FAKE_STORE.get()())

    for name in _MESH_METHODS:
        setattr(device_mesh.DeviceMesh, name, _without_fakes(getattr(device_mesh.DeviceMesh, name)))
    for name in (GLOBAL_SHAPES, STRIDED_SIZES):  # the shapes of global tensors, which no rank has; sizes of shards
        if name.exists():
            name.replace(_without_fakes(name.get()))
    asynchronous = [getattr(dist, name) for name in _ASYNCHRONOUS]
    replaced(
        (create, init_process_group),
        (device_mesh.init_device_mesh, _without_fakes(device_mesh.init_device_mesh)),
        (torch.nn.parallel.DistributedDataParallel, Replica),
        (torch.nn.DataParallel, FirstDevice),
        *((function, _holding(function)) for function in asynchronous),
        *((row.get(), other) for row, other in ((CHUNKS, Chunks), (IS_ALLOCATED, _has_bytes)) if row.exists()),
    )
    # A conversion of fake parameters swaps tensors, which torch refuses if there are weak references to them.
    torch.utils.weakref = types.SimpleNamespace(getweakrefs=lambda tensor: [])  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__ = _copied
    torch.nn.Module.to = torch.nn.Module.cpu = _stay
    torch.nn.Module.compile = lambda module, *args, **kwargs: None
    SCALER_STEP.replace(_always_step)
    concurrent.futures.ThreadPoolExecutor.submit = _at_once


def updates_together() -> None:
    """torch's optimizers update all parameters at once (foreach), as they do by default on a GPU; on a CPU they do so
    only if they are asked."""
    replaced((FOREACH.get(), _foreach))


def _foreach(params: list[torch.Tensor], differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
    """Not fused, but foreach; `torch.distributed.optim` compiles what calls it."""
    return False, not differentiable


def replaced(*pairs: tuple[Any, Any]) -> None:
    """Replaces functions or classes of torch by their identity, in every module that has imported them."""
    known = {id(original): replacement for original, replacement in pairs}
    for module in [*sys.modules.values()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in known:
                setattr(module, name, known[id(value)])


def _without_fakes(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with WITHOUT_MODES.get()():
            return function(*args, **kwargs)

    return call


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is allocated; a fake one has bytes then, but no address."""
    return tensor.untyped_storage().nbytes() > 0


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy of a tensor. torch's own needs a storage with data, and also copies what belongs to a fake tensor:
    its mode, and the value of a constant (the number of batches of a batch normalization)."""
    if id(tensor) not in memo:
        copy, is_trained = tensor.detach().clone(), tensor.requires_grad
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copy, is_trained) if is_parameter else copy.requires_grad_(is_trained)
    return memo[id(tensor)]


def _holding(function: Callable[..., Any]) -> Callable[..., Any]:
    """An asynchronous call returns an operation that refers to its tensors."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if isinstance(work, list):
            return [Pending(one.tensor) for one in args[0]]
        return None if work is None else Pending(*args, kwargs)

    return call


def _stay(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to`: every tensor is on the traced device already; a new type is applied."""
    kinds = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)]
    return MODULE_APPLY.of(module)(lambda tensor: tensor.to(kinds[0])) if kinds else module


def _always_step(scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
    """A gradient scaler steps: whether a gradient overflows is not known, and rarely so."""
    return optimizer.step(*args, **kwargs)


def _at_once(pool: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
    """A thread's call happens in the calling thread, in which the tape records."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(function(*args, **kwargs))
    return future


def ranks_agree(source: str) -> None:
    """DeepSpeed's third stage compares numbers between ranks: they are still sent, and count as equal. It is imported
    now if the script imports it later."""
    if "import deepspeed" not in source:
        return
    utils = importlib.import_module("deepspeed.runtime.zero.utils")

    def compare(numbers: Sequence[int]) -> None:
        for sent in (len(numbers), [*numbers]):
            dist.broadcast(torch.tensor(sent), 0)

    replaced((utils.assert_ints_same_as_other_ranks, compare))


def stages_know_shapes(script: Any, sample: Any, split: Sequence[tuple[int, int] | None]) -> None:
    """Tells every `PipelineStage` of a script the shapes of its inputs and outputs, which ranks otherwise send to each
    other.

    `sample` is the shape of one input; `split` has for each block the dimension of its output that ranks split, and
    their number.
    """
    from torch.distributed.pipelining.stage import PipelineStage

    (inputs, *_) = batch(script, sample, script.BATCH_PER_RANK // script.MICRO_BATCHES).tensors
    bounds = script.STAGES  # the first block of each stage, and the number of blocks
    parts = (None, *split)
    passed = [_shape_of(tensor, part) for tensor, part in zip(_passed(script.build_blocks(), inputs), parts)]
    create = PipelineStage.__init__

    def init(stage: Any, module: torch.nn.Module, number: int, *args: Any, **kwargs: Any) -> None:
        first, last = bounds[number], bounds[number + 1]
        create(stage, module, number, *args, input_args=passed[first], output_args=passed[last], **kwargs)

    PipelineStage.__init__ = init


@_without_fakes
def _shape_of(tensor: torch.Tensor, part: tuple[int, int] | None) -> torch.Tensor:
    """A tensor without memory, of the type and shape of a rank's part."""
    shape = [*tensor.shape]
    if part:
        dimension, ranks = part
        shape[dimension] //= ranks
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.dtype.is_floating_point)


def _passed(blocks: Iterable[torch.nn.Module], inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    yield inputs
    for block in blocks:
        with torch.no_grad():
            inputs = block(inputs)
        yield inputs
