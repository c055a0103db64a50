"""A recorded run that plays again: the same events at their own times, so that a front end cannot tell it from a live one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from labkit.record.events import Reader
from labkit.record.folder import RunFolder
from labkit.record.state import OVER, RunState
from labkit.record.status import current
from labkit.record.stepfile import LIMITS
from labkit.record.steps import column

_HEAD = 1 << 16  # bytes of a rank's events in which its start is looked for


class Recording:
    """Folds a recorded run's events into `state` as time goes on from the first `poll`, at `speed` times their own.

    The last status comes when all events were played and the run was over; until then it reads as running. `speed` may be changed at any
    moment; after `stop` the recording stands still until it is polled again. Events are read as they are due, never all at once.
    """

    def __init__(self, folder: RunFolder, speed: float = 1.0):
        self.folder = folder
        self.speed = speed
        self.state = RunState()
        self.progress = lambda share: None  # events are read as they are due: nobody waits
        self._readers = [folder.reader(path) for path in (*folder.event_files().values(), folder.system)]
        self._last: dict[str, Any] | None = current(folder)  # the final status, until it was played
        span = self._last.get("started") or 0.0, self._last.get("ended") or math.inf
        self._streams = [_Stream(reader, span) for reader in self._readers]
        begins = [stream.due for stream in self._streams if stream.due < math.inf]
        begins += [self._last["started"]] if self._last.get("started") else []
        self._at = min(begins, default=0.0)  # how far it has been played, in the recording's own time
        self._looked: float | None = None
        self._begun = False

    def poll(self) -> bool:
        """Folds in what is due by now; True where anything was."""
        now = time.monotonic()
        self._at += (now - self._looked) * self.speed if self._looked is not None else 0.0
        self._looked = now
        changed = self._begin()
        broken = sum(reader.broken for reader in self._readers)
        for stream in self._streams:
            for event in stream.take(self._at):
                self.state.apply(event)
                changed = True
        self.state.broken += sum(reader.broken for reader in self._readers) - broken
        if (
            self._last is not None
            and all(stream.due == math.inf for stream in self._streams)
            and self._at >= (self._last.get("ended") or 0.0)
        ):
            self.state.apply({"kind": "status", "status": self._last})
            self._last, changed = None, True
        return changed

    def stop(self) -> None:
        """The time until the next `poll` does not count."""
        self._looked = None

    def _begin(self) -> bool:
        """Folds in what was known before the first event; False from the second call on."""
        if self._begun:
            return False
        self._begun = True
        self.state.broken += sum(reader.broken for reader in self._readers)  # in what the streams have looked at already
        self.state.apply({"kind": "spec", "spec": RunFolder.read_json(self.folder.spec)})
        self.state.apply({"kind": "status", "status": self._last | {"state": "running", "ended": None, "failures": {}}})
        return True


class _Stream:
    """The events of one file in their order. `due` is when the next one is; infinite after the last.

    An event whose time is before that of its predecessor (a clock that was set back) is due with it, and every event within the `span` of
    the run, so that no wrong time keeps a replay waiting.
    """

    def __init__(self, reader: Reader, span: tuple[float, float]):
        self._events = _all(reader)
        self._span = span
        self._next: dict[str, Any] | None = None
        self._now = -math.inf
        self.due = math.inf
        self._advance()

    def take(self, until: float) -> Iterator[dict[str, Any]]:
        """The events that are due; of a block of steps, those that are."""
        while self._next is not None and self.due <= until:
            event = self._next
            if event["kind"] == "steps":
                block = event["block"]
                count = int(numpy.searchsorted(self._times, until, side="right"))
                if count < len(block):
                    self._next, self._times = event | {"block": block.part(count, len(block))}, self._times[count:]
                    self.due = float(self._times[0])
                    yield event | {"block": block.part(0, count)}
                    return
                self._now = float(self._times[-1])
            self._advance()
            yield event

    def _advance(self) -> None:
        self._next = next(self._events, None)
        if self._next is None:
            self.due = math.inf
            return
        steps = self._next["kind"] == "steps"
        times = column(self._next["block"], "t") if steps else numpy.array([self._next["t"]], float)
        start, end = self._span
        least, most, _ = LIMITS["t"]
        valid = numpy.where((times >= least) & (times < most), times, start)  # NaN is not
        self._times = numpy.maximum.accumulate(numpy.clip(valid, max(start, self._now), max(end, start, self._now)))
        self.due = float(self._times[0])
        if not steps:
            self._now = self.due


def is_recorded(folder: RunFolder) -> bool:
    """Whether a run is over, and so can be played."""
    return current(folder).get("state") in OVER


def recorded_words(folder: RunFolder) -> str:
    """When and where a run was recorded: `recorded on 20 November 2026, 23:42, on 2 CPU ranks of teacher-laptop`."""
    spec, started = RunFolder.read_json(folder.spec), RunFolder.read_json(folder.status).get("started")
    begun = [event for path in folder.event_files().values() for event in _starts(folder, path)[:1]]
    when = time.strftime("%d %B %Y, %H:%M", time.localtime(started)).lstrip("0") if started else "a day that is not known"
    names = [str(event.get("device_name") or "GPU") for event in begun if str(event.get("device", "")).startswith("cuda")]
    number = spec.get("nproc") or len(begun)
    counted = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    where = counted or f"{number} CPU rank{'' if number == 1 else 's'}"
    hosts = dict.fromkeys(str(event["host"]) for event in begun if event.get("host"))
    return f"recorded on {when}, on {where}" + (f" of {', '.join(hosts)}" if hosts else "")


def _starts(folder: RunFolder, path: Path) -> list[dict[str, Any]]:
    return [event for event in folder.reader(path).poll(_HEAD) if event["kind"] == "start"]


def _all(reader: Reader) -> Iterator[dict[str, Any]]:
    more = True
    while more:
        yield from reader.poll(blocks=True)
        more = reader.more
