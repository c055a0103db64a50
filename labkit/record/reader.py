"""Reading what a rank writes, while it is written: its steps, as numpy columns in bounded memory for runs of any
length, and both of its files in the order of writing.

`writer.py` says what is in them: its `COLUMNS` are the dtype of a record; a step file of another version may have other
columns. A half-written last line or record is read once it is complete; a broken one is counted, never fatal.

The newest records of a rank are in memory, 0.5 MB however long the run is. Older ones are read from the file again when
they are needed, so a state of ten million steps takes some tens of megabytes. The file is read and not mapped: a
process that maps a file dies when another one truncates it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy

from labkit.record.events import RANKS, Event, Step, StepMemory, StepSeconds, decoded
from labkit.record.writer import COLUMNS, MEMORY, PHASES, steps_path

HELD = 1 << 11  # newest steps of a rank that stay in memory, at least; at most twice as many
_PIECE = 1 << 15  # values of a column that are iterated at once
_SAMPLE = 1 << 10  # steps stored as a sample of all steps (up to twice as many)
_DIGITS = 7  # digits of seconds stored in float32: as measured, to 0.1 µs
_TYPES = ("<f8", "<f4", "<i8", "<u4")
_MOST_HEADER = 4096  # bytes
_MOST_COLUMNS = 64
_SHORT = {name for name, type_ in COLUMNS if type_ == "<f4"}
_ROW = numpy.dtype([(name, "f8") for name, _ in COLUMNS] + [("record", "i8")])  # its index in the file, -1: in none

# Limits of the values of a record: the least value, the first that is too large, and whether NaN (unknown) is allowed.
LIMITS = {
    "t": (0.0, 3.2e10, False),
    "step": (0.0, 2.0**53, False),
    "samples": (0.0, 2.0**53, True),
    **dict.fromkeys(MEMORY, (0.0, 2.0**63, True)),
    **dict.fromkeys(("seconds", *PHASES), (-1e9, 1e9, True)),
}


# ---- the step file


class StepFile:
    """A step file, existing or not yet; `opened` opens it. `rank`, and `dtype`, the type of its records, are those of
    its header; `dtype` is None before the header was read, and `unreadable` the reason if it is not valid.
    """

    def __init__(self, path: Path, opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")):
        self.path = path
        self.rank = 0
        self.dtype: numpy.dtype | None = None
        self.unreadable = ""
        self._opened = opened
        self._begin = 0  # bytes of the header
        self._held: BinaryIO | None = None
        self._turn = threading.Lock()

    @property
    def size(self) -> int:
        return _size(self.path)

    def whole(self) -> int:
        try:
            with self._file() as file:
                size = os.fstat(file.fileno()).st_size
                if self.dtype is None and not self.unreadable:
                    self._read_header(file)
        except OSError:
            return 0
        return max(0, size - self._begin) // self.dtype.itemsize if self.dtype else 0

    def read(self, first: int, count: int) -> numpy.ndarray:
        """The `count` records from index `first` on; fewer if the file ends earlier."""
        assert self.dtype is not None, "its header was read"
        size, data = self.dtype.itemsize, b""
        try:
            with self._file() as file:
                file.seek(self._begin + first * size)
                data = file.read(count * size)
        except OSError:
            pass  # deleted
        return numpy.frombuffer(data[: len(data) // size * size], self.dtype)

    def hold(self) -> bool:
        """Keeps the file open, so that it stays readable after its folder is deleted; False if it cannot be opened."""
        if self._held is None:
            try:
                self._held = self._opened(self.path)
            except OSError:
                return False
        return True

    def __del__(self) -> None:
        if self._held is not None:
            self._held.close()

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        if self._held is None:
            with self._opened(self.path) as file:
                yield file
        else:
            with self._turn:
                yield self._held

    def _read_header(self, file: BinaryIO) -> None:
        start = file.read(_MOST_HEADER)
        line, end, _ = start.partition(b"\n")
        try:
            if end:
                self.rank, self.dtype = _header(line)
                self._begin = len(line + end)
            elif len(start) == _MOST_HEADER:
                raise ValueError(f"there is no header in its first {_MOST_HEADER} bytes")
        except ValueError as error:
            self.unreadable = str(error)


def _size(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _header(line: bytes) -> tuple[int, numpy.dtype]:
    """The rank and the type of the records. Raises `ValueError` with the reason if the header is invalid."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("the header is not JSON") from None
    if not isinstance(header, dict) or header.get("kind") != "steps" or not isinstance(header.get("columns"), list):
        raise ValueError("the header does not describe steps")
    rank, columns = header.get("rank"), header["columns"]
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < RANKS:
        raise ValueError("the header names no rank")
    if not 0 < len(columns) <= _MOST_COLUMNS or not all(map(_is_column, columns)):
        raise ValueError("the header's columns are not pairs of a name and a type")
    names = [name for name, _ in columns]
    if len(set(names)) != len(names) or not {"t", "step"} <= set(names):
        raise ValueError("the header's columns repeat a name, or lack t or step")
    return rank, numpy.dtype([(name, type_) for name, type_ in columns])


def _is_column(column: Any) -> bool:
    if not isinstance(column, list) or len(column) != 2 or not all(isinstance(part, str) for part in column):
        return False
    name, type_ = column
    return name.isidentifier() and len(name) <= 64 and type_ in _TYPES


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive records of a step file as they are there, from index `first` on: an event that no file contains."""

    file: StepFile
    first: int
    records: numpy.ndarray

    @property
    def rank(self) -> int:
        """The rank whose steps these are."""
        return self.file.rank

    def __len__(self) -> int:
        return len(self.records)

    def part(self, first: int, last: int) -> Block:
        """The records from `first` to `last`, counted within the block."""
        return Block(self.file, self.first + first, self.records[first:last])

    def valid(self) -> numpy.ndarray:
        """Which of the records are valid."""
        good = numpy.ones(len(self), bool)
        with numpy.errstate(invalid="ignore"):
            for name in LIMITS.keys() & set(self.records.dtype.names or ()):
                least, end, may_be_unknown = LIMITS[name]
                values = self.records[name]
                inside = (values >= least) & (values < end)
                good &= inside | numpy.isnan(values) if may_be_unknown else inside
            good &= self.records["step"] == numpy.floor(self.records["step"])
        return good


def column(records: numpy.ndarray, name: str) -> numpy.ndarray:
    """One column of records in float64; NaN if their file has no such column."""
    if name in (records.dtype.names or ()):
        values: numpy.ndarray = records[name].astype(float)
        values = values.round(_DIGITS) if name in _SHORT else values
    elif name == "losses":
        values = (~numpy.isnan(column(records, "loss"))).astype(float)
    else:
        values = numpy.full(len(records), math.nan)
    return values


# ---- the steps of a rank, as columns


class Column(Sequence[float]):
    """One column of a rank's steps. An index returns a float, a slice a numpy array; unknown values are NaN."""

    def __init__(self, steps: Steps, name: str):
        self._steps, self._name = steps, name

    def __len__(self) -> int:
        return len(self._steps)

    @overload  # type: ignore[override]  # a slice is an array, which has no index() and count()
    def __getitem__(self, which: int) -> float: ...

    @overload
    def __getitem__(self, which: slice) -> numpy.ndarray: ...

    def __getitem__(self, which: int | slice) -> float | numpy.ndarray:
        if isinstance(which, slice):
            first, last, stride = which.indices(len(self))
            if stride < 0:
                return self[last + 1 : first + 1][::-1][::-stride] if first > last else self[0:0]
            return self._steps.values(self._name, first, last, stride)
        index = range(len(self))[which]
        return float(self._steps.values(self._name, index, index + 1)[0])

    def __iter__(self) -> Iterator[float]:
        for values in self.pieces():
            yield from values.tolist()

    def __array__(self, dtype: Any = None, copy: Any = None) -> numpy.ndarray:
        values: numpy.ndarray = self[:].astype(dtype or float)
        return values

    def pieces(self, first: int = 0) -> Iterator[numpy.ndarray]:
        """The values from index `first` on, a bounded number at a time."""
        for index in range(first, len(self), _PIECE):
            yield self[index : index + _PIECE]

    def sample(self, first: int = 0) -> numpy.ndarray:
        """The values of about 1,000 evenly spaced steps of the run that are at index `first` or later; all values of a
        run of fewer steps.
        """
        return self._steps.sample(self._name, first)


class Steps:
    """The steps of one rank, column by column: `t`, `step`, `loss`, `samples`, `seconds`, and by name `phases` and
    `memory`.

    All columns have the same length.
    """

    def __init__(self) -> None:
        self.t, self.step, self.loss, self.samples, self.seconds = (
            Column(self, name) for name in ("t", "step", "loss", "samples", "seconds")
        )
        self.phases = {phase: Column(self, phase) for phase in PHASES}
        self.memory = {name: Column(self, name) for name in MEMORY}
        self._peak: int | None = None
        self._has_loss = False
        self._older: list[_Older] = []
        self._starts: list[int] = []  # the index of the first step in each of these parts
        self._begin = 0  # the index of the first step in memory
        self._rows = numpy.empty(0, _ROW)  # of which so many are in use:
        self._used = 0
        self._file: StepFile | None = None  # in which the records of these rows are
        self._lines: list[tuple[float, ...]] = []  # steps that came as lines and are no rows yet
        self._sample = numpy.empty(0, _ROW)
        self._every = 1  # the sample has every so many-th step

    def __len__(self) -> int:
        return self._begin + self._used + len(self._lines)

    @property
    def peak(self) -> int | None:
        """The largest peak of any step, in bytes; None if unknown."""
        self._flush()
        return self._peak

    @property
    def has_loss(self) -> bool:
        self._flush()
        return self._has_loss

    def append(self, event: Step) -> None:
        """Adds one step that is no record of a file."""
        seconds, memory = event.seconds or StepSeconds(), event.memory or StepMemory()
        self._lines.append(
            (
                event.t,
                event.step,
                number(event.loss),
                number(event.samples),
                *(number(getattr(memory, name)) for name in MEMORY),
                number(seconds.step),
                *(number(getattr(seconds, phase), 0.0) for phase in PHASES),
                event.loss is not None,
                -1,
            )
        )
        if len(self._lines) >= HELD:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            rows, self._lines = numpy.array(self._lines, _ROW), []
            self._note(rows)
            self._take(rows)

    def extend(self, block: Block) -> tuple[int, int | None]:
        """Adds the records of a block; returns the number of invalid ones, and the first step whose loss is not
        finite."""
        self._flush()
        if block.file is not self._file:
            self._let_go(self._used)
            self._file = block.file
        good = numpy.flatnonzero(block.valid())
        records = block.records if len(good) == len(block) else block.records[good]
        self._note(records)
        older = max(0, len(records) - HELD)
        if older and block.file.hold():
            self._let_go(self._used)
            self._put_away(_Older(older, block.file, block.first + good[:older]))
        else:
            older = 0
        rows = _rows(records[older:])
        rows["record"] = block.first + good[older:]
        for first in range(0, len(rows), HELD):
            self._take(rows[first : first + HELD])
        diverged = records["step"][(column(records, "losses") > 0) & ~numpy.isfinite(column(records, "loss"))]
        return len(block) - len(good), int(diverged[0]) if len(diverged) else None

    def values(self, name: str, first: int, last: int, stride: int = 1) -> numpy.ndarray:
        """A column from index `first` to `last`, every `stride`-th value."""
        self._flush()
        parts = [numpy.empty(0)]
        while first < last:
            if first >= self._begin:
                parts.append(self._rows[name][first - self._begin : last - self._begin : stride].copy())
                break
            number = bisect_right(self._starts, first) - 1
            begin, older = self._starts[number], self._older[number]
            end = min(last, begin + older.length)
            parts.append(older.values(name, first - begin, end - begin)[::stride])
            first += -(-(end - first) // stride) * stride
        return numpy.concatenate(parts)

    def sample(self, name: str, first: int = 0) -> numpy.ndarray:
        """A column at those of about 1,000 evenly spaced steps of the run that are at index `first` or later; if the
        run has fewer steps, at all of them.
        """
        self._flush()
        sampled: numpy.ndarray = self._sample[name][-(-first // self._every) :]
        return sampled

    def _note(self, records: numpy.ndarray) -> None:
        """Updates what is known of all steps by records that are added next."""
        peaks = column(records, "peak")
        peaks = peaks[numpy.isfinite(peaks)]
        if len(peaks):
            self._peak = max(self._peak or 0, int(peaks.max()))
        self._has_loss |= bool(column(records, "losses").any())
        self._sample = numpy.concatenate(
            [self._sample, _rows(records[-(self._begin + self._used) % self._every :: self._every])]
        )
        while len(self._sample) > 2 * _SAMPLE:
            self._sample, self._every = self._sample[::2].copy(), 2 * self._every

    def _take(self, rows: numpy.ndarray) -> None:
        """Adds at most `HELD` rows in memory."""
        if self._used + len(rows) > 2 * HELD:
            self._let_go(self._used - HELD)
        if self._used + len(rows) > len(self._rows):
            grown = numpy.empty(min(2 * HELD, 2 * (self._used + len(rows))), _ROW)
            grown[: self._used] = self._rows[: self._used]
            self._rows = grown
        self._rows[self._used : self._used + len(rows)] = rows
        self._used += len(rows)

    def _let_go(self, count: int) -> None:
        """Drops the oldest `count` rows; those that cannot be read again are put away in memory."""
        if not count:
            return
        rows = self._rows[:count].copy()
        is_in_file = self._file is not None and bool((rows["record"] >= 0).all()) and self._file.hold()
        self._put_away(_Older(count, self._file, rows["record"]) if is_in_file else _Older(count, rows=rows))
        self._rows[: self._used - count] = self._rows[count : self._used].copy()
        self._used -= count

    def _put_away(self, older: _Older) -> None:
        if not (self._older and self._older[-1].joined(older)):
            self._older.append(older)
            self._starts.append(self._begin)
        self._begin += older.length


class _Older:
    """Consecutive steps that are not among the newest: the indices of their records in a file, or their rows."""

    def __init__(
        self,
        length: int,
        file: StepFile | None = None,
        records: numpy.ndarray | None = None,
        rows: numpy.ndarray | None = None,
    ):
        self.length, self._file, self._rows = length, file, rows
        self._records: range | numpy.ndarray = range(0) if records is None else records
        if len(self._records) and self._records[-1] - self._records[0] == length - 1:
            self._records = range(int(self._records[0]), int(self._records[-1]) + 1)

    def joined(self, other: _Older) -> bool:
        """Adds steps that directly follow in the same file, without an invalid record; returns whether it did."""
        mine, theirs = self._records, other._records
        if (
            self._file is None
            or self._file is not other._file
            or not (isinstance(mine, range) and isinstance(theirs, range))
        ):
            return False
        if mine.stop != theirs.start:
            return False
        self._records, self.length = range(mine.start, theirs.stop), self.length + other.length
        return True

    def values(self, name: str, first: int, last: int) -> numpy.ndarray:
        """A column from the step of index `first` to that of index `last`; NaN for records that are not there any
        more."""
        if self._file is None:
            assert self._rows is not None, "what is in no file is in memory"
            return self._rows[name][first:last].copy()
        wanted = self._records[first:last]
        if isinstance(wanted, range):
            return _padded(column(self._file.read(wanted.start, len(wanted)), name), len(wanted))
        runs = numpy.split(wanted, numpy.flatnonzero(numpy.diff(wanted) > 1) + 1)
        return numpy.concatenate(
            [_padded(column(self._file.read(int(run[0]), len(run)), name), len(run)) for run in runs if len(run)]
        )


def _padded(values: numpy.ndarray, length: int) -> numpy.ndarray:
    return values if len(values) == length else numpy.append(values, numpy.full(length - len(values), math.nan))


def _rows(records: numpy.ndarray) -> numpy.ndarray:
    """Records, or rows, as new rows."""
    rows = numpy.empty(len(records), _ROW)
    for name, _ in COLUMNS:
        rows[name] = column(records, name)
    rows["record"] = -1
    return rows


def number(value: float | None, missing: float = math.nan) -> float:
    """A value as a column stores it."""
    return missing if value is None else float(value)


# ---- both files of a rank

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
        return _size(self.path) + self._steps.size

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

    def _note_gap(self, is_there: bool) -> None:
        """Counts a truncated, missing or unreadable step file as one broken line."""
        if is_there and not self._has_gap:
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
