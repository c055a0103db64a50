"""The moment before a script destroys its process groups: what must be read while they exist, and a pause.

DDP's reducer refers to the process group too. If it holds the last reference, its destructor waits for gloo's threads while it holds the
GIL, and waits forever if one of them needs the GIL to free its last tensor. During the pause these threads can have the GIL.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_PAUSE = 0.05  # seconds; a thread needs microseconds, on a busy machine some milliseconds
_called: list[Callable[[], Any]] = []


def before_groups_end(function: Callable[[], Any]) -> None:
    """Has `function`, which must not raise, called before all process groups are destroyed."""
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
