"""Notices a call of a finished implementation while an answer runs.

The interpreter reports every call of a Python function (`sys.setprofile`). What counts is the file that the function is
defined in, so that neither an alias nor the way of importing it makes a difference.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from labkit.course.build import solutions
from labkit.course.build.record import Record

_TORCH = Path(torch.__file__).parent
_PARTS = (
    *("nn/parallel/", "distributed/fsdp/", "distributed/_composable/", "distributed/optim/", "distributed/nn/"),
    *("distributed/tensor/", "distributed/_tensor/", "distributed/pipelining/", "distributed/algorithms/"),
    *("distributed/_functional_collectives.py", "distributed/_symmetric_memory/"),
)
_PACKAGES = ("deepspeed", "accelerate", "fairscale", "megatron")
_FINISHED = (
    *(str(_TORCH / part) + ("/" if part.endswith("/") else "") for part in _PARTS),
    *(str(_TORCH.parent / package) + "/" for package in _PACKAGES),
    str(Path(solutions.__file__).parent),
)


class FinishedApi:
    """Between `with FinishedApi(record):`, notes the first function that an answer must not call."""

    def __init__(self, record: Record):
        self._record = record
        self._known: dict[CodeType, bool] = {}

    def __enter__(self) -> FinishedApi:
        self._before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._before[0])
        threading.setprofile(self._before[1])

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or self._record.finished_api:
            return
        code = frame.f_code
        if code not in self._known:
            self._known[code] = code.co_filename.startswith(_FINISHED) and not code.co_name.startswith("<")
        if self._known[code]:
            self._record.finished_api = _name(frame)


def _name(frame: FrameType) -> str:
    """The function of a frame, as `torch.nn.parallel.distributed.DistributedDataParallel.__init__`."""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has only the name
    return f"{frame.f_globals.get('__name__', code.co_filename)}.{name}"
