"""Following a run: its current status, as written by the supervisor, or failed or lost if no supervisor is left to
write it; and where a RunState comes from. A `Follower` keeps it up to date with a run folder, reading only new data,
and a `Recording` replays a recorded run: the same events at the same times, so that front ends treat it like a live
run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import numpy
import psutil
from msgspec.structs import replace

from labkit.common.processes import here, is_same, is_supervisor, living, names, tag_of
from labkit.common.units import counted
from labkit.record.documents import Guesses, Imported, Plan, SpecFields, Status, Who
from labkit.record.events import Event, Recorded, Start
from labkit.record.folder import RunFolder
from labkit.record.reader import LIMITS, Block, Reader, column
from labkit.record.state import OVER, RunState
from labkit.record.writer import steps_path

# ---- the status of a run

# Seconds without any activity after which a run on another host counts as lost; clocks of hosts may differ by less.
QUIET = 120.0
_YOUNG = 60.0  # seconds during which a folder without a status may belong to a run that is starting
_TAIL = 1 << 14  # bytes at the end of system.jsonl that are searched for its last sample


def current_status(folder: RunFolder) -> Status:
    """The contents of `status.json`; for a run with neither a final state nor a supervisor, `failed` or `lost`, and
    why.

    `failed`: the supervisor was a process of this host and is gone, and so are its ranks. `lost`: how the run ended is
    unknown here, because it ran on another host or in another folder.
    """
    if folder.is_gone:
        return Status("lost", message="its run folder no longer exists: it was deleted or moved")
    status = folder.read_status()
    why = _lost(folder, status)
    if not why:
        return status
    status = folder.read_status()  # the final status may have been written in the meantime
    return status if status.state in OVER else replace(status, state=why[0], message=why[1])


def is_over(folder: RunFolder) -> bool:
    """Whether a run has ended, or was interrupted before it had a status."""
    status = current_status(folder)
    if status.state != "ready":
        return status.state in OVER
    return time.time() - folder.path.stat().st_mtime > _YOUNG


def is_abandoned(folder: RunFolder) -> bool:
    """Whether a run of this host has no final status and no process is left to write one."""
    return (_lost(folder, folder.read_status()) or ("", ""))[0] == "failed"


def is_here(status: Status) -> bool:
    """Whether the pids in a status belong to this host, this boot and this container."""
    who, host, boot = status.supervisor, here()["host"], here()["boot"]
    return who is not None and (who.host, who.boot or boot) == (host, boot)


def supervisor_of(folder: RunFolder, status: Status) -> psutil.Process | None:
    """The living supervisor of exactly this run, identified by its tag and command; None if there is none on this
    host."""
    who = status.supervisor
    process = living(who.pid) if who and is_here(status) else None
    return process if process is not None and names(tag_of(process), folder.path) and is_supervisor(process) else None


def hidden_supervisor(status: Status) -> psutil.Process | None:
    """The living process with the pid and start time in a status, if this user may not read its tag. It must never be
    signalled.
    """
    who = status.supervisor
    process = living(who.pid) if who and is_here(status) else None
    return (
        process
        if who and process is not None and tag_of(process) is None and is_same(process, who.pid, who.create_time)
        else None
    )


def _lost(folder: RunFolder, status: Status) -> tuple[Literal["failed", "lost"], str] | None:
    """The state and the message of a status that will never be completed; None for a run that is over or under way."""
    if status.state in ("ready", *OVER):
        return None
    who = status.supervisor
    if who is None or not is_here(status):
        return _quiet(folder, who)
    if supervisor_of(folder, status) is not None or hidden_supervisor(status) is not None:
        return None
    place = _place_of(who)
    if place:  # a folder that was moved will soon get its final status
        return (
            ("lost", f"this folder is a copy of {place}, where the run is under way") if Path(place).is_dir() else None
        )
    if folder.read_launch().is_scheduled:
        return _quiet(folder, who)  # the job of a scheduler continues without it
    return "failed", f"its supervisor (pid {who.pid}) was killed, which ended the run"


def _place_of(who: Who) -> str:
    """The run folder of the living supervisor of a status; empty if it is gone."""
    process = living(who.pid)
    return (
        (tag_of(process) or "")
        if process is not None and is_same(process, who.pid, who.create_time) and is_supervisor(process)
        else ""
    )


def _quiet(folder: RunFolder, who: Who | None) -> tuple[Literal["lost"], str] | None:
    """A running run on another host writes a sample five times per second; a copy of its folder is not written."""
    sample, times = _last_sample(folder), _written(folder)
    if any(abs(time.time() - sign) < QUIET for sign in (*sample, *times)):
        return None
    when = _in_words(min([*sample, max(times)]))
    host = (who and who.host) or "an unknown host"
    return "lost", f"it ran on {host} and has written nothing since {when}; how it ended is unknown"


def _last_sample(folder: RunFolder) -> list[float]:
    """The time of the supervisor's last sample, by the clock of its host, if there is one."""
    reader = folder.reader(folder.system)
    reader.skip_to(_TAIL)
    return [event.t for event in list(reader.poll())[-1:] if not isinstance(event, Block)]


def _written(folder: RunFolder) -> list[float]:
    """Modification times of the files that change while a run is under way, by the clock of the file system."""
    times = []
    events = folder.event_files().values()
    for path in (folder.status, folder.system, *events, *map(steps_path, events)):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return times or [0.0]


def _in_words(seconds: float) -> str:
    if not 0 < seconds < 1 << 33:
        return "an unknown time"
    return time.strftime("%d %B %Y, %H:%M", time.localtime(seconds)).lstrip("0")


# ---- a run that is followed

_DELETED = "the run folder was deleted or moved while the run was under way, so the run was stopped"
_NOTHING = {SpecFields: SpecFields(), Status: Status("ready")}
_PATIENCE = 1.0  # seconds before progress is reported
_TICK = 0.25  # seconds between two progress reports
_ROUNDING = 1e-6  # seconds: sums of Unix times are not more exact
_HEAD = 1 << 16  # bytes of a rank's events that are searched for its start


class Source(Protocol):
    """Provides the state of a run to a front end: a `Follower` of its folder, or a `Recording` that is replayed."""

    state: RunState
    progress: Callable[[float], None]  # called with the fraction that has been read, if reading takes long

    def poll(self) -> bool:
        """Folds new events into the state; True if there were any."""


def polled(source: Source, seconds: float, leave: Callable[[], bool]) -> Iterator[RunState]:
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
    `progress` is called repeatedly with the share of bytes read so far (0 to 1). `hear` is called with each event after
    it was folded in. If the folder disappears, what was read remains. `found` is whether the folder has ever existed.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: Callable[[float], None] = lambda share: None,
        hear: Callable[[Event | Block], None] = lambda event: None,
    ):
        self.folder = folder
        self.state = RunState()
        self.progress = progress
        self._hear = hear
        self._readers: dict[str, Reader] = {"system": folder.reader(folder.system)}
        self._known: dict[type, Recorded] = {}
        self._next_word = 0.0
        self.found = not folder.is_gone

    def poll(self) -> bool:
        """Reads new data; True if there was any. The status is read first, so that a finished state has all of its
        events.
        """
        if self.folder.is_gone:
            under_way = self.found and not self.state.over
            return under_way and self._apply(replace(self.state.status, state="failed", message=_DELETED))
        self.found = True
        self._next_word = time.monotonic() + _PATIENCE
        changed = self._apply(current_status(self.folder))
        if SpecFields not in self._known:
            for document in _documents(self.folder):
                changed |= self._apply(document)
        for rank, path in self.folder.event_files().items():
            if f"rank{rank}" not in self._readers:
                self._readers[f"rank{rank}"] = self.folder.reader(path)
        readers = self._readers.values()
        broken = sum(reader.broken for reader in readers)
        for reader in readers:
            more = True
            while more:
                for event in reader.poll():
                    self.state.apply(event)
                    self._hear(event)
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

    def _apply(self, document: SpecFields | Status | Plan | Guesses | Imported) -> bool:
        """Applies a document if it says something new."""
        if document == self._known.get(type(document), _NOTHING.get(type(document))):
            return False
        self._known[type(document)] = document
        self.state.apply(document)
        return True


def _documents(folder: RunFolder) -> list[SpecFields | Plan | Guesses | Imported]:
    """What a run folder says before the first event."""
    documents = (folder.read_spec(), folder.read_prediction(), folder.read_guess(), folder.read_imported())
    return [document for document in documents if document is not None]


# ---- replay


class Recording:
    """Folds the events of a recorded run into `state` as time passes since the first `poll`, at `speed` times real
    time; `seek` goes to any moment.

    The final status is applied when all events have been replayed; until then the status is running. `speed` may be
    changed at any time; after `stop` the replay pauses until the next `poll`. Events are read when they are due, never
    all at once. A step back begins again with a new `state`.
    """

    def __init__(self, folder: RunFolder, speed: float = 1.0):
        self.folder = folder
        self.speed = speed
        # Events are read when they are due, so there is no progress to report.
        self.progress: Callable[[float], None] = lambda share: None
        self._status = current_status(folder)  # the final one
        self._looked: float | None = None
        self._rewind()
        begins = [stream.due for stream in self._streams if stream.due < math.inf]
        begins += [self._status.started] if self._status.started else []
        self.began = self._at = min(begins, default=0.0)  # in the time of the recording

    def _rewind(self) -> None:
        """Goes back before the first event."""
        folder, span = self.folder, (self._status.started or 0.0, self._status.ended or math.inf)
        self.state = RunState()
        self._last: Status | None = self._status  # until it was applied
        self._begun = False
        self._readers = [folder.reader(path) for path in (*folder.event_files().values(), folder.system)]
        self._streams = [_Stream(reader, span) for reader in self._readers]

    def poll(self) -> bool:
        """Folds in all events that are due; True if there were any."""
        now = time.monotonic()
        before, self._looked = self._looked, now  # read once: another thread may call `stop`
        self._at += (now - before) * self.speed if before is not None else 0.0
        return self._fold()

    def stop(self) -> None:
        """Pauses the replay until the next `poll`."""
        self._looked = None

    def seek(self, position: float) -> None:
        """Goes to a moment, in seconds since the run began; a later `poll` continues from there."""
        moment = self.began + position + _ROUNDING
        if moment < self._at:
            self._rewind()
        self._at, self._looked = moment, None
        self._fold()

    def to_end(self) -> Iterator[tuple[Event | Block, numpy.ndarray]]:
        """Goes to the end of the run; yields each event that is folded in, and when it is due, in seconds since the run
        began: one time, or those of the steps of a block."""
        self._at, self._looked = math.inf, None
        for event, times in self._folded():
            yield event, times - self.began

    def _fold(self) -> bool:
        before = self.state.revision
        for _ in self._folded():
            pass
        return self.state.revision != before

    def _folded(self) -> Iterator[tuple[Event | Block, numpy.ndarray]]:
        self._begin()
        broken = sum(reader.broken for reader in self._readers)
        for stream in self._streams:
            for event, times in stream.take(self._at):
                self.state.apply(event)
                yield event, times
        self.state.broken += sum(reader.broken for reader in self._readers) - broken
        if (
            self._last is not None
            and all(stream.due == math.inf for stream in self._streams)
            and self._at >= (self._last.ended or 0.0)
        ):
            self.state.apply(self._last)
            self._last = None

    def _begin(self) -> None:
        """Folds in the Spec, the predictions and the initial status, once."""
        if self._begun or self._last is None:
            return
        self._begun = True
        # in the lines that the streams have read already
        self.state.broken += sum(reader.broken for reader in self._readers)
        for document in _documents(self.folder):
            self.state.apply(document)
        self.state.apply(replace(self._last, state="running", ended=None, failures=None))


class _Stream:
    """The events of one file in order. `due` is the time of the next event; infinite after the last.

    An event earlier than its predecessor (because a clock was set back) is due at the same time as it. All times are
    clamped to the `span` of the run, so that no wrong time blocks a replay.
    """

    def __init__(self, reader: Reader, span: tuple[float, float]):
        self._events = _all(reader)
        self._span = span
        self._next: Event | Block | None = None
        self._times = numpy.empty(0)
        self._now = -math.inf
        self.due = math.inf
        self._advance()

    def take(self, until: float) -> Iterator[tuple[Event | Block, numpy.ndarray]]:
        """The events that are due at `until`, and when they are; a block of steps is split there."""
        while self._next is not None and self.due <= until:
            event, times = self._next, self._times
            if isinstance(event, Block):
                count = int(numpy.searchsorted(times, until, side="right"))
                if count < len(event):
                    self._next, self._times = event.part(count, len(event)), times[count:]
                    self.due = float(self._times[0])
                    yield event.part(0, count), times[:count]
                    return
                self._now = float(times[-1])
            self._advance()
            yield event, times

    def _advance(self) -> None:
        self._next = next(self._events, None)
        if self._next is None:
            self.due = math.inf
            return
        event = self._next
        times = column(event.records, "t") if isinstance(event, Block) else numpy.array([event.t])
        start, end = self._span
        least, most, _ = LIMITS["t"]
        valid = numpy.where((times >= least) & (times < most), times, start)  # NaN is not
        self._times = numpy.maximum.accumulate(numpy.clip(valid, max(start, self._now), max(end, start, self._now)))
        self.due = float(self._times[0])
        if not isinstance(self._next, Block):
            self._now = self.due


def is_recorded(folder: RunFolder) -> bool:
    """Whether a run is over and can be replayed."""
    return current_status(folder).state in OVER


def recorded_words(folder: RunFolder) -> str:
    """When and where a run was recorded: `recorded on 20 November 2026, 23:42, on 2 CPU ranks of teacher-laptop`."""
    spec, started = folder.read_spec(), folder.read_status().started
    begun = [start for path in folder.event_files().values() for start in _starts(folder, path)[:1]]
    when = _in_words(started) if started else "an unknown day"
    names = [start.device_name or "GPU" for start in begun if start.device.startswith("cuda")]
    number = spec.nproc or len(begun)
    gpus = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    where = gpus or counted(number, "CPU rank")
    hosts = dict.fromkeys(start.host for start in begun if start.host)
    said = f"recorded on {when}, on {where}" + (f" of {', '.join(hosts)}" if hosts else "")
    return said if folder.read_imported() is None else said.replace("recorded", "imported; ran", 1)


def torch_of(folder: RunFolder) -> str:
    """The version of torch of a run's ranks; empty if none of them has started."""
    begun = (start for path in folder.event_files().values() for start in _starts(folder, path))
    return next((start.torch for start in begun if start.torch), "")


def _starts(folder: RunFolder, path: Path) -> list[Start]:
    return [event for event in folder.reader(path).poll(_HEAD) if isinstance(event, Start)]


def _all(reader: Reader) -> Iterator[Event | Block]:
    more = True
    while more:
        yield from reader.poll()
        more = reader.more
