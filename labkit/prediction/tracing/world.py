"""One rank of a process group that does not exist: torch's fake backend, in which every collective returns at once and
leaves its tensors as they are.

What a rank does only with its peers, or what fake tensors cannot do, is replaced here: reading and slicing device
meshes happens without fake tensors, pipeline stages know the shapes of their inputs without asking their neighbours,
moves to the traced device do nothing, threads run their calls at once, FSDP1 asks for the bytes of a tensor, not for
its address, and a deep copy of a tensor is a clone. `DistributedDataParallel` is replaced by `Replica`.

All tensors of a trace are on one fake device. FSDP2 with `cpu_offload` is therefore not traced, and formulas take its
place: the trace ends at `pin_memory`, for which fake tensors have no kernel. Replacing it would not be enough. Moving a
tensor to the device where it is returns the same tensor, so shards, gradients and optimizer state in host memory would
count as the device's, and the copies that FSDP2 makes before an all-gather and after a reduce-scatter would be missing.
With fake tensors on a GPU, FSDP2 creates streams of `torch.cuda`, which torch refuses on a machine without CUDA.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import linecache
import os
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.func import functional_call
from torch.utils.data import TensorDataset

from labkit.prediction.tracing.torch_private import (
    BUCKETS,
    CHUNKS,
    COALESCED,
    ENGINE,
    FAKE_STORE,
    FIND_TENSORS,
    FIRST_BUCKET,
    FLAT,
    FOREACH,
    GLOBAL_SHAPES,
    IS_ALLOCATED,
    MODULE_APPLY,
    SCALER_STEP,
    STRIDED_SIZES,
    TREE_MAP,
    WITHOUT_MODES,
)


class Refused(PermissionError):
    """The script wanted to do what a trace refuses; the message says what, as a clause without a subject, and `fix`
    what would make the trace possible. `newest` is the message of the last one, which a library may have caught."""

    newest = ""

    def __init__(self, clause: str, fix: str = "do this after that step"):
        super().__init__(clause)
        self.fix, Refused.newest = fix, clause


# ---- a generated script as a module, and the data that it would load

_NAME = "train"


def load(path: str, source: str) -> Any:
    """The module of a script, which need not exist as a file; `inspect` finds its source all the same."""
    script = types.ModuleType(_NAME)
    script.__file__ = path
    sys.modules[_NAME] = script
    sys.argv = [path]
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), script.__dict__)
    return script


def batch(script: Any, sample: Any, count: int) -> TensorDataset:
    """`count` samples of shape `sample`, with the shapes of the script's own data set, which no device holds."""
    if hasattr(script, "sequences"):
        return script.sequences(torch.zeros(sample[0] + count + 1, dtype=torch.int64), count)
    return TensorDataset(torch.zeros(count, *sample), torch.zeros(count, dtype=torch.int64))


# ---- stand-ins for `DistributedDataParallel`, whose C++ reducer reads the memory of tensors, which fake tensors lack,
# and for `DataParallel`, which needs several devices
#
# `Replica` has the reducer's buckets: one in the first step, and from the second step on (the third, if the graph is
# static) those of torch's own function over the parameters in the order in which their gradients were ready (Li et
# al. 2020, sections 3.2 and 4.2). With `find_unused_parameters` they are those of the parameters in their order, from
# the end, for good, and a map of the used parameters is reduced, too. A bucket is reduced when all of its gradients are
# ready; those of unused parameters are as soon as the first gradient is. After the last one, gradients are copied from
# the buckets, unless they are views of them. The other ranks count as using the same parameters. Buffers are broadcast
# before a forward, if gradients were synchronized since the last one.

_MIB = 1 << 20
_DEFAULT = 25  # MiB
_COALESCED = 10 * _MIB  # bytes that DataParallel sends at once
_UNREADY = (
    "parameters of a DistributedDataParallel model received no gradient in the last step, which ends a run in its next"
    " step unless find_unused_parameters=True"
)


class _Bucket:
    """What a communication hook receives."""

    def __init__(self, number: int, last: bool, buffer: torch.Tensor, parameters: list[torch.Tensor]):
        self._number, self._last, self._buffer, self._parameters = number, last, buffer, parameters

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters]
        return [part.view_as(parameter) for part, parameter in zip(self._buffer.split(sizes), self._parameters)]


class Replica(torch.nn.Module, Joinable):
    """Wraps a module as `DistributedDataParallel` does, for the options that scripts use. `buckets` are the flat
    buffers of all buckets, `live` all replicas that exist."""

    live: ClassVar[weakref.WeakSet[Replica]] = weakref.WeakSet()

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        device_mesh: Any = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        mixed_precision: Any = None,
        delay_all_reduce_named_params: Any = None,
        **_: Any,
    ):
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        if mixed_precision is not None or delay_all_reduce_named_params is not None:
            raise Refused(
                "gives DistributedDataParallel an option that a trace does not know",
                "it knows all but mixed_precision and delay_all_reduce_named_params",
            )
        self.live.add(self)
        self.module = module
        self.process_group = process_group or (device_mesh.get_group() if device_mesh else dist.group.WORLD)
        self.device, self.device_ids = torch.device("cpu"), None
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.broadcast_buffers = gradient_as_bucket_view, broadcast_buffers
        first = FIRST_BUCKET.get() if bucket_cap_mb is None else bucket_cap_mb * _MIB
        self._limits = [int(first), int((bucket_cap_mb or _DEFAULT) * _MIB)]
        self._searches = find_unused_parameters and not static_graph
        self._rebuilt_after = 0 if self._searches else 2 if static_graph else 1  # reductions
        self._reductions = 0
        self._hook: Any = None
        self._expects = False  # hooks of gradients do nothing until a forward that synchronizes
        self._uses: Counter[torch.nn.Parameter] = Counter()  # in the first backward of a static graph
        self._uses_left = self._uses.copy()
        self._unused: list[torch.nn.Parameter] = []
        self._ready: list[torch.nn.Parameter] = []
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        named = module.named_parameters()
        self._parameters_reduced = [
            parameter for name, parameter in named if parameter.requires_grad and name not in ignored
        ]
        is_mapped = find_unused_parameters or static_graph
        self._used = torch.zeros(len(self._parameters_reduced) if is_mapped else 0, dtype=torch.int32)
        self._build(self._parameters_reduced, self._limits if self._searches else [sys.maxsize])
        for parameter in self._parameters_reduced:
            parameter.register_post_accumulate_grad_hook(self._gradient)

    # ---- what wrappers of `DistributedDataParallel` call

    @property
    def reducer(self) -> Replica:
        """Pipeline stages and Lightning prepare the reducer before a backward."""
        return self

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}  # Lightning asks for it at the end

    def _rebuild_buckets(self) -> bool:
        return False  # they have been rebuilt after the backward

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Reduces buckets with a hook from now on."""
        self._hook = lambda bucket: hook(state, bucket)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are only accumulated."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True, **named: Any) -> Join:
        """For ranks with different numbers of batches."""
        return Join([self], enable, **named)

    def join_hook(self, **_: Any) -> JoinHook:
        """What a rank does after its last batch, which no step has."""
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group of the replicas."""
        return self.process_group

    # ---- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Join.notify_join_context(self)
        if self.require_forward_param_sync and self.broadcast_buffers:
            self._send_buffers()
        if self._join_config.enable:
            dist.all_reduce(torch.ones(1), group=self.process_group, async_op=True)
        output = self.module(*args, **kwargs)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self.prepare_for_backward([*FIND_TENSORS.get()(output)])
        if self._searches or (self.static_graph and not self._reductions):
            return TREE_MAP.get()(torch.Tensor, _passed_on, output)
        return output

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """A backward begins that synchronizes, of a loss that depends on `outputs`."""
        if self._ready and any(self._left):
            raise RuntimeError(_UNREADY)
        self._left = [len(bucket) for bucket in self._buckets]
        self._uses_left = self._uses.copy()
        self._ready = []
        self._expects = True
        if self._searches and outputs:
            used = _leaves(outputs)
            self._unused = [parameter for parameter in self._parameters_reduced if parameter not in used]

    def _build(self, order: list[torch.nn.Parameter], limits: list[int], from_end: bool = True) -> None:
        self.buckets: list[torch.Tensor] = []  # freed first
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        with WITHOUT_MODES.get()():  # C++ code reads only shapes and types
            shapes = [torch.empty(parameter.shape, dtype=parameter.dtype, device="meta") for parameter in order]
            parts, _ = BUCKETS.get()(shapes, limits, [False] * len(order))
        self._buckets = [[order[index] for index in part] for part in (reversed(parts) if from_end else parts)]
        self._place = {parameter: number for number, bucket in enumerate(self._buckets) for parameter in bucket}
        self.buckets = [
            torch.empty(sum(parameter.numel() for parameter in bucket), dtype=bucket[0].dtype)
            for bucket in self._buckets
        ]
        for bucket, buffer in zip(self._buckets, self.buckets):
            for part, parameter in zip(buffer.split([parameter.numel() for parameter in bucket]), bucket):
                self._views[parameter] = part.view_as(parameter)
                if self.gradient_as_bucket_view and parameter.grad is not None:
                    parameter.grad = self._views[parameter]
        self._left, self._ready = [len(bucket) for bucket in self._buckets], []

    @torch.no_grad()
    def _gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._expects:
            return
        if self.static_graph and not self._reductions:
            if not self._uses:
                ENGINE.get().queue_callback(self._reduce_all)
            self._uses[parameter] += 1
            return
        self._uses_left[parameter] -= 1
        if self._uses_left[parameter] > 0:
            return
        if not self._ready:
            for unused in self._unused:
                self._is_ready(unused)
        self._is_ready(parameter)

    def _is_ready(self, parameter: torch.nn.Parameter) -> None:
        self._ready.append(parameter)
        view = self._views[parameter]
        if self.gradient_as_bucket_view and parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        number = self._place[parameter]
        self._left[number] -= 1
        if not self._left[number]:
            self._reduce(number)
        if not any(self._left):
            if self._searches:
                dist.all_reduce(self._used, group=self.process_group, async_op=True)
            ENGINE.get().queue_callback(self._finish)

    @torch.no_grad()
    def _reduce_all(self) -> None:
        """The first backward of a static graph has ended."""
        dist.all_reduce(self._used, group=self.process_group, async_op=True)
        self._unused = [parameter for parameter in self._parameters_reduced if not self._uses[parameter]]
        for number in range(len(self._buckets)):
            self._reduce(number)
        self._finish()

    def _reduce(self, number: int) -> None:
        bucket, buffer = self._buckets[number], self.buckets[number]
        for parameter in bucket:
            view = self._views[parameter]
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        if self._hook is None:
            dist.all_reduce(buffer, group=self.process_group, async_op=True)
        else:
            self._hook(_Bucket(number, number == len(self._buckets) - 1, buffer, [*bucket])).wait()

    @torch.no_grad()
    def _finish(self) -> None:
        for parameter, view in self._views.items():
            if parameter.grad is None:
                continue  # the parameter is unused, also by the other ranks
            if self.gradient_as_bucket_view:
                parameter.grad = view
            else:
                parameter.grad.copy_(view)
        self._expects = False
        self._reductions += 1
        if self._reductions == self._rebuilt_after:
            unused = {*self._unused}
            used = [parameter for parameter in self._ready if parameter not in unused]
            self._build([*used, *self._unused], self._limits, from_end=False)

    @torch.no_grad()
    def _send_buffers(self) -> None:
        buffers = [*self.module.buffers()]
        for kind in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == kind]
            flat = torch.cat([buffer.flatten() for buffer in alike])
            dist.broadcast(flat, group_src=0, group=self.process_group)
            for part, buffer in zip(flat.split([buffer.numel() for buffer in alike]), alike):
                buffer.copy_(part.view_as(buffer))


def _passed_on(tensor: torch.Tensor) -> torch.Tensor:
    """An output, of which DDP makes a copy if it must see the beginning of backward."""
    return tensor if tensor.grad_fn is None else tensor.clone()


def _leaves(outputs: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    """The leaves that some outputs depend on."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, found = set(nodes), set(outputs)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.add(node.variable)
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        nodes += following
    return found


class FirstDevice(torch.nn.Module):
    """Takes the place of `DataParallel`: what its first device does, which holds the model. Parameters go to the other
    devices, and gradients come back, in flat buffers of 10 MiB; the outputs of all devices are gathered."""

    def __init__(self, module: torch.nn.Module, device_ids: Sequence[int], **_: Any):
        super().__init__()
        self.module = module
        self._devices = len(device_ids)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs for the whole batch, of which this device computes the first chunk."""
        first = inputs.chunk(self._devices)[0]
        names, parameters = zip(*self.module.named_parameters())
        replica = dict(zip(names, _Broadcast.apply(*parameters)))
        return _Gather.apply(functional_call(self.module, replica, (first,)), len(inputs))


class _Broadcast(torch.autograd.Function):
    """Parameters for all devices; the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for chunk in COALESCED.get()(parameters, _COALESCED):
            FLAT.get()(chunk)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for chunk in COALESCED.get()(gradients, _COALESCED):
            flat = FLAT.get()(chunk)
            parts = torch.empty_like(flat).split([gradient.numel() for gradient in chunk])
            sums |= {gradient: part.view_as(gradient).data for gradient, part in zip(chunk, parts)}
        return tuple(sums[gradient] for gradient in gradients)


class _Gather(torch.autograd.Function):
    """Outputs for the whole batch; the gradient of the first chunk."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, samples: int) -> torch.Tensor:
        ctx.samples = len(first)
        return first.new_empty(samples, *first.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[: ctx.samples], None


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
        dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        ROLE_NAME="default",
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
            return [Pending(pending.tensor) for pending in args[0]]
        return None if work is None else Pending(*args, kwargs)

    return call


def _stay(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to`: every tensor is on the traced device already; a new type is applied."""
    kinds = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
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
