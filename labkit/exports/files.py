"""Exports as files: tables as CSV or Parquet, and the profiled steps for Perfetto."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from labkit.analysis.profiled import profiled_steps, write_trace
from labkit.exports.figures import STEPS, End, Row

_WHERE = {"t": float, "attempt": int, "step": int, "rank": int}
_TABLES: dict[str, dict[str, type]] = {
    "steps": _WHERE | {figure.name: float for figure in STEPS},
    "measured": _WHERE | {"name": str, "value": float},
    "summary": {"name": str, "rank": int, "value": float, "unit": str},
    "config": {"name": str, "value": str},
    "findings": {"name": str, "kind": str, "title": str, "evidence": str, "cause": str, "fix": str, "ranks": str},
}
_BUFFERED = 1 << 14  # rows of a Parquet file that are written at once
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # begins what a spreadsheet would compute


class ExportError(ValueError):
    """A run cannot be exported: one sentence that says why, and what to do."""


def new_folder(place: Path, name: str) -> Path:
    """A new private folder `name` in the folder `place`, which is created if it does not exist. Raises `ExportError` if
    there is something at its path."""
    path = place / name
    try:
        place.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError as error:
        what = "exists and is no folder" if error.filename == str(place) else "exists"
        raise ExportError(f"{error.filename} {what}; move it, or name another folder with --out") from None
    return path


def private(path: str, flags: int) -> int:
    """An opener of files that only their owner can read."""
    return os.open(path, flags, 0o600)


# ---- tables


class _Sink(Protocol):
    """A table that is being written."""

    def write(self, rows: Iterable[Sequence[Any]]) -> None: ...

    def close(self) -> None: ...


class _Tables:
    """A folder with a table per file: `steps`, with a row for each step of each rank, and one without a rank for all
    ranks together; `measured`, with what some steps have; `summary`, `config` and `findings`."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], started: float | None):
        self._folder = new_folder(place, name)
        self._sinks = {table: self._open(table, columns) for table, columns in _TABLES.items()}
        self._sinks["config"].write((name, str(value)) for name, value in config.items())
        self.where = str(self._folder)

    def _open(self, table: str, columns: dict[str, type]) -> _Sink:
        raise NotImplementedError

    def write(self, rows: Sequence[Row]) -> None:
        """Appends rows."""
        names = [figure.name for figure in STEPS]
        steps = ((row.t, row.attempt, row.step, row.rank, *map(row.values.get, names)) for row in rows if row.is_step)
        measured = (
            (row.t, row.attempt, row.step, row.rank, name, value)
            for row in rows
            if not row.is_step
            for name, value in row.values.items()
        )
        self._sinks["steps"].write(steps)
        self._sinks["measured"].write(measured)

    def end(self, end: End) -> None:
        """Writes the other tables, and closes all."""
        self._sinks["summary"].write(end.figures)
        self._sinks["findings"].write(
            (
                finding.name,
                finding.kind,
                finding.title,
                finding.evidence,
                finding.cause,
                finding.fix,
                " ".join(map(str, finding.ranks)),
            )
            for finding in end.summary.findings
        )
        self.close()

    def close(self) -> None:
        """Closes the files."""
        for sink in self._sinks.values():
            sink.close()


class Csv(_Tables):
    """Tables as CSV; empty cells are unknown. A text that a spreadsheet would compute has an apostrophe before it."""

    def _open(self, table: str, columns: dict[str, type]) -> _Sink:
        return _CsvSink(self._folder / f"{table}.csv", columns)


class _CsvSink:
    def __init__(self, path: Path, columns: dict[str, type]):
        self._file = open(path, "x", newline="", encoding="utf-8", errors="replace", opener=private)  # noqa: SIM115
        self._writer = csv.writer(self._file)
        self._writer.writerow(columns)

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        for row in rows:
            self._writer.writerow([_harmless(value) for value in row])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


class Parquet(_Tables):
    """Tables as Parquet; unknown values are null. The files can be read when the export has ended."""

    def _open(self, table: str, columns: dict[str, type]) -> _Sink:
        return _ParquetSink(self._folder / f"{table}.parquet", columns)


class _ParquetSink:
    def __init__(self, path: Path, columns: dict[str, type]):
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        types = {float: pyarrow.float64(), int: pyarrow.int64(), str: pyarrow.string()}
        self._schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
        self._file = open(path, "xb", opener=private)  # noqa: SIM115
        self._writer = ParquetWriter(self._file, self._schema)
        self._rows: list[Sequence[Any]] = []

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        self._rows += rows
        if len(self._rows) >= _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        columns = list(zip(*self._rows)) or [[] for _ in self._schema]
        arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, self._schema)]
        self._writer.write_table(pyarrow.table(arrays, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()
        self._file.close()


# ---- Perfetto


class Perfetto:
    """The profiled steps of all ranks in Chrome's trace event format, written when the export ends."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], started: float | None):
        self._path = place / f"{name}.json"
        self.where = str(self._path)

    def write(self, rows: Sequence[Row]) -> None:
        """Steps without a profile have no time line."""

    def end(self, end: End) -> None:
        """Writes the file. Raises `ExportError` for a run without profiled steps."""
        if not profiled_steps(end.state):
            raise ExportError(
                f"{end.summary.run} has no profiled step; run with --sample-every 50, or use labkit capture meanwhile"
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ExportError(f"{error.filename} exists and is no folder; name another one with --out") from None
        write_trace(end.state, self._path)

    def close(self) -> None:
        """Nothing is open."""
