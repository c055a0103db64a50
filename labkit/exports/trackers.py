"""Exports to trackers: TensorBoard, trackio, Weights & Biases and MLflow, each by its own client."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from labkit.common.arguments import shown
from labkit.common.text import visible
from labkit.exports.figures import SUMMARY, End, Row, series
from labkit.exports.files import ExportError, new_folder

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


class TensorBoard:
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
        """Closes the file."""
        self._writer.close()


# ---- trackio


class Trackio:
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

    def close(self) -> None:
        """Nothing is open."""


# ---- Weights & Biases


class Wandb:
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


class Mlflow:
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
