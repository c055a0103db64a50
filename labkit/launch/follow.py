"""Follower: keeps a RunState up to date with a run folder, reading only what is new."""

from __future__ import annotations

from typing import Any

from labkit.events import Reader
from labkit.launch.folder import RunFolder
from labkit.launch.status import current
from labkit.state import RunState


class Follower:
    """Folds a run folder's files into `state`; `poll` reads on where it stopped.

    An ended run is read by one call of `poll`, however long it was.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.state = RunState()
        self._readers: dict[str, Reader] = {"system": Reader(folder.system)}
        self._known: dict[str, dict[str, Any]] = {}

    def poll(self) -> bool:
        """Reads what is new; True where anything was. The status is read first, so that a state that is over has all its events."""
        changed = self._apply_object("status", current(self.folder))
        if "spec" not in self._known:
            changed |= self._apply_object("spec", RunFolder.read_json(self.folder.spec))
        for rank, path in self.folder.event_files().items():
            self._readers.setdefault(f"rank{rank}", Reader(path))
        broken = sum(reader.broken for reader in self._readers.values())
        for reader in self._readers.values():
            while self._fold(reader):
                changed = True
        self.state.broken += sum(reader.broken for reader in self._readers.values()) - broken
        return changed

    def _fold(self, reader: Reader) -> int:
        events = list(reader.poll())
        for event in events:
            self.state.apply(event)
        return len(events)

    def _apply_object(self, kind: str, value: dict[str, Any]) -> bool:
        if not value or self._known.get(kind) == value:
            return False
        self._known[kind] = value
        self.state.apply({"kind": kind, kind: value})
        return True
