"""Snapshots: torch's own record of the CUDA allocator during a profiled step."""

from __future__ import annotations

import os
from pathlib import Path

from labkit.probe.journal import Guard, Journal
from labkit.probe.torch_private import DUMP_SNAPSHOT, RECORD_HISTORY

_ENTRIES = 200_000  # maximum number of recorded allocations


class Snapshots:
    """Records the allocator from `begin` to `end`, which writes `<run>/snapshots/rank<r>-step<n>.pickle`."""

    def __init__(self, journal: Journal, run: str | os.PathLike[str]):
        self._guard = Guard(journal, "snapshots")
        self._folder = Path(run) / "snapshots"
        self._records = False

    def begin(self) -> None:
        """Starts recording."""
        self._records = self._guard(_record, _ENTRIES) is not None

    def end(self, step: int | None = None) -> None:
        """Writes the snapshot of a step, if there is one, and stops recording; without a step it is discarded."""
        if self._records:
            self._records = False
            if step is not None:
                self._guard(self._dump, step)
            self._guard(_record, 0)

    def _dump(self, step: int) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        rank = os.environ.get("RANK", "0")
        DUMP_SNAPSHOT.get()(str(self._folder / f"rank{rank}-step{step}.pickle"))


def _record(entries: int) -> bool:
    """Records up to `entries` allocations; 0 stops."""
    if entries:
        DUMP_SNAPSHOT.get()
        RECORD_HISTORY.get()(max_entries=entries)
    else:
        RECORD_HISTORY.get()(enabled=None)
    return True
