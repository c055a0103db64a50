"""The command line: scripts, recorded and real runs, and exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import called, recorded_run
from conftest import processes_of, wait_until
from fabricate import FakeRun
from generated import ONLY

from labkit.analysis.summary import summarise
from labkit.cli import parser as cli
from labkit.cli import project
from labkit.plan.nodes import arguments
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, Recording
from labkit.runs.handle import settle
from labkit.setup.environment import CLONE
from labkit.training.strategies import STRATEGIES

LABKIT = [sys.executable, "-m", "labkit"]


def labkit(*arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    """Runs one command in the clone as a subprocess."""
    return subprocess.run(
        [*LABKIT, *arguments], cwd=CLONE, capture_output=True, text=True, check=False, timeout=120, **settings
    )


# ---- JupyterLab


def test_lab_keeps_its_token_and_stays_on_this_machine(monkeypatch):
    monkeypatch.delenv("LABKIT_RUNS")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/etc/mine")
    command = project.lab_command(cli.parse(["lab", "--no-browser", "--port", "9000", "--", "--debug"]))
    assert "--ServerApp.ip=127.0.0.1" in command
    assert f"--ServerApp.root_dir={CLONE}" in command
    assert "--LabApp.default_url=/lab/tree/labs/00_start_here.py" in command
    assert {"--ServerApp.port=9000", "--no-browser", "--debug"} <= set(command)
    assert not any("token" in word or "password" in word for word in command)
    settings = project.lab_environment()
    assert settings["JUPYTER_CONFIG_PATH"] == os.pathsep.join(
        [str(CLONE / "labkit" / "setup" / "jupyter"), "/etc/mine"]
    )
    assert settings["LABKIT_RUNS"] == str(CLONE / "runs")
    first = Path(settings["JUPYTER_PATH"].split(os.pathsep)[0])
    assert json.loads((first / "kernels" / "python3" / "kernel.json").read_text())["argv"][0] == sys.executable
    assert settings["PLOTLY_RENDERER"] == "plotly_mimetype"
    monkeypatch.setenv("PLOTLY_RENDERER", "svg")
    assert project.lab_environment()["PLOTLY_RENDERER"] == "svg"


# ---- scripts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_script_is_printed_as_it_is_written(capsys, strategy):
    assert called("script", strategy, "--workload", ONLY.get(strategy, "mlp")) == 0
    compile(capsys.readouterr().out, "train.py", "exec")


def test_script_for_more_ranks_than_this_machine_has(capsys):
    assert called("script", "ddp", "--nproc", "512") == 0
    assert "--nproc-per-node=512" in capsys.readouterr().out


def test_diff_shows_what_changes(capsys):
    assert called("diff", "single", "ddp", "--nproc", "2") == 0
    changed = capsys.readouterr().out
    assert changed.startswith("--- single-x1/train.py\n+++ ddp-x2/train.py\n")
    assert "\n+" in changed
    assert "DistributedDataParallel" in changed


# ---- recorded runs


@pytest.fixture
def recorded(runs) -> FakeRun:
    return recorded_run(runs)


def test_runs_and_show_as_json_are_one_object(recorded, capsys):
    assert called("runs", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert (row["run"], row["state"], row["steps"]) == (recorded.folder.name, "finished", 30)
    assert called("show", "last", "--json") == 0
    assert json.loads(capsys.readouterr().out) == row


def test_runs_and_show_for_people(recorded, capsys):
    assert called("runs") == 0
    assert recorded.folder.name in capsys.readouterr().out
    assert called("show") == 0
    shown = capsys.readouterr().out
    for fact in ("DDP · cnn on digits", "finished", "step 30/30", "epoch 1: 91% [bold]right[/bold]"):
        assert fact in shown


def test_stop_does_not_change_a_run_that_is_over(recorded, capsys):
    assert called("stop", "last") == 0
    assert "already finished" in capsys.readouterr().out


def test_clean_asks_for_confirmation_and_keeps_a_run_in_progress(recorded, runs, capsys, monkeypatch):
    going = FakeRun(runs, steps=30)
    going.start()
    for _ in range(2):
        FakeRun(runs).end()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert called("clean") == 2
    assert "add --yes" in capsys.readouterr().err
    assert called("clean", "--keep", "1", "--yes") == 0
    left = RunFolder.all()
    assert len(left) == 2
    assert going.folder.name in {folder.name for folder in left}
    assert recorded.folder.name not in {folder.name for folder in left}
    assert called("clean", "--yes", "--keep", "-1") == 2


def test_replay_ends_where_the_run_did(recorded, capsys):
    assert called("replay", "last", "--speed", "1000") == 0
    assert "step 30/30" in capsys.readouterr().out
    assert called("replay", "last", "--speed", "0") == 2


def test_recording_plays_at_its_own_speed(recorded, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("labkit.record.follow.time.monotonic", lambda: now[0])
    recording = Recording(recorded.folder, speed=2.0)
    recording.poll()
    assert (recording.state.step, recording.state.status.state) == (0, "running")
    now[0] += 0.5 + 15 * recorded.step_seconds / 2 + 0.01
    recording.poll()
    assert 13 <= recording.state.step <= 16
    assert not recording.state.over
    now[0] += 1e6
    recording.poll()
    live = Follower(recorded.folder)
    live.poll()
    assert summarise(recording.state) == summarise(live.state)


# ---- real runs


def test_run_in_a_terminal_of_lines_finishes(runs):
    done = labkit(
        "run",
        "ddp",
        "--workload",
        "mlp",
        "--nproc",
        "2",
        "--steps",
        "5",
        "--samples",
        "512",
        "--batch-size",
        "32",
        "--device",
        "cpu",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["world_size"], summary["steps"]) == ("finished", 2, 5)
    assert [rank["exit_code"] for rank in summary["ranks"]] == [0, 0]
    assert "starting ranks" in done.stderr
    assert "finished" in done.stderr
    assert processes_of(str(runs)) == []


def test_script_that_raises_fails_with_its_first_failure(tmp_path):
    script = tmp_path / "bad.py"
    script.write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('rank one is out')\nimport time;"
        " time.sleep(60)\n"
    )
    done = labkit("run", str(script), "--nproc", "2", "--device", "cpu")
    assert done.returncode == 1, done.stderr
    assert "failed (rank 1: ValueError: rank one is out)" in done.stdout
    assert "rank 1 failed first" in done.stdout


def test_a_hang_is_said_while_it_lasts_also_without_a_terminal(runs, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(600)\ndist.all_reduce(torch.ones(1))\n"
    )
    command = [*LABKIT, "run", str(script), "--nproc", "2", "--device", "cpu", "--hang-after", "3"]
    with subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = next(line for line in process.stdout if "hangs.py:5" in line)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert "rank 0" in said and process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_and_nothing_else(number, runs, tmp_path):
    script = tmp_path / "forever.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen(
        [*LABKIT, "run", str(script), "--nproc", "2", "--json"], cwd=CLONE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_until(lambda: any("here" in Path(log).read_text() for log in runs.glob("*/logs/*/*/*/stdout.log")))
            asked = time.monotonic()
            process.send_signal(number)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert json.loads(out)["state"] == "stopped"
    assert time.monotonic() - asked < 20
    assert processes_of(str(runs)) == []


def test_detached_run_is_followed_left_and_stopped(runs, tmp_path):
    script = tmp_path / "forever.py"
    script.write_text("import time\ntime.sleep(600)\n")
    done = labkit("run", str(script), "--nproc", "1", "--detach", "--json")
    assert done.returncode == 0, done.stderr
    name = json.loads(done.stdout)["run"]
    try:
        with subprocess.Popen(
            [*LABKIT, "show", name, "--follow"], cwd=CLONE, stdout=subprocess.PIPE, text=True
        ) as follower:
            assert "ranks" in follower.stdout.readline()
            follower.send_signal(signal.SIGINT)
            follower.communicate(timeout=30)
        assert follower.returncode == 0
        assert processes_of(str(runs)), "leaving the view must not stop a detached run"
    finally:
        stopped = labkit("stop", name)
    assert stopped.returncode == 0
    assert stopped.stdout == f"{name}: stopped\n"
    assert not [process for process in processes_of(str(runs)) if process.status() != psutil.STATUS_ZOMBIE]


def test_closed_pipe_is_not_an_error():
    with subprocess.Popen(
        [*LABKIT, "script", "ddp"], cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("ddp", {"nproc": 2, "steps": 3, "options": {"bucket_mb": 5, "accumulate": 2}, "max_restarts": 1}),
        ("tp", {"nproc": 2, "workload": "gpt", "options": {"loss_parallel": True}}),
        ("fsdp2", {"nproc": 2, "save_every": 5, "checkpoint_async": True}),
        (Path(__file__), {"nproc": 2, "args": ["--nodes", "a b"]}),
    ],
)
def test_the_arguments_of_a_spec_are_read_back(what, fields):
    spec = settle(what, device="cpu", look=False, **fields)
    assert settle(cli.parse(["run", *arguments(spec)]).specs[0], look=False) == spec
