"""A recorded run that plays again: the same events at their own times, so that a face cannot tell it from a live one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from labkit.events import Reader
from labkit.launch.folder import RunFolder
from labkit.launch.status import current
from labkit.state import OVER, RunState

_HEAD = 1 << 16  # bytes of a rank's events in which its start is looked for


class Recording:
    """Folds a recorded run's events into `state` as time goes on from the first `poll`, at `speed` times their own.

    The last status comes at the time when the run was over; until then it reads as running. `speed` may be changed at any moment;
    after `stop` the recording stands still until it is polled again.
    """

    def __init__(self, folder: RunFolder, speed: float = 1.0):
        self.folder = folder
        self.speed = speed
        self.state = RunState()
        readers = [Reader(path) for path in (*folder.event_files().values(), folder.system)]
        self._events = sorted(_events(folder, readers), key=lambda event: event["t"])
        self.state.broken = sum(reader.broken for reader in readers)
        self._next = 0
        self._at = self._events[0]["t"]  # how far it has been played, in the recording's own time
        self._looked: float | None = None

    def poll(self) -> bool:
        """Folds in what is due by now; True where anything was."""
        now = time.monotonic()
        self._at += (now - self._looked) * self.speed if self._looked is not None else 0.0
        self._looked = now
        first = self._next
        while self._next < len(self._events) and self._events[self._next]["t"] <= self._at:
            self.state.apply(self._events[self._next])
            self._next += 1
        return self._next > first

    def stop(self) -> None:
        """The time until the next `poll` does not count."""
        self._looked = None


def is_recorded(folder: RunFolder) -> bool:
    """Whether a run is over, and so can be played."""
    return current(folder).get("state") in OVER


def recorded_words(folder: RunFolder) -> str:
    """When and where a run was recorded: `recorded on 20 November 2026, 23:42, on 2 CPU ranks of teacher-laptop`."""
    spec, started = RunFolder.read_json(folder.spec), RunFolder.read_json(folder.status).get("started")
    begun = [event for path in folder.event_files().values() for event in _starts(path)[:1]]
    when = time.strftime("%d %B %Y, %H:%M", time.localtime(started)).lstrip("0") if started else "a day that is not known"
    names = [str(event.get("device_name") or "GPU") for event in begun if str(event.get("device", "")).startswith("cuda")]
    number = spec.get("nproc") or len(begun)
    counted = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    where = counted or f"{number} CPU rank{'' if number == 1 else 's'}"
    hosts = dict.fromkeys(str(event["host"]) for event in begun if event.get("host"))
    return f"recorded on {when}, on {where}" + (f" of {', '.join(hosts)}" if hosts else "")


def _starts(path: Path) -> list[dict[str, Any]]:
    return [event for event in Reader(path).poll(_HEAD) if event["kind"] == "start"]


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
