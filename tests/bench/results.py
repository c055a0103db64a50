"""What a benchmark shows: its figures, and a file of JSON lines to which what was measured is appended."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from labkit.common.files import open_regular
from labkit.record.writer import Appender

# ---- the result of a benchmark


PAIRS = 5
EVERY = 50  # steps between two profiled steps, the default of a run


@dataclass(frozen=True)
class Result:
    """One measured figure: the median of `each` (None if nothing was measured), its unit, the target, and a note."""

    name: str
    median: float | None
    unit: str
    aim: str
    each: tuple[float, ...]
    note: str = ""


def ratio(name: str, each: list[float], aim: str, note: str) -> Result:
    """The median of ratios."""
    return Result(name, statistics.median(each), "×", aim, tuple(each), note)


# ---- the results of long benchmarks as JSON lines


def check(path: str | os.PathLike[str]) -> None:
    """Raises `ValueError`, one sentence, if no file can be written there, or if it has something else."""
    read(path)
    try:
        Appender(path).close()
    except OSError as error:
        raise ValueError(f"--results must name a file that can be written, got {path}: {error.strerror}") from None


def append(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Adds one record to the file, which is created if it does not exist."""
    file = Appender(path)
    try:
        file.append(json.dumps(record).encode() + b"\n")
    finally:
        file.close()


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of the file, in order; none if it does not exist. A line that was written only in part is left out.
    Raises `ValueError` for a file of something else."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"--results must name a file that can be read, got {path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.startswith(b"{"):
            raise ValueError(f"--results {path}: line {number} is not from a benchmark; name another file")
        with suppress(ValueError):
            records.append(json.loads(line))
    return records
