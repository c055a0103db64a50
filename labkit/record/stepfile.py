"""The step file of a rank: one fixed-width binary record per step, appended in one write. Standard library only.

Most events of a run are steps, so `events/rankN.steps` stores each in 88 bytes instead of 330 bytes of JSON. The file
starts with one line of JSON, the header, which names the columns and their types (`head -1 rank0.steps` shows it); the
records follow without separators. numpy reads a whole file at once:

    header = json.loads(file.readline())
    steps = numpy.fromfile(file, dtype=[tuple(column) for column in header["columns"]])

| columns | type | |
| --- | --- | --- |
| `t` | float64 | the end of the step, in unix seconds |
| `step` | float64 | counts from 1; after a restart it continues from the step at which the script resumed |
| `loss` | float64 | of this rank; not finite if the training diverged; see `losses` |
| `samples` | float64 | of this step |
| `allocated`, `reserved`, `peak` | float64 | bytes |
| `seconds` | float32 | of the whole step |
| `data`, `copy`, `forward`, `backward`, `optimizer`, `other` | float32 | seconds of each phase |
| `losses` | uint32 | 0: this rank has no loss in this step, and `loss` is NaN |

NaN stands for an unknown value. Unknown columns are ignored, and missing columns are NaN.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from labkit.record.types.measured import Step, StepMemory, StepSeconds

VERSION = 1
PHASES = ("data", "copy", "forward", "backward", "optimizer", "other")
MEMORY = ("allocated", "reserved", "peak")
COLUMNS = (
    *((name, "<f8") for name in ("t", "step", "loss", "samples", *MEMORY)),
    *((name, "<f4") for name in ("seconds", *PHASES)),
    ("losses", "<u4"),
)
_TYPES = {"<f8": "d", "<f4": "f", "<i8": "q", "<u4": "I"}
PACK = struct.Struct("<" + "".join(_TYPES[type_] for _, type_ in COLUMNS))
_MOST_HEADER = 4096  # bytes
_MOST_COLUMNS = 64
_MOST_RANKS = 1024  # as in types/values.py: front ends draw a row for each

# Limits of the values of a record: the least value, the first that is too large, and whether NaN (unknown) is allowed.
SECONDS = 1e9
LIMITS = {
    "t": (0.0, 3.2e10, False),
    "step": (0.0, 2.0**53, False),
    "samples": (0.0, 2.0**53, True),
    **dict.fromkeys(MEMORY, (0.0, 2.0**63, True)),
    **dict.fromkeys(("seconds", *PHASES), (-SECONDS, SECONDS, True)),
}


def steps_path(path: str | os.PathLike[str]) -> Path:
    """The step file that belongs to the JSON lines at `path`."""
    return Path(path).with_suffix(".steps")


def header(rank: int) -> bytes:
    """The first line of a file that this version writes."""
    line = json.dumps({"v": VERSION, "kind": "steps", "rank": rank, "columns": COLUMNS}, separators=(",", ":"))
    return line.encode() + b"\n"


@dataclass(frozen=True)
class Layout:
    """The contents of a header: the rank, the offset of the records, their columns (name, type) and their size in
    bytes.
    """

    rank: int
    begin: int
    columns: tuple[tuple[str, str], ...]
    size: int

    @classmethod
    def of(cls, line: bytes) -> Layout:
        """Parses a header line. Raises `ValueError` with the reason if it is invalid."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("the header is not JSON") from None
        if not isinstance(found, dict) or found.get("kind") != "steps" or not isinstance(found.get("columns"), list):
            raise ValueError("the header does not describe steps")
        rank, columns = found.get("rank"), found["columns"]
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < _MOST_RANKS:
            raise ValueError("the header names no rank")
        if not 0 < len(columns) <= _MOST_COLUMNS or not all(map(_is_column, columns)):
            raise ValueError("the header's columns are not pairs of a name and a type")
        names = [name for name, _ in columns]
        if len(set(names)) != len(names) or not {"t", "step"} <= set(names):
            raise ValueError("the header's columns repeat a name, or lack t or step")
        size = struct.calcsize("<" + "".join(_TYPES[type_] for _, type_ in columns))
        return cls(rank, len(line), tuple((name, type_) for name, type_ in columns), size)


def _is_column(column: Any) -> bool:
    if not isinstance(column, list) or len(column) != 2 or not all(isinstance(part, str) for part in column):
        return False
    name, type_ = column
    return name.isidentifier() and len(name) <= 64 and type_ in _TYPES


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Raises `OSError` for anything else, such as a link or a FIFO."""
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
    file = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(file, "rb")


class StepFile:
    """A step file to read, existing or not yet; `opened` opens it."""

    def __init__(self, path: Path, opened: Callable[[Path], BinaryIO] = open_regular):
        self.path = path
        self.layout: Layout | None = None
        self.unreadable = ""  # the reason if the file is not a valid step file
        self._opened = opened
        self._held: BinaryIO | None = None
        self._turn = threading.Lock()

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def whole(self) -> int:
        """The number of complete records."""
        try:
            with self._file() as file:
                size = os.fstat(file.fileno()).st_size
                if self.layout is None and not self.unreadable:
                    self._read_header(file)
        except OSError:
            return 0
        return max(0, size - self.layout.begin) // self.layout.size if self.layout else 0

    def read(self, first: int, count: int) -> bytes:
        """The bytes of `count` records from index `first` on; fewer if the file ends earlier."""
        if self.layout is None:
            return b""
        try:
            with self._file() as file:
                file.seek(self.layout.begin + first * self.layout.size)
                data = file.read(count * self.layout.size)
        except OSError:
            return b""
        return data[: len(data) // self.layout.size * self.layout.size]

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
                self.layout = Layout.of(line + end)
            elif len(start) == _MOST_HEADER:
                raise ValueError(f"there is no header in its first {_MOST_HEADER} bytes")
        except ValueError as error:
            self.unreadable = str(error)


@dataclass(frozen=True)
class Block:
    """Consecutive records of a file as raw bytes, from index `first` on."""

    file: StepFile
    first: int
    data: bytes

    @property
    def layout(self) -> Layout:
        """The layout of its file."""
        assert self.file.layout is not None, "records were read with it"
        return self.file.layout

    def __len__(self) -> int:
        return len(self.data) // self.layout.size

    def part(self, first: int, last: int) -> Block:
        """The records from `first` to `last`, counted within the block."""
        size = self.layout.size
        return Block(self.file, self.first + first, self.data[first * size : last * size])


def events(block: Block) -> Iterator[Step | None]:
    """The records as step events, one by one; None for each invalid record."""
    layout = block.layout
    record = struct.Struct("<" + "".join(_TYPES[type_] for _, type_ in layout.columns))
    short = {name for name, type_ in layout.columns if type_ == "<f4"}
    names = [name for name, _ in layout.columns]
    for values in record.iter_unpack(block.data):
        row = {
            name: round(value, 7) if name in short and math.isfinite(value) else value
            for name, value in zip(names, values)
        }
        yield _event(row, layout.rank) if all(_makes_sense(name, value) for name, value in row.items()) else None


def _makes_sense(name: str, value: float) -> bool:
    if name not in LIMITS:
        return True
    least, end, may_be_unknown = LIMITS[name]
    if math.isnan(value):
        return may_be_unknown
    return least <= value < end and (name != "step" or value == int(value))


def _event(row: Mapping[str, float], rank: int) -> Step:
    def known(name: str) -> float | None:
        value = row.get(name, math.nan)
        return None if math.isnan(value) else value

    def whole(name: str) -> int | None:
        value = known(name)
        return None if value is None else int(value)

    has_loss = row["losses"] if "losses" in row else known("loss") is not None
    seconds = {"step": known("seconds")} | {phase: known(phase) or 0.0 for phase in PHASES}
    return {
        "v": VERSION,
        "t": row["t"],
        "rank": rank,
        "kind": "step",
        "step": int(row["step"]),
        "loss": row.get("loss") if has_loss else None,
        "samples": whole("samples"),
        "seconds": cast("StepSeconds", seconds),
        "memory": cast("StepMemory", {name: whole(name) for name in MEMORY}),
    }
