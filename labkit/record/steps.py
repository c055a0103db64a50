"""The steps of a rank as numpy columns, in bounded memory for runs of any length.

The newest records are cached in memory, 0.4 MB per rank however long the run is. Older ones are read from the step
file again when they are needed, so a state of ten million steps takes some tens of megabytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, overload

import numpy

from labkit.record.stepfile import COLUMNS, LIMITS, MEMORY, PHASES, Block, StepFile

HELD = 1 << 11  # newest records of a rank that stay in memory
_CHUNK = 1 << 10  # records of a chunk: they leave memory together, and are read again together
_PIECE = 1 << 15  # values of a column that are iterated at once
_NAMES = tuple(name for name, _ in COLUMNS)
_ROW = numpy.dtype([(name, "f8") for name in _NAMES])
_SHORT = {name for name, type_ in COLUMNS if type_ == "<f4"}
_SAMPLE = 1 << 10  # steps stored as a sample of all steps (up to twice as many)
_DIGITS = 7  # significant digits of seconds stored in float32: as measured, to 0.1 µs


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
        return self._steps.pieces(self._name, first)

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
        self._new: list[tuple[float, ...]] = []  # rows that came one by one, and are not in a chunk yet
        self._chunks: list[_Chunk] = []
        self._starts: list[int] = []  # the index of each chunk's first record
        self._length = 0
        self._sample = numpy.empty(0, _ROW)
        self._every = 1  # the sample has every so many-th step
        self._first_held = 0  # chunks before this one are not in memory
        self._again: tuple[_Chunk, bytes] | None = None  # the chunk that was read again last, and its records

    def __len__(self) -> int:
        return self._length + len(self._new)

    @property
    def peak(self) -> int | None:
        """The largest peak of any step, in bytes; None if unknown."""
        self._flush()
        return self._peak

    @property
    def has_loss(self) -> bool:
        """Whether any step has a loss."""
        self._flush()
        return self._has_loss

    def append(self, event: Mapping[str, Any]) -> None:
        """Adds one step event. Raises before anything is added if the event is invalid."""
        seconds, memory = event.get("seconds") or {}, event.get("memory") or {}
        row = {"t": float(event["t"]), "step": float(int(event["step"]))}
        row |= {
            "loss": number(event.get("loss")),
            "samples": number(event.get("samples")),
            "seconds": number(seconds.get("step")),
        }
        row |= {phase: number(seconds.get(phase), 0.0) for phase in PHASES} | {
            name: number(memory.get(name)) for name in MEMORY
        }
        row["losses"] = float(event.get("loss") is not None)
        self._new.append(tuple(row[name] for name in _NAMES))
        if len(self._new) >= _CHUNK:
            self._flush()

    def extend(self, block: Block) -> tuple[int, int | None]:
        """Adds the records of a block; returns the number of invalid ones, and the first step whose loss is not
        finite."""
        self._flush()
        rows, wrong = checked(block)
        size = len(block) if wrong else _CHUNK  # invalid records are left out of the rows, but not of the file
        for first in range(0, len(rows), size):
            self._take(rows[first : first + size].copy(), block.part(first, first + size))
        diverged = rows["step"][(rows["losses"] > 0) & ~numpy.isfinite(rows["loss"])]
        return wrong, int(diverged[0]) if len(diverged) else None

    def values(self, name: str, first: int, last: int, stride: int = 1) -> numpy.ndarray:
        """A column from index `first` to `last`, every `stride`-th value."""
        self._flush()
        parts, index = [], first
        while index < last:
            number = bisect_right(self._starts, index) - 1
            begin, chunk = self._starts[number], self._chunks[number]
            end = min(last, begin + len(chunk))
            parts.append(self._values(chunk, name, index - begin, end - begin)[::stride])
            index += -(-(end - index) // stride) * stride
        return numpy.concatenate(parts) if parts else numpy.empty(0)

    def sample(self, name: str, first: int = 0) -> numpy.ndarray:
        """A column at those of about 1,000 evenly spaced steps of the run that are at index `first` or later; if the
        run has fewer steps, at all of them.
        """
        self._flush()
        return self._sample[name][-(-first // self._every) :]

    def pieces(self, name: str, first: int = 0) -> Iterator[numpy.ndarray]:
        """A column from index `first` on, a bounded number of values at a time."""
        for index in range(first, len(self), _PIECE):
            yield self.values(name, index, min(len(self), index + _PIECE))

    def _values(self, chunk: _Chunk, name: str, first: int, last: int) -> numpy.ndarray:
        """A column of a chunk from index `first` to `last`, counted within the chunk."""
        if chunk.rows is not None:
            return chunk.rows[name][first:last].copy()
        again = self._again
        if again is None or again[0] is not chunk:
            again = self._again = chunk, chunk.records()
        return chunk.values(again[1], name, first, last)

    def _flush(self) -> None:
        if self._new:
            rows, self._new = numpy.array(self._new, _ROW), []
            self._take(rows, None)

    def _take(self, rows: numpy.ndarray, block: Block | None) -> None:
        peaks = rows["peak"][numpy.isfinite(rows["peak"])]
        if len(peaks):
            self._peak = max(self._peak or 0, int(peaks.max()))
        self._has_loss |= bool(rows["losses"].any())
        self._sample = numpy.concatenate([self._sample, rows[-self._length % self._every :: self._every]])
        while len(self._sample) > 2 * _SAMPLE:
            self._sample, self._every = self._sample[::2].copy(), 2 * self._every
        if not (self._chunks and self._chunks[-1].joined(rows, block)):
            self._chunks.append(_Chunk(rows, block))
            self._starts.append(self._length)
        self._length += len(rows)
        self._let_go()

    def _let_go(self) -> None:
        """Drops old chunks from memory if their file can be read again."""
        while self._first_held < len(self._chunks) - 1 and self._length - self._starts[self._first_held + 1] >= HELD:
            self._chunks[self._first_held].let_go()
            self._first_held += 1


class _Chunk:
    """Consecutive steps: `rows` in memory, or None and a range of a step file from which they are read again."""

    def __init__(self, rows: numpy.ndarray, block: Block | None):
        self.rows: numpy.ndarray | None = rows
        self._length = len(rows)
        self._file: StepFile | None = block.file if block else None
        self._first = block.first if block else 0
        self._count = len(block) if block else 0  # of records; more than rows if some are invalid

    def __len__(self) -> int:
        return self._length

    def joined(self, rows: numpy.ndarray, block: Block | None) -> bool:
        """Adds rows that directly follow in the same file (or come without a file) if the chunk is small; returns
        whether it did.
        """
        length = self._length + len(rows)
        follows = (block.file, block.first) == (self._file, self._first + self._count) if block else self._file is None
        if self.rows is None or not follows or length > _CHUNK:
            return False
        if length > len(self.rows):
            grown = numpy.empty(min(_CHUNK, 2 * length), _ROW)
            grown[: self._length] = self.rows[: self._length]
            self.rows = grown
        self.rows[self._length : length] = rows
        self._length = length
        self._count += len(block) if block else 0
        return True

    def let_go(self) -> None:
        """Drops the rows from memory."""
        if self._file is not None and self._file.hold():
            self.rows = None

    def records(self) -> bytes:
        """The chunk's records, read again; fewer if the file was truncated since."""
        assert self._file is not None, "only rows that are in a file are dropped"
        return self._file.read(self._first, self._count)

    def values(self, records: bytes, name: str, first: int, last: int) -> numpy.ndarray:
        """A column of the records from the row of index `first` to that of index `last`; NaN where they are missing."""
        assert self._file is not None, "only rows that are in a file are dropped"
        block = Block(self._file, self._first, records)
        has_all = self._length == self._count
        found = column(block, name, first, last) if has_all else checked(block)[0][name][first:last]
        missing = last - first - len(found)
        return numpy.concatenate([found, numpy.full(missing, math.nan)]) if missing else found


def checked(block: Block) -> tuple[numpy.ndarray, int]:
    """The valid records of a block as rows of float64, and the number of invalid ones."""
    rows = numpy.empty(len(block), _ROW)
    for name in _NAMES:
        rows[name] = column(block, name)
    good = numpy.ones(len(rows), bool)
    with numpy.errstate(invalid="ignore"):
        for name, (least, end, may_be_unknown) in LIMITS.items():
            values = rows[name]
            inside = (values >= least) & (values < end)
            good &= inside | numpy.isnan(values) if may_be_unknown else inside
        good &= rows["step"] == numpy.floor(rows["step"])
    return (rows, 0) if good.all() else (rows[good], int(len(rows) - good.sum()))


def column(block: Block, name: str, first: int = 0, last: int | None = None) -> numpy.ndarray:
    """One column of a block in float64, from record `first` to `last`; NaN if its file has no such column."""
    records = numpy.frombuffer(block.data, _type(block.layout.columns))[first:last]
    if name in (records.dtype.names or ()):
        values = records[name].astype(float)
        return values.round(_DIGITS) if name in _SHORT else values
    missing = column(block, "loss", first, last) if name == "losses" else None
    return numpy.full(len(records), math.nan) if missing is None else (~numpy.isnan(missing)).astype(float)


@lru_cache(maxsize=8)
def _type(columns: tuple[tuple[str, str], ...]) -> numpy.dtype:
    return numpy.dtype(list(columns))


def number(value: Any, missing: float = math.nan) -> float:
    """A value as a column stores it."""
    return missing if value is None else float(value)
