"""Callbacks and a short pause before a script destroys its process groups, for data that must be read while they exist.

DDP's reducer also refers to the process group. If it holds the last reference, its destructor waits for gloo's threads
while holding the GIL, and deadlocks if one of them needs the GIL to free its last tensor. The pause lets these threads
acquire the GIL.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_PAUSE = 0.05  # seconds; a thread needs microseconds, or a few milliseconds on a busy machine
_called: list[Callable[[], Any]] = []


def before_groups_end(function: Callable[[], Any]) -> None:
    """Registers `function`, which must not raise, to be called before all process groups are destroyed."""
    if dist.is_available():
        if not _called:
            _watch()
        _called.append(function)


def _watch() -> None:
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group in (None, dist.group.WORLD):
            for function in _called:
                function()
            time.sleep(_PAUSE)
        return original(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group
