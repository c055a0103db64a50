"""What a script says about GPUs, on a machine without one: every tensor is on the traced device instead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode

from labkit.prediction.tracing.torch_private import DEVICE_CONTEXT

TRACED = torch.device("cpu")
_SAME = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "init", "ipc_collect"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction"),
)
_NUMBERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class OnTracedDevice(TorchFunctionMode):
    """Replaces each GPU among the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        named = {name: _here(value, name == "device") for name, value in (kwargs or {}).items()}
        return func(*(_here(value, func is torch.Tensor.to) for value in args), **named)


def _here(value: Any, is_device: bool = False) -> Any:
    """`value`, or the traced device if it names a GPU; an int does so where only devices are ints."""
    if isinstance(value, torch.device):
        return TRACED if value.type == "cuda" else value
    if isinstance(value, str):
        return str(TRACED) if value == "cuda" or value.startswith("cuda:") else value
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
