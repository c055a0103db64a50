"""Writing the step file of a rank; `stepfile.py` has its layout. Standard library only."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.record.appender import Appender
from labkit.record.stepfile import MEMORY, PACK, PHASES, header

_FIELDS = {"t", "step", "loss", "samples", "seconds", "memory"}  # fields of a step event that a record can hold


class StepWriter:
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
        """Closes the file."""
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
        count, torn = divmod(size - len(head), PACK.size)
        if torn:
            os.truncate(self._path, size - torn)
        return count


def packed(t: float, fields: Mapping[str, Any]) -> bytes | None:
    """The fields of a step event as a record; None if a record cannot hold them."""
    if not fields.keys() <= _FIELDS:
        return None
    seconds, memory, loss, samples = (fields.get(name) for name in ("seconds", "memory", "loss", "samples"))
    seconds, memory = seconds or {}, memory or {}
    known = [memory.get(name) for name in MEMORY]
    spent = [seconds.get("step"), *(seconds.get(phase, 0.0) for phase in PHASES)]
    row = [math.nan if value is None else value for value in (loss, samples, *known, *spent)]
    try:
        return PACK.pack(t, fields["step"], *row, 0 if loss is None else 1)
    except (struct.error, OverflowError, TypeError, KeyError):
        return None
