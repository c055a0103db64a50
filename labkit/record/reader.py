"""Reading the events of a run while they are written: both files of a rank, in the order of writing.

`writer.py` says what is in them. A half-written last line or record is read once it is complete; a broken one is
counted, never fatal.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from labkit.record.events import Event, decoded
from labkit.record.steps import Block, StepFile
from labkit.record.writer import steps_path

LONGEST = 32 << 20  # most bytes of one event: a longer line counts as broken
_BLOCK = 1 << 15  # records read at once


class Reader:
    """Reads JSON lines and, next to a rank's file, its steps; continues where it stopped. Steps are blocks of records.

    `broken` counts what could not be read. `opened` opens a file: a `RunFolder` passes a function that opens nothing
    outside of it.
    """

    def __init__(self, path: str | os.PathLike[str], opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")):
        self.path = Path(path)
        self.broken = 0
        self._opened = opened
        self._steps = StepFile(steps_path(path), opened)
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

    def poll(self, limit: int = 4 << 20) -> Iterator[Event | Block]:
        """The events since the last call, from at most `limit` bytes of lines."""
        known = self._steps.whole()  # read first: a line read now was not written before steps that are read later
        for event in self._new_lines(limit):
            after = getattr(event, "after", None)
            if isinstance(after, int) and self._taken < after:
                yield from self._steps_up_to(after)
                self._note_gap(self._taken < after)
            yield event
        if self._at_end:
            yield from self._steps_up_to(known)
            self._note_gap(bool(self._steps.unreadable))

    @property
    def more(self) -> bool:
        """Whether the last poll stopped at its limit, so that there may be more to read."""
        return not self._at_end

    @property
    def position(self) -> int:
        """The bytes read so far, of both files."""
        return self._offset + (self._taken * self._steps.dtype.itemsize if self._steps.dtype else 0)

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
                if self._too_long:
                    self._offset = _next_data(file, self._offset)
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
            event = decoded(line) if line.strip() else None
            if event is not None:
                yield event
            elif line.strip():
                self.broken += 1
        if len(self._rest) > LONGEST or self._too_long:
            self.broken += not self._too_long
            self._rest, self._too_long = b"", True

    def _steps_up_to(self, last: int) -> Iterator[Block]:
        if self._steps.dtype is None:
            self._steps.whole()  # the file was created after the poll started
        while self._taken < last and self._steps.dtype:
            records = self._steps.read(self._taken, min(_BLOCK, last - self._taken))
            if not len(records):
                return
            self._taken += len(records)
            yield Block(self._steps, self._taken - len(records), records)

    def _note_gap(self, found: bool) -> None:
        """Counts a truncated, missing or unreadable step file as one broken line."""
        if found and not self._has_gap:
            self._has_gap = True
            self.broken += 1


def _next_data(file: BinaryIO, offset: int) -> int:
    """Where a file has data again, from `offset` on: a hole, such as in a sparse file of terabytes, has no end of a
    line."""
    if not hasattr(os, "SEEK_DATA"):  # on Windows
        return offset
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        return file.seek(0, os.SEEK_END) if error.errno == errno.ENXIO else offset
