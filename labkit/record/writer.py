"""Writing: how a rank and the supervisor append events, and the layout of the step file, which the reader shares.

The run folder is the only link between the ranks and the front ends, so this module is half of the protocol; the other
half is `reader.py`. Every rank imports it: standard library only.

`events/rankN.jsonl` has one JSON object per line, `system.jsonl` the samples of the supervisor and its reports of ranks
that cannot report themselves; `events.py` says which kinds there are, and which fields they have.

Most events of a run are steps, so `events/rankN.steps` stores each in one record of 88 bytes instead of 330 bytes of
JSON, appended in one write. The file starts with one line of JSON, the header, which names the columns and their types
(`head -1 rank0.steps` shows it); the records follow without separators. numpy reads a whole file at once:

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

NaN stands for an unknown value. Unknown columns are ignored, and missing columns are NaN. A step event that does not
fit a record is a JSON line, as all step events were in older versions. In each line, `after` is the number of records
in the step file when the line was written (default: 0), which defines a common order of the two files.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.record import clock

VERSION = 1  # of the envelope of events
REPORT = "labkit.report"  # the torch.monitor event that becomes a `report`; its field `values` is JSON
STARTUP = ("group", "data", "batch")  # names of `startup` events
OWNERS = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
PHASES = ("data", "copy", "forward", "backward", "optimizer", "other")
MEMORY = ("allocated", "reserved", "peak")

# The record of a step: names and numpy types of its columns.
COLUMNS = (
    *((name, "<f8") for name in ("t", "step", "loss", "samples", *MEMORY)),
    *((name, "<f4") for name in ("seconds", *PHASES)),
    ("losses", "<u4"),
)
RECORD = struct.Struct("<" + "".join({"<f8": "d", "<f4": "f", "<u4": "I"}[type_] for _, type_ in COLUMNS))
_FIELDS = {"t", "step", "loss", "samples", "seconds", "memory"}  # fields of a step event that a record can hold

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a write when the disk, or the user's quota, is full


def sent(operation: str, size: float, ranks: int) -> float:
    """The field `sent` of an operation in a `traffic` event, which no backend reports: bytes that each of `ranks` ranks
    sends with a ring algorithm for a payload of `size` bytes: 2(n−1)/n of it for an all-reduce, all of it for a send,
    nothing for a barrier or a receive, (n−1)/n for any other operation (Patarasuk and Yuan 2009)."""
    if operation in ("send", "recv", "barrier"):
        return float(size if operation == "send" else 0)
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) / ranks


# ---- files


class Appender:
    """Appends complete lines to one file, each in one write, so that readers see complete lines and a kill loses none.

    A line that a full disk accepted only in part is completed before anything else is written, so that the file never
    has a broken line in its middle. Threads may share an appender. With `lines=False` it appends records without
    newlines.
    """

    def __init__(self, path: str | os.PathLike[str], lines: bool = True):
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._lock = threading.RLock()  # reentrant: a signal handler of the script may log while a line is written
        self._rest = b"" if not lines or self._ends_whole() else b"\n"

    def append(self, line: bytes) -> None:
        """Appends one line. Raises `OSError` if nothing of it could be written; the line is then lost."""
        with self._lock:
            self._flush()
            self._rest = line
            try:
                self._flush()
            except OSError:
                if len(self._rest) < len(line):
                    return  # the rest is written before the next line
                self._rest = b""
                raise

    def _flush(self) -> None:
        while self._rest:
            self._rest = self._rest[os.write(self._file, self._rest) :]

    def _ends_whole(self) -> bool:
        """Whether the file ends with a complete line; a process killed on a full disk leaves a partial one."""
        try:
            size = os.fstat(self._file).st_size
            return size == 0 or os.pread(self._file, 1, size - 1) == b"\n"
        except OSError:
            return True  # the file cannot be read

    def close(self) -> None:
        os.close(self._file)


class Reserve:
    """A file that reserves disk space, released when the disk is full and something important must be written."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)

    @property
    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def make(self, size: int) -> None:
        """Reserves `size` bytes. Raises `OSError` if the disk does not have them."""
        self._path.touch(mode=0o600)
        self._path.write_bytes(os.urandom(size))  # random, because some file systems do not store zeros

    def shrink(self, size: int) -> None:
        """Releases all but `size` bytes."""
        if self.size > size:
            os.truncate(self._path, size)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)


# ---- events


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
        self._steps: _StepWriter | None = None
        with suppress(OSError):  # if the existing file is not a valid step file, steps are written as JSON lines
            self._steps = None if rank is None else _StepWriter(steps_path(path), rank)

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event with the current time, unless `t` is given. Raises `OSError` if it is lost, as on a full
        disk.
        """
        if kind == "step" and self._steps is not None:
            record = _packed(fields.get("t", clock.now()), fields)
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


def header(rank: int) -> bytes:
    """The first line of a step file."""
    line = {"v": VERSION, "kind": "steps", "rank": rank, "columns": COLUMNS}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def steps_path(path: str | os.PathLike[str]) -> Path:
    """The step file that belongs to the JSON lines at `path`."""
    return Path(path).with_suffix(".steps")


class _StepWriter:
    """Appends records to one file, each in one write, so that a kill loses none. `count` is the number of records in
    the file.

    Raises `OSError` if the file there has another layout.
    """

    def __init__(self, path: Path, rank: int):
        self._path, self._header = path, header(rank)
        self._file: Appender | None = None
        self.count = 0
        if path.exists():
            self._file = self._opened()

    def write(self, record: bytes) -> None:
        """Appends one record. Raises `OSError` if it is lost, as on a full disk."""
        if self._file is None:
            self._file = self._opened()
        self._file.append(record)
        self.count += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> Appender:
        file = Appender(self._path, lines=False)
        try:
            self.count = self._mended()
            if self._path.stat().st_size == 0:
                file.append(self._header)
        except OSError:
            file.close()
            raise
        return file

    def _mended(self) -> int:
        """The number of records in the file, after a partial record (from a killed writer or a full disk) was cut
        off."""
        with open(self._path, "rb") as file:
            head = file.read(len(self._header))
            size = os.fstat(file.fileno()).st_size
        if len(head) < len(self._header):
            os.truncate(self._path, 0)
            return 0
        if head != self._header:
            raise OSError(f"{self._path} contains steps of a different layout")
        count, torn = divmod(size - len(head), RECORD.size)
        if torn:
            os.truncate(self._path, size - torn)
        return count


def _packed(t: float, fields: Mapping[str, Any]) -> bytes | None:
    """The fields of a step event as a record; None if a record cannot hold them."""
    if not fields.keys() <= _FIELDS:
        return None
    seconds, memory, loss, samples = (fields.get(name) for name in ("seconds", "memory", "loss", "samples"))
    seconds, memory = seconds or {}, memory or {}
    known = [memory.get(name) for name in MEMORY]
    spent = [seconds.get("step"), *(seconds.get(phase, 0.0) for phase in PHASES)]
    row = [math.nan if value is None else value for value in (loss, samples, *known, *spent)]
    try:
        return RECORD.pack(t, fields["step"], *row, 0 if loss is None else 1)
    except (struct.error, OverflowError, TypeError, KeyError):
        return None
