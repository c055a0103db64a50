"""Exports: what each tool's own reader finds in them is what the run has recorded."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import called
from fabricate import FakeRun

from labkit import Run
from labkit.cli import parser
from labkit.exports import exporting
from labkit.exports.exporting import TOOLS
from labkit.exports.figures import MEASURED, OF_RANK, OF_RUN, STEPS, TOGETHER, Rows
from labkit.record.folder import RunFolder
from labkit.setup.environment import CLONE, has

Series = dict[str, list[tuple[int, float]]]  # by name: step and value


def needs(tool: str) -> None:
    extra = TOOLS[tool].extra
    if extra is not None and not has(extra):
        pytest.skip(f"the package of the extra {extra} is not installed")


@pytest.fixture(scope="module")
def real(shared_run) -> Run:
    """A real run of two ranks with profiled steps, a logged accuracy and measured traffic."""
    return shared_run(
        "ddp", workload="mlp", nproc=2, device="cpu", batch_size=16, samples=320, epochs=2, sample_every=5
    )


@pytest.fixture
def diverged(runs) -> RunFolder:
    """A run whose loss becomes NaN and infinite, with a logged value of a hostile name, and a finding."""
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(5)
    run.writers[0].write("metric", name="../../=evil'\x1b[31m", value=0.5, step=3)
    run.writers[1].write("metric", name="a text", value="no number", step=3)
    measured = run.measured
    for loss in (math.nan, math.inf):
        run.measured = lambda rank, loss=loss: measured(rank) | {"loss": loss}
        run.step(1)
    run.end()
    run.close()
    return run.folder


def recorded(folder: RunFolder) -> Series:
    """What the state of a run has, read step by step and without the rows of an export."""
    state = Run.attach(folder.path).state
    found: Series = {}
    for number, rank in state.ranks.items():
        steps = rank.steps
        columns = {"loss": steps.loss, "samples": steps.samples, "step_seconds": steps.seconds}
        columns |= {f"{phase}_seconds": steps.phases[phase] for phase in steps.phases}
        columns |= {f"memory_{name}_bytes": steps.memory[name] for name in steps.memory}
        for name, column in columns.items():
            points = [(int(step), value) for step, value in zip(steps.step, column) if not math.isnan(value)]
            if name == "loss":
                points = list(zip(map(int, steps.step), steps.loss))
            found[f"{name}/rank{number}"] = points
    count = min(len(rank.steps) for rank in state.ranks.values())
    losses = [[rank.steps.loss[index] for rank in state.ranks.values()] for index in range(count)]
    found["loss/mean"] = [(point[0], sum(mean) / len(mean)) for point, mean in zip(found["loss/rank0"], losses)]
    return found


# ---- readers: each tool's own


def of_tensorboard(place: Path, name: str) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(place / name), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def of_mlflow(place: Path, name: str) -> Series:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{place / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("labkit").experiment_id])
    assert run.info.run_name == name
    return {
        tag: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, tag)]
        for tag in run.data.metrics
    }


def of_trackio(place: Path, name: str) -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    found: Series = {}
    for log in SQLiteStorage.get_logs("labkit", name):
        for tag, value in log.items():
            if tag not in ("step", "timestamp"):
                found.setdefault(tag, []).append((log["step"], float(value)))
    return found


def records_of_wandb(path: Path) -> Iterator[bytes]:
    """The records of a file of Weights & Biases, in the format of LevelDB's log: blocks of 32 KiB, in which each part
    of a record has a checksum, its length, and its kind (whole, first, middle or last). The client has no reader."""
    data, at, record = path.read_bytes(), 7, b""  # after a header of 7 bytes
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # the rest of a block has no room for a part
            at += (1 << 15) - at % (1 << 15)
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def of_wandb(place: Path, name: str) -> Series:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (place / "wandb").glob("*run-*/*.wandb")
    found: Series = {}
    for data in records_of_wandb(path):
        record = Record.FromString(data)
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for tag, value in values.items():
            if not tag.startswith("_") and tag not in ("step", "attempt", "t"):
                found.setdefault(tag, []).append((values["step"], float(value)))
        for item in record.summary.update:
            tag = item.key or "/".join(item.nested_key)
            if tag.startswith("summary/"):
                found[tag] = [(0, float(json.loads(item.value_json)))]
    return found


def of_rows(steps: list[dict], measured: list[dict], summary: list[dict]) -> Series:
    found: Series = {}
    for row in steps:
        for figure in STEPS:
            if row[figure.name] not in ("", None):
                which = TOGETHER[figure.name] if row["rank"] in ("", None) else f"rank{row['rank']}"
                found.setdefault(f"{figure.name}/{which}", []).append((int(row["step"]), float(row[figure.name])))
    for row in measured:
        found.setdefault(f"{row['name']}/rank{row['rank']}", []).append((int(row["step"]), float(row["value"])))
    for row in summary:
        which = "run" if row["rank"] in ("", None) else f"rank{row['rank']}"
        found[f"summary/{row['name']}/{which}"] = [(0, float(row["value"]))]
    return found


def of_csv(place: Path, name: str) -> Series:
    def rows(table: str) -> list[dict]:
        with open(place / name / f"{table}.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return of_rows(rows("steps"), rows("measured"), rows("summary"))


def of_parquet(place: Path, name: str) -> Series:
    from pyarrow import parquet

    tables = [place / name / f"{table}.parquet" for table in ("steps", "measured", "summary")]
    return of_rows(*(parquet.read_table(table).to_pylist() for table in tables))


READERS: dict[str, Callable[[Path, str], Series]] = {
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "wandb": of_wandb,
    "csv": of_csv,
    "parquet": of_parquet,
}


def exported(folder: RunFolder, tool: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Series:
    """Exports a run with the command, and reads it back."""
    needs(tool)
    out = ["--out", str(place)]
    if tool == "trackio":
        import trackio.sqlite_storage as storage

        monkeypatch.setattr(storage, "TRACKIO_DIR", place)
        out = []
    assert called("export", str(folder.path), "--to", tool, *out) == 0
    assert not {"MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"} & os.environ.keys()
    return READERS[tool](place, folder.name)


def largest(tool: str) -> float:
    """What a tool stores for infinity: MLflow the largest float."""
    return sys.float_info.max if tool == "mlflow" else math.inf


def same(found: Series, expected: Series, tool: str) -> None:
    """Whether the series of an export are those expected; TensorBoard stores 32-bit floats."""
    for name, points in expected.items():
        there = sorted(found.get(name, []))
        assert [step for step, _ in there] == [step for step, _ in points], name
        values = [value for _, value in there], [min(value, largest(tool)) for _, value in points]
        assert values[0] == pytest.approx(values[1], rel=1e-6 if tool == "tensorboard" else 1e-12, nan_ok=True), name


def test_every_tool_has_a_reader_here():
    assert {*READERS, "perfetto"} == TOOLS.keys()
    assert ", ".join(TOOLS) == parser._TOOLS


@pytest.mark.parametrize("tool", READERS)
def test_an_export_has_every_step_of_every_rank_and_the_summary(real, tool, tmp_path, monkeypatch):
    found = exported(real.folder, tool, tmp_path, monkeypatch)
    expected = recorded(real.folder)
    assert len(expected["loss/rank1"]) == real.state.step > 10
    same(found, expected, tool)
    summary = real.summary()
    for rank, figures in enumerate(summary["ranks"]):
        ((_, median),) = found[f"summary/step_seconds_median/rank{rank}"]
        assert median == pytest.approx(figures["step_seconds_median"])
        step, sent = found[f"sent_bytes/rank{rank}"][-1]
        assert step > 0 and sent == pytest.approx(figures["comm_bytes_per_step"])
        step, exposed = found[f"exposed_communication_seconds/rank{rank}"][-1]
        assert step == figures["communication"]["step"]
        assert exposed == pytest.approx(figures["communication"]["open_seconds"], abs=1e-6)
        assert found[f"memory_parameters_bytes/rank{rank}"][-1][1] == figures["memory_bytes"]["parameters"]
    assert found["summary/loss/run"][0][1] == pytest.approx(summary["loss"])
    accuracies = [value for name, points in found.items() if name.startswith("logged/accuracy") for _, value in points]
    assert pytest.approx(summary["accuracy"]) in accuracies
    names = {name.rpartition("/")[0].removeprefix("summary/") for name in found if not name.startswith("logged/")}
    table = (*STEPS, *(figure for figures in MEASURED.values() for figure in figures), *OF_RUN, *OF_RANK)
    assert names <= {figure.name for figure in table}


@pytest.mark.parametrize("tool", READERS)
def test_a_loss_that_is_not_finite_and_names_of_strangers_are_exported(diverged, tool, tmp_path, monkeypatch):
    found = exported(diverged, tool, tmp_path, monkeypatch)
    same(found, recorded(diverged), tool)
    losses = [value for _, value in sorted(found["loss/rank0"])]
    assert len(losses) == 7 and math.isnan(losses[5]) and losses[6] == largest(tool)
    logged = [name for name in found if name.startswith("logged/")]
    assert len(logged) == 1 and re.fullmatch(r"logged/[A-Za-z0-9_.\- ]+/rank0", logged[0])
    assert found[logged[0]] == [(3, 0.5)]


def test_configuration_and_findings_are_in_the_files(diverged, tmp_path, capsys):
    assert called("export", str(diverged.path), "--to", "csv", "--out", str(tmp_path / "new")) == 0
    folder = tmp_path / "new" / diverged.name
    assert str(folder) in capsys.readouterr().out
    config = dict(csv.reader((folder / "config.csv").open()))
    assert (config["strategy"], config["batch_size"], config["nproc"]) == ("ddp", "128", "2")
    titles = [row["title"] for row in csv.DictReader((folder / "findings.csv").open())]
    assert titles == [finding.title for finding in Run.attach(diverged.path).findings()] != []
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_tensorboard_has_hyperparameters_and_findings(diverged, tmp_path):
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    Run.attach(diverged.path).export("tensorboard", tmp_path)
    read = EventAccumulator(str(tmp_path / diverged.name))
    read.Reload()
    plugins = read.PluginTagToContent("hparams")
    parameters = HParamsPluginData.FromString(plugins["_hparams_/session_start_info"]).session_start_info.hparams
    assert (parameters["strategy"].string_value, parameters["batch_size"].number_value) == ("ddp", 128)
    (notes,) = read.Tensors("notes")
    said = notes.tensor_proto.string_val[0].decode()
    assert all(finding.title in said for finding in Run.attach(diverged.path).findings())


def test_mlflow_has_hyperparameters_findings_and_the_state(diverged, tmp_path):
    needs("mlflow")
    import mlflow

    Run.attach(diverged.path).export("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("labkit").experiment_id])
    assert (run.data.params["strategy"], run.data.params["batch_size"]) == ("ddp", "128")
    for finding in Run.attach(diverged.path).findings():
        assert finding.title in run.data.tags["mlflow.note.content"]
        assert run.data.tags[f"finding.{finding.name}"] == finding.title
    assert run.info.status == "FINISHED"


def test_wandb_has_the_configuration_and_findings_as_notes_and_tags(diverged, tmp_path):
    needs("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    Run.attach(diverged.path).export("wandb", tmp_path)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = [Record.FromString(data) for data in records_of_wandb(path)]
    runs = [record.run for record in records if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["strategy"], config["batch_size"], runs[0].display_name) == ("ddp", 128, diverged.name)
    findings = Run.attach(diverged.path).findings()
    assert all(finding.title in runs[-1].notes for finding in findings)
    assert set(runs[-1].tags) == {finding.name for finding in findings}


def test_trackio_has_the_configuration_and_findings_as_alerts(diverged, tmp_path, monkeypatch):
    needs("trackio")
    exported(diverged, "trackio", tmp_path, monkeypatch)
    with sqlite3.connect(tmp_path / "labkit.db") as database:
        (config,) = database.execute("SELECT config FROM configs").fetchone()
        titles = [title for (title,) in database.execute("SELECT title FROM alerts")]
    assert json.loads(config)["strategy"] == "ddp"
    assert sorted(titles) == sorted(finding.title for finding in Run.attach(diverged.path).findings())


def test_perfetto_has_the_profiled_steps_and_replaces_only_traces_of_the_lab(real, diverged, tmp_path, capsys):
    for _ in range(2):
        assert called("export", str(real.folder.path), "--to", "perfetto", "--out", str(tmp_path)) == 0
    events = json.loads((tmp_path / f"{real.name}.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["args"]["step"]) for event in spans} == {
        (rank, step) for rank, of in real.state.ranks.items() for step in of.timelines
    }
    capsys.readouterr()
    (tmp_path / f"{real.name}.json").write_text("precious")
    assert called("export", str(real.folder.path), "--to", "perfetto", "--out", str(tmp_path)) == 1
    assert "exists and was not written by labkit" in capsys.readouterr().err
    assert (tmp_path / f"{real.name}.json").read_text() == "precious"
    assert called("export", str(diverged.path), "--to", "perfetto", "--out", str(tmp_path)) == 1
    assert "has no profiled step" in capsys.readouterr().err


# ---- refusals


def refusal(capsys, *arguments: str) -> str:
    """The one sentence with which a command is refused."""
    capsys.readouterr()
    assert called("export", *arguments) != 0
    said = capsys.readouterr()
    assert said.err.startswith("labkit: ") and said.err.count("\n") == 1 and not said.out, said
    return said.err


@pytest.mark.parametrize("tool", READERS)
def test_an_export_is_never_overwritten(diverged, tool, tmp_path, monkeypatch, capsys):
    before = exported(diverged, tool, tmp_path, monkeypatch)
    out = [] if tool == "trackio" else ["--out", str(tmp_path)]
    assert "exists" in (said := refusal(capsys, str(diverged.path), "--to", tool, *out)) or "has a run" in said
    assert READERS[tool](tmp_path, diverged.name).keys() == before.keys()


def test_what_is_at_the_path_stays(diverged, tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    for tool in ("csv", "perfetto"):
        assert "file" in refusal(capsys, str(diverged.path), "--to", tool, "--out", str(tmp_path / "file"))
    (tmp_path / diverged.name).symlink_to(tmp_path / "file")
    assert "exists" in refusal(capsys, str(diverged.path), "--to", "csv", "--out", str(tmp_path))
    assert (tmp_path / "file").read_text() == "precious"
    assert "needs one tool" in refusal(capsys, str(diverged.path), "--to", "csv,perfetto", "--out", str(tmp_path))


def test_unknown_tools_and_missing_packages_are_refused_in_one_sentence(diverged, capsys, monkeypatch):
    assert "must be one of tensorboard" in refusal(capsys, str(diverged.path), "--to", "tensorbord")
    monkeypatch.setattr("labkit.exports.exporting.has", lambda extra: False)
    said = refusal(capsys, str(diverged.path), "--to", "csv,wandb")
    assert said.endswith("python3 -m labkit setup --with wandb\n")
    for value in (5, None, [], "", "typo"):
        with pytest.raises((TypeError, ValueError), match="must be"):
            Run.attach(diverged.path).export(value)


def test_runs_without_steps_and_damaged_runs_are_refused(runs, tmp_path, capsys):
    run = FakeRun(runs)
    run.start()
    run.close()
    out = ["--to", "csv", "--out", str(tmp_path / "out")]
    assert "has no steps to export" in refusal(capsys, str(run.folder.path), *out)
    run.folder.status.write_text("{")
    assert "cannot be read" in refusal(capsys, str(run.folder.path), *out)
    assert "there is no run" in refusal(capsys, "nothing", *out)
    assert not (tmp_path / "out").exists()


def test_a_run_under_way_is_exported_as_far_as_it_is(runs, tmp_path):
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(4)
    Run.attach(run.folder.path).export("csv", tmp_path)
    assert [step for step, _ in of_csv(tmp_path, run.folder.name)["loss/mean"]] == [1, 2, 3, 4]
    run.close()


def test_a_failed_export_leaves_nothing(diverged, tmp_path, monkeypatch, capsys):
    def fail(*_: Any) -> None:
        raise RuntimeError("no\nmore")

    monkeypatch.setattr(exporting.Rows, "end", fail)
    said = refusal(capsys, str(diverged.path), "--to", "csv", "--out", str(tmp_path))
    assert "CSV refused the export: RuntimeError: no more" in said
    assert not (tmp_path / diverged.name).exists()


def test_steps_that_are_repeated_after_a_restart_are_exported_twice(runs):
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(3)
    for writer in run.writers:
        writer.write("start", device="cpu", attempt=1)
    run.done = 1
    run.step(3)
    run.end()
    run.close()
    rows = list(Rows(run.folder).take())
    steps = {rank: [(row.attempt, row.step) for row in rows if row.rank == rank] for rank in (0, 1, None)}
    assert steps[0] == steps[1] == steps[None] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 4)]


# ---- while a run is under way


def test_a_live_export_has_what_a_later_export_has(tmp_path, monkeypatch, warm_server):
    from labkit import run

    monkeypatch.chdir(tmp_path)
    warm_server()
    asked = {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 16, "samples": 320, "sample_every": 5}
    job = run("ddp", **asked, export=["csv", "perfetto"]).wait(300)
    assert [live.failed for live in job.exports] == [False, False], job.exports
    live = of_csv(Path("exports/csv"), job.name)
    job.export("csv", tmp_path / "later")
    later = of_csv(tmp_path / "later", job.name)
    assert {name: sorted(points) for name, points in live.items()} == {
        name: sorted(points) for name, points in later.items()
    }
    assert json.loads(Path(f"exports/perfetto/{job.name}.json").read_text())["traceEvents"]


def test_a_client_that_fails_does_not_affect_the_run(runs, tmp_path, monkeypatch):
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(3)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device", "steps.csv")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labkit.exports.exporting._CsvSink.write", fail)
    live = exporting.Live(run.folder, "csv")
    live.join(60)
    assert live.failed and "does not affect the run: steps.csv cannot be written: No space left" in live.words
    run.close()


def test_a_detached_run_has_no_live_export():
    from labkit import run

    with pytest.raises(ValueError, match="outlives the process"):
        run("ddp", nproc=2, device="cpu", detached=True, export="csv")


def test_the_command_says_where_the_export_is(runs, tmp_path, monkeypatch, capsys, warm_server):
    monkeypatch.chdir(tmp_path)
    warm_server()
    asked = ["--workload", "mlp", "--nproc", "2", "--device", "cpu", "--steps", "3", "--samples", "320"]
    assert called("run", "ddp", *asked, "--export", "csv", "--json") == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert f"labkit: export to csv: exports/csv/{summary['run']}" in said.err
    assert len(of_csv(Path("exports/csv"), summary["run"])["loss/mean"]) == 3


# ---- the page


def test_the_page_has_the_table_of_figures():
    page = (CLONE / "labkit/reference/export.md").read_text(encoding="utf-8").partition("## Figures")[2]
    listed = set(re.findall(r"^\| `([a-z0-9_]+)` \| ([^|]*) \|", page, re.MULTILINE))
    table = (*STEPS, *(figure for figures in MEASURED.values() for figure in figures), *OF_RUN, *OF_RANK)
    assert listed == {(figure.name, figure.unit or "–") for figure in table}
