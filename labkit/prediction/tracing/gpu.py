"""What a script says about devices, on a machine without GPUs: every tensor is on the traced device instead, also if
the script gives the CPU a number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode

from labkit.prediction.tracing.torch_private import ALL_TRUE, DEVICE_CONTEXT, FAKE_TENSOR

TRACED = torch.device("cpu")
_SAME = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "init", "ipc_collect"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction"),
)
_ADDRESSED = 40  # bits of an offset in a storage
_ASSUMED = dict.fromkeys((torch.isfinite, torch.Tensor.isfinite, ALL_TRUE.get()), True) | dict.fromkeys(
    (torch.isnan, torch.isinf, torch.Tensor.isnan, torch.Tensor.isinf), False
)
_NUMBERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class OnTracedDevice(TorchFunctionMode):
    """Replaces each GPU, and each numbered CPU, among the arguments of torch's functions. Numbers of tensors without
    data are finite, and parameters of distributions valid. `address` numbers the storages of tensors, which libraries
    tell apart by their addresses.
    """

    def __init__(self, address: Callable[[torch.Tensor], int]):
        super().__init__()
        self._address = address

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME:
            return args[0]
        if func is torch.Tensor.__format__ and not args[0].dim():
            return format(args[0].item(), args[1])
        if func is torch.Tensor.data_ptr and type(args[0]) is FAKE_TENSOR.get():
            return (self._address(args[0]) << _ADDRESSED) + args[0].storage_offset() * args[0].element_size()
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        named = {name: _here(value, name == "device") for name, value in (kwargs or {}).items()}
        result = func(*(_here(value, func is torch.Tensor.to) for value in args), **named)
        if func in _ASSUMED and type(result) is FAKE_TENSOR.get():
            return torch.full(result.shape, _ASSUMED[func], dtype=torch.bool)
        return result


def _here(value: Any, is_device: bool = False) -> Any:
    """`value`, or the traced device if it names a GPU or a CPU; an int does so where only devices are ints."""
    if isinstance(value, torch.device):
        return TRACED if value.type in ("cpu", "cuda") else value
    if isinstance(value, str):
        return str(TRACED) if value == "cuda" or value.startswith(("cpu:", "cuda:")) else value
    return TRACED if is_device and type(value) is int else value


def without_gpus(asked: bool, ranks: int) -> None:
    """Replaces the functions and classes that need a GPU, for the rest of the process. If GPUs are `asked` for, there
    is one per rank."""
    for name in _NOTHING:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in _NUMBERS:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.nn.Module.cuda = lambda module, device=None: module
    _with(DEVICE_CONTEXT.get())
    _with(torch.autocast)
    _with(torch.amp.GradScaler)
    if asked:
        _with(FullyShardedDataParallel, device_id=TRACED)
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: ranks
        torch.cuda.current_device = lambda: int(os.environ["LOCAL_RANK"])
        torch.cuda.is_bf16_supported = lambda *_, **__: True
        torch.cuda.get_device_name = lambda *_: "GPU"


def _with(kind: Any, **fixed: Any) -> None:
    """Each GPU among the constructor's arguments is replaced; others are `fixed`."""
    create: Callable[..., None] = kind.__init__

    @wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *map(_here, args), **{name: _here(value) for name, value in kwargs.items()} | fixed)

    kind.__init__ = init
