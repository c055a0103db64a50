"""Follower: keeps a RunState up to date with a run folder, reading only what is new."""

from __future__ import annotations

from labkit.events import Reader
from labkit.launch.folder import RunFolder
from labkit.state import RunState


class Follower:
    """Folds a run folder's files into `state`; `poll` reads on where it stopped.

    An ended run is read by one call of `poll`, however long it was.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.state = RunState()
        self._readers: dict[str, Reader] = {"system": Reader(folder.system)}
        self._stamps: dict[str, int] = {}

    def poll(self) -> bool:
        """Reads what is new; True where anything was. The status is read first, so that a state that is over has all its events."""
        changed = self._poll_object("status", self.folder.status)
        changed |= self._poll_object("spec", self.folder.spec)
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

    def _poll_object(self, kind: str, path) -> bool:
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return False
        if self._stamps.get(kind) == stamp:
            return False
        value = RunFolder.read_json(path)
        if not value:
            return False
        self._stamps[kind] = stamp
        self.state.apply({"kind": kind, kind: value})
        return True
