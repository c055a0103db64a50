"""Stand-ins for `DistributedDataParallel`, whose C++ reducer reads the memory of tensors, which fake tensors lack, and
for `DataParallel`, which needs several devices.

`Replica` has the reducer's buckets: one in the first step, and from the second step on those of
torch's own function over the parameters in the order in which their gradients were ready (Li et
al. 2020, sections 3.2 and 4.2). With `find_unused_parameters` they are those of the parameters in their order, from the
end, for good, and a map of the used parameters is reduced, too. A bucket is reduced when all of its gradients are
ready; after the last one, gradients are copied from the buckets. Buffers are broadcast before each forward in training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call

from labkit.prediction.tracing.torch_private import BUCKETS, COALESCED, ENGINE, FIRST_BUCKET, FLAT, WITHOUT_MODES

_MIB = 1 << 20
_DEFAULT = 25  # MiB
_COALESCED = 10 * _MIB  # bytes that DataParallel sends at once


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
        sizes = [one.numel() for one in self._parameters]
        return [part.view_as(one) for part, one in zip(self._buffer.split(sizes), self._parameters)]


class Replica(torch.nn.Module):
    """Wraps a module as `DistributedDataParallel` does, for the options that scripts use. `buckets` are the flat
    buffers of all buckets."""

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        device_mesh: Any = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        **_: Any,
    ):
        super().__init__()
        self.module = module
        self.group = process_group or (device_mesh.get_group() if device_mesh else dist.group.WORLD)
        self.require_backward_grad_sync = True
        self._broadcasts = broadcast_buffers
        first = FIRST_BUCKET.get() if bucket_cap_mb is None else bucket_cap_mb * _MIB
        self._limits = [int(first), int((bucket_cap_mb or _DEFAULT) * _MIB)]
        self._rebuilt = self._finds_unused = find_unused_parameters
        self._hook: Any = None
        self._ready: list[torch.nn.Parameter] = []
        parameters = [one for one in module.parameters() if one.requires_grad]
        self._used = torch.zeros(len(parameters) if find_unused_parameters else 0, dtype=torch.int32)
        self._build(parameters, self._limits if find_unused_parameters else [sys.maxsize])
        for one in parameters:
            one.register_post_accumulate_grad_hook(self._gradient)

    @property
    def reducer(self) -> Replica:
        """Pipeline stages prepare the reducer before their last backward."""
        return self

    def prepare_for_backward(self, outputs: Any) -> None:
        """A backward begins that synchronizes."""
        self._left = [len(one) for one in self._buckets]
        self._ready = []

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._send_buffers()
            self.prepare_for_backward(None)
        return self.module(*args, **kwargs)

    def _build(self, order: list[torch.nn.Parameter], limits: list[int], from_end: bool = True) -> None:
        self.buckets: list[torch.Tensor] = []  # freed first
        with WITHOUT_MODES.get()():  # C++ code reads only shapes and types
            shapes = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in order]
            parts, _ = BUCKETS.get()(shapes, limits, [False] * len(order))
        self._buckets = [[order[index] for index in part] for part in (reversed(parts) if from_end else parts)]
        self._place = {one: number for number, bucket in enumerate(self._buckets) for one in bucket}
        self.buckets = [
            torch.empty(sum(one.numel() for one in bucket), dtype=bucket[0].dtype) for bucket in self._buckets
        ]
        self.prepare_for_backward(None)

    @torch.no_grad()
    def _gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self.require_backward_grad_sync:
            return
        self._ready.append(parameter)
        number = self._place[parameter]
        self._left[number] -= 1
        if not self._left[number]:
            self._reduce(number)
        if not any(self._left):
            if self._finds_unused:
                dist.all_reduce(self._used, group=self.group, async_op=True)
            ENGINE.get().queue_callback(self._finish)

    def _reduce(self, number: int) -> None:
        bucket, buffer = self._buckets[number], self.buckets[number]
        for part, one in zip(buffer.split([each.numel() for each in bucket]), bucket):
            part.view_as(one).copy_(one.grad)
        if self._hook is None:
            dist.all_reduce(buffer, group=self.group, async_op=True)
        else:
            self._hook(_Bucket(number, number == len(self._buckets) - 1, buffer, [*bucket])).wait()

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket, buffer in zip(self._buckets, self.buckets):
            for part, one in zip(buffer.split([each.numel() for each in bucket]), bucket):
                one.grad.copy_(part.view_as(one))
        if not self._rebuilt:
            self._rebuilt = True
            self._build(self._ready, self._limits, from_end=False)

    @torch.no_grad()
    def _send_buffers(self) -> None:
        buffers = [*self.module.buffers()] if self._broadcasts else []
        for kind in dict.fromkeys(one.dtype for one in buffers):
            alike = [one for one in buffers if one.dtype == kind]
            flat = torch.cat([one.flatten() for one in alike])
            dist.broadcast(flat, 0, group=self.group)
            for part, one in zip(flat.split([each.numel() for each in alike]), alike):
                one.copy_(part.view_as(one))


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
        return tuple(one.view_as(one) for one in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for chunk in COALESCED.get()(gradients, _COALESCED):
            flat = FLAT.get()(chunk)
            parts = torch.empty_like(flat).split([one.numel() for one in chunk])
            sums |= {one: part.view_as(one).data for one, part in zip(chunk, parts)}
        return tuple(sums[one] for one in gradients)


class _Gather(torch.autograd.Function):
    """Outputs for the whole batch; the gradient of the first chunk."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, samples: int) -> torch.Tensor:
        ctx.samples = len(first)
        return first.new_empty(samples, *first.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[: ctx.samples], None
