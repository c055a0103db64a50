"""Replay of a recorded run: the same events at the same times, so that front ends treat it like a live run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

from labkit.record.events import Reader, StepBlock
from labkit.record.folder import RunFolder
from labkit.record.kinds import Event
from labkit.record.state import OVER, RunState
from labkit.record.status import current
from labkit.record.stepfile import LIMITS, Block
from labkit.record.steps import column
from labkit.record.types.documents import KnownStatus
from labkit.record.types.reported import Start

_HEAD = 1 << 16  # bytes of a rank's events that are searched for its start


class Recording:
    """Folds the events of a recorded run into `state` as time passes since the first `poll`, at `speed` times real
    time.

    The final status is applied when all events have been replayed; until then the status is running. `speed` may be
    changed at any time; after `stop` the replay pauses until the next `poll`. Events are read when they are due, never
    all at once.
    """

    def __init__(self, folder: RunFolder, speed: float = 1.0):
        self.folder = folder
        self.speed = speed
        self.state = RunState()
        # Events are read when they are due, so there is no progress to report.
        self.progress: Callable[[float], None] = lambda share: None
        self._readers = [folder.reader(path) for path in (*folder.event_files().values(), folder.system)]
        status = current(folder)
        self._last: KnownStatus | None = status  # the final status, until it was applied
        span = status.get("started") or 0.0, status.get("ended") or math.inf
        self._streams = [_Stream(reader, span) for reader in self._readers]
        begins = [stream.due for stream in self._streams if stream.due < math.inf]
        begins += [span[0]] if span[0] else []
        self._at = min(begins, default=0.0)  # the current position, in the time of the recording
        self._looked: float | None = None
        self._begun = False

    def poll(self) -> bool:
        """Folds in all events that are due; True if there were any."""
        now = time.monotonic()
        before, self._looked = self._looked, now  # read once: another thread may call `stop`
        self._at += (now - before) * self.speed if before is not None else 0.0
        changed = not self._begun
        self._begin()
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
        """Pauses the replay until the next `poll`."""
        self._looked = None

    def _begin(self) -> None:
        """Folds in the Spec, the predictions and the initial status, once."""
        if self._begun or self._last is None:
            return
        self._begun = True
        self.state.broken += sum(
            reader.broken for reader in self._readers
        )  # in the lines that the streams have read already
        self.state.apply({"kind": "spec", "spec": self.folder.read_spec()})
        for kind, path in (("prediction", self.folder.prediction), ("guess", self.folder.guess)):
            if found := RunFolder.read_json(path):
                self.state.apply({"kind": kind, kind: found})
        self.state.apply({"kind": "status", "status": self._last | {"state": "running", "ended": None, "failures": {}}})


class _Stream:
    """The events of one file in order. `due` is the time of the next event; infinite after the last.

    An event earlier than its predecessor (because a clock was set back) is due at the same time as it. All times are
    clamped to the `span` of the run, so that no wrong time blocks a replay.
    """

    def __init__(self, reader: Reader, span: tuple[float, float]):
        self._events = _all(reader)
        self._span = span
        self._next: Event | StepBlock | None = None
        self._times = numpy.empty(0)
        self._now = -math.inf
        self.due = math.inf
        self._advance()

    def take(self, until: float) -> Iterator[Event | StepBlock]:
        """The events that are due at `until`; a block of steps is split there."""
        while self._next is not None and self.due <= until:
            event = self._next
            if event["kind"] == "steps":
                block = event["block"]
                count = int(numpy.searchsorted(self._times, until, side="right"))
                if count < len(block):
                    self._next, self._times = _with(event, block.part(count, len(block))), self._times[count:]
                    self.due = float(self._times[0])
                    yield _with(event, block.part(0, count))
                    return
                self._now = float(self._times[-1])
            self._advance()
            yield event

    def _advance(self) -> None:
        self._next = next(self._events, None)
        if self._next is None:
            self.due = math.inf
            return
        if self._next["kind"] == "steps":
            times = column(self._next["block"], "t")
        else:
            times = numpy.array([self._next["t"]], float)
        start, end = self._span
        least, most, _ = LIMITS["t"]
        valid = numpy.where((times >= least) & (times < most), times, start)  # NaN is not
        self._times = numpy.maximum.accumulate(numpy.clip(valid, max(start, self._now), max(end, start, self._now)))
        self.due = float(self._times[0])
        if self._next["kind"] != "steps":
            self._now = self.due


def is_recorded(folder: RunFolder) -> bool:
    """Whether a run is over and can be replayed."""
    return current(folder).get("state") in OVER


def recorded_words(folder: RunFolder) -> str:
    """When and where a run was recorded: `recorded on 20 November 2026, 23:42, on 2 CPU ranks of teacher-laptop`."""
    spec, started = folder.read_spec(), folder.read_status().get("started")
    begun = [event for path in folder.event_files().values() for event in _starts(folder, path)[:1]]
    when = time.strftime("%d %B %Y, %H:%M", time.localtime(started)).lstrip("0") if started else "an unknown day"
    names = [
        str(event.get("device_name") or "GPU") for event in begun if str(event.get("device", "")).startswith("cuda")
    ]
    number = spec.get("nproc") or len(begun)
    counted = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    where = counted or f"{number} CPU rank{'' if number == 1 else 's'}"
    hosts = dict.fromkeys(str(event["host"]) for event in begun if event.get("host"))
    return f"recorded on {when}, on {where}" + (f" of {', '.join(hosts)}" if hosts else "")


def _starts(folder: RunFolder, path: Path) -> list[Start]:
    return [event for event in folder.reader(path).poll(_HEAD) if event["kind"] == "start"]


def _with(steps: StepBlock, block: Block) -> StepBlock:
    return {"v": steps["v"], "kind": "steps", "rank": steps["rank"], "block": block}


def _all(reader: Reader) -> Iterator[Event | StepBlock]:
    more = True
    while more:
        yield from reader.poll(blocks=True)
        more = reader.more
