"""Follower: keeps a RunState up to date with a run folder, reading only new data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from labkit.record.events import Reader
from labkit.record.folder import RunFolder
from labkit.record.state import RunState
from labkit.record.status import current

_DELETED = {
    "state": "failed",
    "message": "the run folder was deleted or moved while the run was under way, so the run was stopped",
}
_PATIENCE = 1.0  # seconds before progress is reported
_TICK = 0.25  # seconds between two progress reports


class Source(Protocol):
    """Provides the state of a run to a front end: a `Follower` of its folder, or a `Recording` that is replayed."""

    state: RunState
    progress: Callable[[float], None]  # called with the fraction that has been read, if reading takes long

    def poll(self) -> bool:
        """Folds new events into the state; True if there were any."""


def polled(source: Source, seconds: float, leave: Callable[[], bool] = lambda: False) -> Iterator[RunState]:
    """The state after each poll, every `seconds`, until the run is over or `leave` returns True; the final state is
    read, but not yielded."""
    source.poll()
    while not (source.state.over or leave()):
        yield source.state
        time.sleep(seconds)
        source.poll()


class Follower:
    """Folds the files of a run folder into `state`; `poll` continues where it stopped.

    One call of `poll` reads a finished run completely, however long it was. If a call takes longer than a second,
    `progress` is called repeatedly with the share of bytes read so far (0 to 1). If the folder disappears, what was
    read remains. `found` is whether the folder has ever existed.
    """

    def __init__(self, folder: RunFolder, progress: Callable[[float], None] = lambda share: None):
        self.folder = folder
        self.state = RunState()
        self.progress = progress
        self._readers: dict[str, Reader] = {"system": folder.reader(folder.system)}
        self._known: dict[str, Mapping[str, Any]] = {}
        self._next_word = 0.0
        self.found = not folder.is_gone

    def poll(self) -> bool:
        """Reads new data; True if there was any. The status is read first, so that a finished state has all of its
        events.
        """
        if self.folder.is_gone:
            under_way = self.found and not self.state.over
            return under_way and self._apply_object("status", self.state.status | _DELETED)
        self.found = True
        self._next_word = time.monotonic() + _PATIENCE
        changed = self._apply_object("status", current(self.folder))
        if "spec" not in self._known:
            changed |= self._apply_object("spec", self.folder.read_spec())
            changed |= self._apply_object("prediction", RunFolder.read_json(self.folder.prediction))
            changed |= self._apply_object("guess", RunFolder.read_json(self.folder.guess))
        for rank, path in self.folder.event_files().items():
            if f"rank{rank}" not in self._readers:
                self._readers[f"rank{rank}"] = self.folder.reader(path)
        readers = self._readers.values()
        broken = sum(reader.broken for reader in readers)
        for reader in readers:
            more = True
            while more:
                for event in reader.poll(blocks=True):
                    self.state.apply(event)
                    changed = True
                    self._tell()
                more = reader.more
        self.state.broken += sum(reader.broken for reader in readers) - broken
        return changed

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._next_word:
            self._next_word = now + _TICK
            self.progress(self.share)

    @property
    def share(self) -> float:
        """The share of bytes read so far, from 0 to 1."""
        size = sum(reader.size for reader in self._readers.values())
        return min(1.0, sum(reader.position for reader in self._readers.values()) / size) if size else 1.0

    def _apply_object(self, kind: str, value: Mapping[str, Any]) -> bool:
        if not value or self._known.get(kind) == value:
            return False
        self._known[kind] = value
        self.state.apply({"kind": kind, kind: value})
        return True
