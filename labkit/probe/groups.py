"""Callbacks and a short pause before a script destroys its process groups, for data that must be read while they exist.

DDP's reducer also refers to the process group. If it holds the last reference, its destructor waits for gloo's threads
while holding the GIL, and deadlocks if one of them needs the GIL to free its last tensor. The pause lets these threads
acquire the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from labkit.probe.patches import Patches

_PAUSE = 0.05  # seconds; a thread needs microseconds, or a few milliseconds on a busy machine


class GroupWatch:
    """Calls functions, which must not raise, before all process groups are destroyed."""

    def __init__(self, patches: Patches):
        self._called: list[Callable[[], Any]] = []
        if dist.is_available():
            patches.wrap("process groups", "torch.distributed.destroy_process_group", self._destroying)

    def before_end(self, function: Callable[[], Any]) -> None:
        """Registers a function."""
        self._called.append(function)

    def _destroying(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def destroy_process_group(group: Any = None) -> Any:
            if group in (None, dist.group.WORLD):
                for function in self._called:
                    function()
                time.sleep(_PAUSE)
            return original(group)

        return destroy_process_group
