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

from collections.abc import Callable
from typing import Any

import torch.distributed

from labkit.probe.hosts import exchange
from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.record.writer import STARTUP


class Startup:
    """Writes each milestone once; later calls cost one lookup in a small set."""

    def __init__(self, journal: Journal, patches: Patches):
        self._journal, self._guard = journal, Guard(journal, "startup")
        self._hosts = Guard(journal, "hosts")
        self._awaited = set(STARTUP)
        if torch.distributed.is_available():
            patches.wrap("startup", "torch.distributed.init_process_group", self._forming)
        patches.wrap("startup", "torch.utils.data.DataLoader.__init__", self._loading)

    def reached(self, name: str) -> None:
        """The rank has reached `name`, one of `events.STARTUP`."""
        if name in self._awaited:
            self._awaited.discard(name)
            self._journal.write("startup", name=name)

    def _forming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            given = original(*args, **kwargs)
            first = "group" in self._awaited
            self._guard(self.reached, "group")
            if first:
                self._hosts(exchange, self._journal)  # its NodesDiffer, a SystemExit, ends the script
            return given

        return init_process_group

    def _loading(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            self._guard(self.reached, "data")

        return init
