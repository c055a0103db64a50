"""Milestones of a rank before its first step: `startup` events, each at most once per process, and so once per attempt.

======= =====================================================================================
name    written when
======= =====================================================================================
group   `init_process_group` has returned for the first time
data    a DataLoader is created for the first time, so its data set is ready
batch   a loader returned its first batch, or a model is called in training before that
======= =====================================================================================

Milestones that a script never reaches are not written, for example `group` without a process group or `data` without a
loader.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader

from labkit.probe.journal import Guard, Journal
from labkit.record.events import STARTUP

# modules that export init_process_group
_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


class Startup:
    """Writes each milestone once; later calls cost one lookup in a small set."""

    def __init__(self, journal: Journal):
        self._journal, self._guard = journal, Guard(journal, "startup")
        self._awaited = set(STARTUP)
        self._watch_groups()
        self._watch_data()

    def reached(self, name: str) -> None:
        """The rank has reached `name`, one of `events.STARTUP`."""
        if name in self._awaited:
            self._awaited.discard(name)
            self._journal.write("startup", name=name)

    def _watch_groups(self) -> None:
        if not torch.distributed.is_available():
            return
        original = torch.distributed.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            given = original(*args, **kwargs)
            self._guard(self.reached, "group")
            return given

        for module in map(importlib.import_module, _MODULES):
            if getattr(module, "init_process_group", None) is original:
                module.init_process_group = init_process_group

    def _watch_data(self) -> None:
        original = DataLoader.__init__

        @functools.wraps(original)
        def make(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            self._guard(self.reached, "data")
            if DataLoader.__init__ is make:
                DataLoader.__init__ = original

        DataLoader.__init__ = make
