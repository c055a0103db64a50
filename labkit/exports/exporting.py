"""Exporting runs to other tools: the table of tools, each written with the tool's own client, and an export: of a
recorded run all at once, of one that is under way in a thread that follows it.

A client is imported by the export that uses it.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain, islice
from pathlib import Path
from typing import Any

from labkit.analysis.profiled import profiled_steps, write_trace
from labkit.common.arguments import check_choice, shown
from labkit.common.text import visible, visible_line
from labkit.exports.figures import STEPS, SUMMARY, End, Row, Rows, series
from labkit.record.documents import Unreadable
from labkit.record.folder import RunFolder
from labkit.setup.environment import has, how_to_add


class ExportError(ValueError):
    """A run cannot be exported: one sentence that says why, and what to do."""


class Writer:
    """An export that is being written: `where` says where it is and how to open it."""

    where: str

    def write(self, rows: Sequence[Row]) -> None:
        """Writes new rows."""

    def end(self, end: End) -> None:
        """Writes what is known at the end, and closes the export."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the export after an error."""


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


# ---- tables: CSV and Parquet

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


class _Tables(Writer):
    """A folder with a table per file: `steps`, with a row for each step of each rank, and one without a rank for all
    ranks together; `measured`, with what some steps have; `summary`, `config` and `findings`."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], started: float | None):
        self._folder = new_folder(place, name)
        self._sinks = {table: self._open(table, columns) for table, columns in _TABLES.items()}
        self._sinks["config"].write((name, str(value)) for name, value in config.items())
        self.where = str(self._folder)

    def _open(self, table: str, columns: dict[str, type]) -> Any:
        """What takes the rows of a table: it has `write` and `close`."""
        raise NotImplementedError

    def write(self, rows: Sequence[Row]) -> None:
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
        for sink in self._sinks.values():
            sink.close()


class Csv(_Tables):
    """Tables as CSV; empty cells are unknown. A text that a spreadsheet would compute has an apostrophe before it."""

    def _open(self, table: str, columns: dict[str, type]) -> _CsvSink:
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

    def _open(self, table: str, columns: dict[str, type]) -> _ParquetSink:
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


class Perfetto(Writer):
    """The profiled steps of all ranks in Chrome's trace event format, written when the export ends."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], started: float | None):
        self._path = place / f"{name}.json"
        self.where = str(self._path)

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


# ---- trackers

PROJECT = "labkit"  # the project or experiment of all runs
_NOTES = "notes"
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]")  # of Weights & Biases
_MOST_METRICS = 1000  # that MLflow takes at once
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 500  # characters, the limit of MLflow before version 2.8


def _summary_series(end: End) -> dict[str, float]:
    """The figures of the whole run by the names of their series: `summary/loss/run`, `summary/sent_bytes/rank1`."""
    return {f"{SUMMARY}/{series(name, rank)}": value for name, rank, value, _ in end.figures}


def _last_step(end: End) -> int:
    return max((int(rank.steps.step[-1]) for rank in end.state.ranks.values() if len(rank.steps)), default=0)


def _iso(t: float) -> str:
    return datetime.fromtimestamp(t, timezone.utc).isoformat()


# ---- TensorBoard


class TensorBoard(Writer):
    """An event file: scalars, the Spec in the tab HParams, and the findings in the tab Text. TensorBoard stores scalars
    as 32-bit floats."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], started: float | None):
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(new_folder(place, name)))
        self._started = started or time.time()
        self._add(hparams_pb(config, trial_id=name, start_time_secs=self._started), 0, self._started)
        self.where = f"{place}, open it with: tensorboard --logdir {place}"

    def _add(self, summary: Any, step: int, t: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=t, step=step, summary=summary))

    def write(self, rows: Sequence[Row]) -> None:
        """Adds scalars, so that a TensorBoard that is open shows them."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.series.items()]
            self._add(Summary(value=values), row.step, row.t)
        self._writer.flush()

    def end(self, end: End) -> None:
        """Adds the figures of the whole run and the findings, and closes the file."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        t, step = end.state.status.ended or time.time(), _last_step(end)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _summary_series(end).items()]
        self._add(Summary(value=values), step, t)
        self._add(text_pb(_NOTES, visible(end.notes)), step, t)
        self.close()

    def close(self) -> None:
        self._writer.close()


# ---- trackio


class Trackio(Writer):
    """A run in trackio's local database (the folder `TRACKIO_DIR`); findings are its alerts. Nothing is sent anywhere;
    `trackio sync` uploads a project."""

    def __init__(self, place: Path | None, name: str, config: dict[str, Any], started: float | None):
        if place is not None:
            raise ExportError("trackio has one place for its runs; set TRACKIO_DIR instead of --out")
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._name = SQLiteStorage, name
        if name in SQLiteStorage.get_runs(PROJECT):
            raise ExportError(
                f"the project {PROJECT} of trackio has a run {shown(name)}; remove it with: trackio delete, or set"
                " TRACKIO_DIR to another folder"
            )
        self._config = dict(config) | {"_Username": None, "_Created": _iso(started or time.time()), "_Group": None}
        self.where = f"project {PROJECT} of trackio, open it with: trackio show --project {PROJECT}"

    def _log(self, values: list[dict[str, float]], steps: list[int], times: list[float]) -> None:
        self._storage.bulk_log(
            project=PROJECT,
            run=self._name,
            metrics_list=values,
            steps=steps,
            timestamps=[_iso(t) for t in times],
            config=self._config,
        )

    def write(self, rows: Sequence[Row]) -> None:
        """Logs rows with their own times."""
        self._log([row.series for row in rows], [row.step for row in rows], [row.t for row in rows])

    def end(self, end: End) -> None:
        """Logs the figures of the whole run at its last step, and the findings as alerts."""
        t, step = end.state.status.ended or time.time(), _last_step(end)
        self._log([_summary_series(end)], [step], [t])
        findings = end.summary.findings
        self._storage.bulk_alert(
            project=PROJECT,
            run=self._name,
            titles=[finding.title for finding in findings],
            texts=[f"Evidence: {finding.evidence}\nCause: {finding.cause}\nFix: {finding.fix}" for finding in findings],
            levels=["error" if finding.kind == "wrong" else "warn" for finding in findings],
            steps=[step] * len(findings),
            timestamps=[_iso(t)] * len(findings),
        )


# ---- Weights & Biases


class Wandb(Writer):
    """A run of Weights & Biases, offline unless `WANDB_MODE` is set: `wandb sync` uploads it. It is in the folder
    `wandb` of `place`, or of WANDB_DIR or the working directory."""

    _open = 0  # exports of this process that have not ended
    _turn = threading.Lock()

    def __init__(self, place: Path | None, name: str, config: dict[str, Any], started: float | None):
        self._ended = False
        with self._turn, _unless_decided("WANDB_ERROR_REPORTING", "false"):
            self._start(place, name, config)
            Wandb._open += 1

    def _start(self, place: Path | None, name: str, config: dict[str, Any]) -> None:
        import wandb

        root, number = Path(place or os.environ.get("WANDB_DIR") or "."), _NOT_IN_IDS.sub("_", name)
        there = list((root / "wandb").glob(f"*run-*-{number}"))
        if there:
            raise ExportError(f"{there[0]} exists; move it, or name another folder with --out")
        root.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=name,
            id=number,
            dir=str(root),
            config=dict(config),
            mode=os.environ.get("WANDB_MODE") or "offline",  # type: ignore[arg-type]
            settings=quiet,
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric="step")
        folder = Path(self._run.dir).parent
        sync = f", upload it with: wandb sync {folder}" if self._run.settings._offline else ""
        self.where = f"{folder}{sync}"

    def write(self, rows: Sequence[Row]) -> None:
        """Logs rows; `step` is their common axis, because steps that are repeated after a restart count again."""
        for row in rows:
            self._run.log(row.series | {"step": row.step, "attempt": row.attempt, "t": row.t})

    def end(self, end: End) -> None:
        """Adds the summary, and the findings as notes and tags, and ends the run."""
        self._run.summary.update(_summary_series(end))
        self._run.notes = visible(end.notes)
        self._run.tags = tuple(dict.fromkeys(finding.name[:64] for finding in end.summary.findings))
        self._finish(int(end.summary.state not in ("finished", "imported")))

    def close(self) -> None:
        """Ends the run as failed."""
        self._finish(1)

    def _finish(self, exit_code: int) -> None:
        """Ends the run, and the client's service if nothing else in this process uses it: only then is all of the file
        written."""
        import wandb

        with self._turn:
            if self._ended:
                return
            self._ended = True
            self._run.finish(exit_code=exit_code)
            Wandb._open -= 1
            if not Wandb._open and wandb.run is None:
                wandb.teardown()


# ---- MLflow


class Mlflow(Writer):
    """A run of MLflow, in the database `mlflow.db` of `place`; without it, where MLflow itself would write
    (`MLFLOW_TRACKING_URI`)."""

    def __init__(self, place: Path | None, name: str, config: dict[str, Any], started: float | None):
        with _unless_decided("MLFLOW_DISABLE_TELEMETRY", "true"):
            import mlflow

        uri = mlflow.get_tracking_uri()
        if place is not None:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            uri = f"sqlite:///{(place / 'mlflow.db').absolute()}"
        self._client = client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
        quoted = name.replace("'", "_")
        if client.search_runs([number], f"attributes.run_name = '{quoted}'", max_results=1):
            raise ExportError(
                f"the experiment {PROJECT} in {uri} has a run {shown(name)}; delete it, or name another folder with"
                " --out"
            )
        began = int(1000 * (started or time.time()))
        self._id = client.create_run(number, start_time=began, run_name=quoted).info.run_id
        from mlflow.entities import Param

        parameters = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in config.items()]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(self._id, params=parameters[first : first + _MOST_PARAMETERS])
        self.where = f"{uri}, open it with: mlflow ui --backend-store-uri {uri}"

    def write(self, rows: Sequence[Row]) -> None:
        """Logs rows with their own times."""
        self._log([(tag, value, row.t, row.step) for row in rows for tag, value in row.series.items()])

    def _log(self, values: list[tuple[str, float, float, int]]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(tag, value, int(1000 * t), step) for tag, value, t, step in values]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def end(self, end: End) -> None:
        """Logs the figures of the whole run, writes findings as the run's note and tags, and ends the run."""
        t, step = end.state.status.ended or time.time(), _last_step(end)
        self._log([(tag, value, t, step) for tag, value in _summary_series(end).items()])
        self._client.set_tag(self._id, "mlflow.note.content", visible(end.notes))
        for finding in end.summary.findings:
            self._client.set_tag(self._id, f"finding.{finding.name}", visible(finding.title))
        state = {"finished": "FINISHED", "imported": "FINISHED", "stopped": "KILLED"}.get(end.summary.state, "FAILED")
        self._client.set_terminated(self._id, state, int(1000 * t))

    def close(self) -> None:
        """Ends the run as failed."""
        self._client.set_terminated(self._id, "FAILED")


@contextmanager
def _unless_decided(variable: str, value: str) -> Iterator[None]:
    """Within this context an environment variable has a value, unless the user has set it: with it, a client sends no
    usage data or error reports to its vendor."""
    is_decided = variable in os.environ
    os.environ.setdefault(variable, value)
    try:
        yield
    finally:
        if not is_decided:
            del os.environ[variable]


# ---- the tools


@dataclass(frozen=True)
class Tool:
    """A tool: its `title`; `make` starts an export, with the folder for it, the name of the run, its configuration and
    its start in Unix seconds; the `extra` of its client; and `keeps`, if without --out it writes where it keeps its
    runs itself."""

    title: str
    make: Callable[[Any, str, dict[str, Any], float | None], Writer]
    extra: str | None = None
    keeps: bool = False


TOOLS = {
    "tensorboard": Tool("TensorBoard", TensorBoard, "tensorboard"),
    "trackio": Tool("trackio", Trackio, "trackio", keeps=True),
    "wandb": Tool("Weights & Biases", Wandb, "wandb", keeps=True),
    "mlflow": Tool("MLflow", Mlflow, "mlflow", keeps=True),
    "perfetto": Tool("Perfetto", Perfetto),
    "csv": Tool("CSV", Csv),
    "parquet": Tool("Parquet", Parquet, "parquet"),
}


def check_tools(name: str, asked: str | Iterable[str]) -> tuple[str, ...]:
    """Names of tools, without duplicates: from one name, or several as a list or with commas. Raises `ValueError` or
    `TypeError` for an unknown one, `ExportError` if the package of one is not installed."""
    if isinstance(asked, str):
        names = [part.strip() for part in asked.split(",")]
    elif isinstance(asked, (list, tuple)):
        names = list(asked)
    else:
        raise TypeError(f"{name} must be one of {', '.join(TOOLS)}, or a list of them, got {shown(asked)}")
    for tool in names:
        check_choice(name, tool, TOOLS)
        extra = TOOLS[tool].extra
        if extra is not None and not has(extra):
            raise ExportError(
                f"an export to {TOOLS[tool].title} needs a package that is not installed; {how_to_add(extra)}"
            )
    return tuple(dict.fromkeys(names))


def place_of(tool: str, out: str | None) -> Path | None:
    """The folder for an export: `out`, or `exports/TOOL`; None if the tool keeps its runs itself."""
    if out is not None:
        return Path(out)
    return None if TOOLS[tool].keeps else Path("exports", tool)


# ---- an export

_AT_ONCE = 5_000  # rows that a client gets in one call
_INTERVAL = 1.0  # seconds between two looks at a run that is under way


def export(
    folder: RunFolder, tool: str, out: str | None = None, progress: Callable[[float], None] = lambda share: None
) -> str:
    """Exports what a run has recorded so far, and says where it is and how to open it. `progress` is that of
    `Follower`.

    Raises `ExportError` with one sentence, also for what the tool's client or the disk refuses; `Unreadable` for a
    folder that cannot be read.
    """
    folder.require_readable()
    rows = Rows(folder, progress)
    new = rows.take()
    first = [*islice(new, 1)]
    if not first and not profiled_steps(rows.state):
        raise ExportError(f"{visible_line(folder.name)} has no steps to export ({visible_line(rows.state.words)})")
    place = place_of(tool, out)
    made = place / folder.name if place is not None and not os.path.lexists(place / folder.name) else None
    writer = None
    try:
        writer = _begun(folder, tool, place, rows)
        _write(writer, chain(first, new))
        writer.end(rows.end())
    except BaseException as error:
        _give_up(writer)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)  # what was written of this export
        if isinstance(error, Exception):  # clients raise anything
            raise _refused(tool, error) from error
        raise
    return writer.where


def _begun(folder: RunFolder, tool: str, place: Path | None, rows: Rows) -> Writer:
    return TOOLS[tool].make(place, folder.name, rows.config(), folder.read_status().started)


def _give_up(writer: Writer | None) -> None:
    if writer is not None:
        with suppress(Exception):
            writer.close()


def _write(writer: Writer, rows: Iterator[Row]) -> None:
    while some := list(islice(rows, _AT_ONCE)):
        writer.write(some)


def _refused(tool: str, error: Exception) -> Exception:
    """An error of a client or of the disk as one sentence."""
    if isinstance(error, (ExportError, Unreadable)):
        return error
    if isinstance(error, OSError) and error.strerror:
        return ExportError(f"{error.filename or TOOLS[tool].title} cannot be written: {error.strerror}")
    said = " ".join(str(error).split())
    return ExportError(f"{TOOLS[tool].title} refused the export: {type(error).__name__}: {visible_line(said)}")


class Live:
    """An export that follows a run in a thread of this process. An error of the tool's client ends the export, never
    the run; `words` say where the export is, or why it `failed`."""

    def __init__(self, folder: RunFolder, tool: str):
        self.tool, self.words, self.failed = tool, f"{tool}: the export has not begun", False
        self._folder = folder
        self._thread = threading.Thread(target=self._follow, daemon=True, name=f"labkit export to {tool}")
        self._thread.start()

    def __repr__(self) -> str:
        return f"<export to {self.words}>"

    def join(self, timeout: float | None = None) -> None:
        """Waits until everything of a run that is over was exported."""
        self._thread.join(timeout)

    def _follow(self) -> None:
        writer, rows = None, Rows(self._folder)
        try:
            writer = _begun(self._folder, self.tool, place_of(self.tool, None), rows)
            self.words = f"{self.tool}: {writer.where}"
            _write(writer, rows.take())
            while not rows.state.over:
                time.sleep(_INTERVAL)
                _write(writer, rows.take())
            writer.end(rows.end())
        except Exception as error:  # the run goes on
            self.failed = True
            self.words = f"{self.tool}: the export failed, which does not affect the run: {_refused(self.tool, error)}"
            _give_up(writer)
