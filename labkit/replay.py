"""A recorded run that plays again: the same events at their own times, so that a face cannot tell it from a live one."""

from __future__ import annotations

import time
from typing import Any

from labkit.events import Reader
from labkit.launch.folder import RunFolder
from labkit.launch.status import current
from labkit.state import RunState


class Recording:
    """Folds a recorded run's events into `state` as the time since the first `poll` goes on, at `speed` times their own.

    The last status comes at the time when the run was over; until then it reads as running.
    """

    def __init__(self, folder: RunFolder, speed: float = 1.0):
        self.state = RunState()
        self._speed = speed
        self._began: float | None = None
        readers = [Reader(path) for path in (*folder.event_files().values(), folder.system)]
        self._events = sorted(_events(folder, readers), key=lambda event: event["t"])
        self.state.broken = sum(reader.broken for reader in readers)
        self._next = 0

    def poll(self) -> bool:
        """Folds in what is due by now; True where anything was."""
        if self._began is None:
            self._began = time.monotonic()
        first = self._next
        due = self._events[0]["t"] + (time.monotonic() - self._began) * self._speed
        while self._next < len(self._events) and self._events[self._next]["t"] <= due:
            self.state.apply(self._events[self._next])
            self._next += 1
        return self._next > first


def _events(folder: RunFolder, readers: list[Reader]) -> list[dict[str, Any]]:
    status = current(folder)
    events = [event for reader in readers for event in _all(reader)]
    times = [event["t"] for event in events] + [status[name] for name in ("started", "ended") if status.get(name)]
    running = status | {"state": "running", "ended": None, "failures": {}}
    return [
        {"kind": "spec", "t": min(times, default=0.0), "spec": RunFolder.read_json(folder.spec)},
        {"kind": "status", "t": min(times, default=0.0), "status": running},
        *events,
        {"kind": "status", "t": max(times, default=0.0), "status": status},
    ]


def _all(reader: Reader) -> list[dict[str, Any]]:
    events = []
    while block := list(reader.poll()):
        events += block
    return events
