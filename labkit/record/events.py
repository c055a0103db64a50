"""Events: append-only files, two per rank. The envelope, the writer, and a reader that tolerates broken lines.

The run folder is the only link between the ranks and the front ends, so this module is the whole protocol. Every rank
imports it: standard library only.

`events/rankN.jsonl` has one JSON object per line. Step events go to `events/rankN.steps`, one binary record each
(`stepfile.py` has the layout), because a long run has millions of them. A step event that does not fit a record is a
JSON line, as all step events were in older versions. In each line, `after` is the number of records in the step file
when the line was written (default: 0), which defines a common order of the two files.

`system.jsonl` holds the samples of the supervisor, and its reports of ranks that cannot report themselves. The types in
`labkit.record.types` say which kinds of events are written today, and which fields they have.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypedDict, cast, overload

from labkit.record import clock, stepfile
from labkit.record.appender import Appender
from labkit.record.stepfile import PHASES, Block, StepFile
from labkit.record.stepwriter import StepWriter, packed

if TYPE_CHECKING:
    from labkit.record.kinds import Event

__all__ = ["OWNERS", "PHASES", "REPORT", "STARTUP", "VERSION", "Block", "Reader", "Writer"]

VERSION = 1
REPORT = "labkit.report"  # the torch.monitor event that becomes a `report`; its field `values` is JSON
LONGEST = 32 << 20  # most bytes of one event: a longer line counts as broken
STARTUP = ("group", "data", "batch")  # names of `startup` events
OWNERS = ("parameters", "gradients", "optimizer", "activations", "communication", "other")


_NOT_IN_FILES = ("steps", "spec", "status")  # kinds that only readers create
_MOST_STEPS = 2**53  # largest valid value of `after`
_BLOCK = 1 << 15  # records read at once


class StepBlock(TypedDict):
    """Consecutive steps of a rank, as `Reader` returns them: an event that no file contains."""

    v: int
    kind: Literal["steps"]
    rank: int
    block: Block


class Writer:
    """Appends events to one file, each in one write, so that readers see complete lines and a kill loses none.

    Threads may share a writer. With a `rank`, step events go to the step file next to it. `size` is the size of the
    lines in bytes.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None):
        self._head = {"v": VERSION, "t": 0.0} | ({} if rank is None else {"rank": rank})
        self._lines = Appender(path)
        self.size = Path(path).stat().st_size
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=True, default=str).encode
        self._steps = None if rank is None else _step_writer(path, rank)

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event with the current time, unless `t` is given. Raises `OSError` if it is lost, as on a full
        disk.
        """
        if kind == "step" and self._steps is not None:
            record = packed(fields.get("t", clock.now()), fields)
            if record is not None:
                self._steps.write(record)
                return
        after = {"after": self._steps.count} if self._steps is not None and self._steps.count else {}
        line = self._encode(self._head | {"t": clock.now()} | after | {"kind": kind} | fields).encode() + b"\n"
        self._lines.append(line)
        self.size += len(line)

    def close(self) -> None:
        """Closes the files; everything has been written already."""
        self._lines.close()
        if self._steps is not None:
            self._steps.close()


def _step_writer(path: str | os.PathLike[str], rank: int) -> StepWriter | None:
    try:
        return StepWriter(stepfile.steps_path(path), rank)
    except OSError:
        return None  # the existing file is not a valid step file: write steps as JSON lines


class Reader:
    """Reads JSON lines and, next to a rank's file, its steps, in the order in which they were written; continues where
    it stopped.

    A half-written last line or record is read once it is complete; a broken one is counted, never fatal. `opened` opens
    a file, and `parsed` parses a line, or returns None if it is broken: a `RunFolder` passes functions that trust
    nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb"),
        parsed: Callable[[bytes], Event | None] | None = None,
    ):
        self.path = Path(path)
        self.broken = 0
        self._opened, self._parsed = opened, parsed or parse
        self._steps = StepFile(stepfile.steps_path(path), opened)
        self._taken = 0  # records read of the step file
        self._offset = 0
        self._rest = b""
        self._too_long = False  # whether the current line is skipped
        self._at_end = True
        self._has_gap = False

    def skip_to(self, last: int) -> None:
        """Skips all but the `last` bytes of lines; a line that is cut by this counts as broken."""
        with contextlib.suppress(OSError):
            self._offset = max(0, self.path.stat().st_size - last)
            self._taken = self._steps.whole()

    @overload
    def poll(self, limit: int = ..., blocks: Literal[False] = ...) -> Iterator[Event]: ...

    @overload
    def poll(self, limit: int = ..., *, blocks: Literal[True]) -> Iterator[Event | StepBlock]: ...

    def poll(self, limit: int = 4 << 20, blocks: bool = False) -> Iterator[Event | StepBlock]:
        """The events since the last call, from at most `limit` bytes of lines.

        With `blocks`, consecutive steps are one event of kind `steps` with an unparsed `block`.
        """
        known = self._steps.whole()  # read first: a line read now was not written before steps that are read later
        for event in self._new_lines(limit):
            after = event.get("after", 0)
            if isinstance(after, int) and self._taken < after <= _MOST_STEPS:
                yield from self._steps_up_to(after, blocks)
                self._note_gap(self._taken < after)
            yield event
        if self._at_end:
            yield from self._steps_up_to(known, blocks)
            self._note_gap(bool(self._steps.unreadable))

    @property
    def more(self) -> bool:
        """Whether the last poll stopped at its limit, so that there may be more to read."""
        return not self._at_end

    @property
    def position(self) -> int:
        """The bytes read so far, of both files."""
        return self._offset + (self._taken * self._steps.layout.size if self._steps.layout else 0)

    @property
    def size(self) -> int:
        """The current size of both files in bytes."""
        try:
            return self.path.stat().st_size + self._steps.size
        except OSError:
            return self._steps.size

    def _new_lines(self, limit: int) -> Iterator[Event]:
        self._at_end = True
        try:
            with self._opened(self.path) as file:
                file.seek(self._offset)
                block = file.read(limit)
        except OSError:
            return
        self._at_end = len(block) < limit
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if self._too_long and lines:
            self._too_long = False
            del lines[0]
        for line in lines:
            event = self._event(line)
            if event is not None and event["kind"] not in _NOT_IN_FILES:
                yield event
        if len(self._rest) > LONGEST or self._too_long:
            self.broken += not self._too_long
            self._rest, self._too_long = b"", True

    def _steps_up_to(self, last: int, blocks: bool) -> Iterator[Event | StepBlock]:
        if self._steps.layout is None:
            self._steps.whole()  # the file was created after the poll started
        while self._taken < last and self._steps.layout:
            block = Block(self._steps, self._taken, self._steps.read(self._taken, min(_BLOCK, last - self._taken)))
            if not len(block):
                return
            self._taken += len(block)
            if blocks:
                yield {"v": VERSION, "kind": "steps", "rank": block.layout.rank, "block": block}
                continue
            for event in stepfile.events(block):
                self.broken += event is None
                if event is not None:
                    yield event

    def _note_gap(self, found: bool) -> None:
        """Counts a truncated, missing or unreadable step file as one broken line."""
        if found and not self._has_gap:
            self._has_gap = True
            self.broken += 1

    def _event(self, line: bytes) -> Event | None:
        if not line.strip():
            return None
        event = self._parsed(line)
        self.broken += event is None
        return event


def parse(line: bytes) -> Event | None:
    """The event of one line, unchecked; None if it is broken."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("t"), (int, float))
    return cast("Event", event) if whole else None
