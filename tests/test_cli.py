"""The command line and the terminal view: output, errors for invalid input, and exit codes."""

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
from conftest import processes_of, wait_until
from fabricate import FakeRun
from rich.console import Console

from labkit.analysis.summary import summarise
from labkit.cli import commands, setting_up
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.common.units import sizes
from labkit.frontends import terminal
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.replay import Recording
from labkit.setup.environment import CLONE
from labkit.training.strategies import STRATEGIES

LABKIT = [sys.executable, "-m", "labkit"]


def labkit(*arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    """Runs one command in the clone as a subprocess."""
    return subprocess.run(
        [*LABKIT, *arguments], cwd=CLONE, capture_output=True, text=True, check=False, timeout=120, **settings
    )


def called(*arguments: str) -> int:
    """Runs one command in this process and returns its exit code."""
    try:
        return act(cli.parse(arguments))
    except SystemExit as end:
        return end.code


# ---- invalid input

SPEEDS = {"nan": "nan", "inf": "inf", "-1": "-1.0", "0": "0.0", "1e400": "inf", "fast": "'fast'"}


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        ("run ddpp", "strategy", "strategy must be one of single, "),
        ("run ddpp", "strategy", ", got 'ddpp' (did you mean ddp?); name your own script"),
        ("run zzz", "strategy", "; name your own script by its path, ending in .py"),
        ("run nowhere.py", "script", "has no script 'nowhere.py'"),
        ("run ddp --workload cn", "workload", "workload must be one of cnn, mlp, gpt, resnet18, got 'cn'"),
        ("run ddp --nproc 0", "nproc", "--nproc must be an integer from 1 to 65536, got 0"),
        ("run ddp --nproc 4000 --device cpu", "nproc", "--nproc 4000 exceeds the maximum of"),
        ("run ddp --scaling strong --batch-size 7 --nproc 2", "batch_size", "use --batch-size 6 or 8"),
        ("run ddp --steps 3 --epochs 2", "steps", "give one of them"),
        ("run ddp --option bucket_mb", "options", "has no value; write --option NAME=VALUE"),
        ("run ddp --option buckets=1", "options", "has no option 'buckets'; options: bucket_mb"),
        ("run ddp --data mnist --data-dir /nowhere", "data", "use --data digits"),
        ("run ddp -- --lr 1", "args", "apply only to your own script"),
        ("run train.py --workload cnn", "workload", "applies only to a strategy"),
        ("run single --nproc 2", "strategy", "single trains on one device"),
        ("run ddp --nproc two", "nproc", "--nproc must be an integer from 1 to 65536, got 'two'"),
        ("run", None, "nothing to run was given; name a strategy"),
        (
            "run ddp --seed 18446744073709551616",
            "seed",
            "--seed must be an integer from 0 to 9223372036854775807, got 18446744073709551616",
        ),
        ("run ddp --seed -1", "seed", "got -1"),
        (
            "run ddp --batch-size 99999999999",
            "batch_size",
            "--batch-size must be an integer from 1 to 1000000000, got 99999999999",
        ),
        ("run ddp --batch-size 1000000 --nproc 2", "batch_size", "use --batch-size 30000, or more --samples"),
        (
            "run ddp --nproc 100000000000000000000",
            "nproc",
            "--nproc must be an integer from 1 to 65536, got 100000000000000000000",
        ),
        ("run ddp --steps nan", "steps", "got 'nan'"),
        ("run ddp --option workers=1000", "options", "option workers must be an integer from 0 to 64, got '1000'"),
        ("run ddp --option clip_norm=nan", "options", "option clip_norm must be a number from 0 to 1e+12, got 'nan'"),
        ("run ddp --option clip_norm=inf", "options", "got 'inf'"),
        ("run ddp --option accumulate=1000", "options", "use accumulate=128 or less"),
        ("run ddp --fault slow_rank --nproc 1", "fault", "use --nproc 2"),
        ("run ddp --workload=", "workload", "workload must be one of cnn, mlp, gpt, resnet18, got ''"),
        ("run ddp --data-dir=", "data_dir", "data_dir must be a non-empty path, got ''"),
        ("run -m nowhere.at.all", "script", "no module nowhere.at.all that can run as a script"),
        ("run train.py --precision bf16", "precision", "applies only to a strategy"),
        ("compare --strategies=", "strategies", "strategies must not be empty"),
        ("compare --strategies all --nproc 0", "nproc", "--nproc must be an integer from 1 to 65536, got 0"),
        ("claims --rounds 0", None, "--rounds must be an integer from 1 to 100, got 0"),
        ("show nothing", None, "there is no run 'nothing'"),
        ("show", None, "there is no run 'last'"),
    ],
)
def test_invalid_input_is_refused_in_one_sentence(runs, capsys, monkeypatch, arguments, field, says):
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    command, *rest = arguments.split()
    assert called(command, "--json", *rest) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert says in said.err
    assert json.loads(said.out) == {"error": said.err.removeprefix("labkit: ").rstrip("\n"), "field": field}
    assert not runs.exists() or not list(runs.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(
            (f"replay --speed {speed}", f"--speed must be a number from 0.01 to 10000, got {got}")
            for speed, got in SPEEDS.items()
        ),
        ("clean --keep -1", "--keep must be an integer from 0 to 1000000, got -1"),
        ("logs --rank -1", "--rank must be an integer from 0 to 65535, got -1"),
        ("logs --stream stdin", "--stream must be one of stdout, stderr, got 'stdin'"),
        (
            "setup --with deepsped",
            "extra must be one of deepspeed, handout, mnist, got 'deepsped' (did you mean deepspeed?)",
        ),
    ],
)
def test_flags_are_bounded(runs, capsys, arguments, says):
    assert called(*arguments.split()) == 2
    assert capsys.readouterr().err == f"labkit: {says}\n"


def test_unknown_command_lists_the_valid_ones(capsys):
    assert called("rnu") == 2
    said = capsys.readouterr().err
    assert said.startswith("labkit: command must be one of setup, lab, test, run, ")
    assert said.endswith(", got 'rnu' (did you mean run?)\n")


def test_no_command_shows_the_commands(capsys):
    assert called() == 2
    assert "start JupyterLab on the first lab" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments", [["runs", "--", "x"], ["stop", "a", "b"], ["run", "ddp", "--np", "2"], ["predict", "ddp"]]
)
def test_missing_runs_and_files_are_refused(capsys, arguments):
    assert called(*arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_command_has_its_function():
    _, names = cli._parser()
    assert all(callable(commands.COMMANDS[name]) for name in names)


def test_arguments_become_the_spec():
    fields = ["--workload", "mlp", "--nproc", "4", "--batch-size", "64", "--scaling", "strong", "--seed", "3"]
    args = cli.parse(["run", "fsdp2", *fields, "--option", "reshard_after_forward=no"])
    (spec,) = args.specs
    assert (spec.strategy, spec.workload, spec.nproc, spec.batch_size, spec.scaling, spec.seed) == (
        "fsdp2",
        "mlp",
        4,
        64,
        "strong",
        3,
    )
    assert spec.options["reshard_after_forward"] is False
    (spec,) = cli.parse(["run", "my/train.py", "--nproc", "2", "--", "--lr", "0.1", "--", "x"]).specs
    assert (spec.script, spec.args) == ("my/train.py", ("--lr", "0.1", "--", "x"))


def test_all_arguments_of_test_go_to_pytest():
    args = cli.parse(["test", "-k", "cli and not slow", "tests/test_cli.py", "-x", "--", "--lf"])
    assert args.rest == ["-k", "cli and not slow", "tests/test_cli.py", "-x", "--lf"]
    assert args.extras == ("lab", "test", "deepspeed")


# ---- JupyterLab


def test_lab_keeps_its_token_and_stays_on_this_machine(monkeypatch):
    monkeypatch.delenv("LABKIT_RUNS")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/etc/mine")
    command = setting_up.lab_command(cli.parse(["lab", "--no-browser", "--port", "9000", "--", "--debug"]))
    assert "--ServerApp.ip=127.0.0.1" in command
    assert f"--ServerApp.root_dir={CLONE}" in command
    assert "--LabApp.default_url=/lab/tree/labs/00_start_here.py" in command
    assert {"--ServerApp.port=9000", "--no-browser", "--debug"} <= set(command)
    assert not any("token" in word or "password" in word for word in command)
    settings = setting_up.lab_environment()
    assert settings["JUPYTER_CONFIG_PATH"] == os.pathsep.join(
        [str(CLONE / "labkit" / "setup" / "jupyter"), "/etc/mine"]
    )
    assert settings["LABKIT_RUNS"] == str(CLONE / "runs")


# ---- scripts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_script_is_printed_as_it_is_written(capsys, strategy):
    assert called("script", strategy, "--workload", "gpt" if strategy == "cp" else "mlp") == 0
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
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(30)
    run.say(0, "epoch 1: \x1b[31m91%\x1b[0m [bold]right[/bold]\n")
    run.end()
    return run


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
    monkeypatch.setattr("labkit.record.replay.time.monotonic", lambda: now[0])
    recording = Recording(recorded.folder, speed=2.0)
    recording.poll()
    assert (recording.state.step, recording.state.status["state"]) == (0, "running")
    now[0] += 0.5 + 15 * recorded.step_seconds / 2 + 0.01
    recording.poll()
    assert 13 <= recording.state.step <= 16
    assert not recording.state.over
    now[0] += 1e6
    recording.poll()
    live = Follower(recorded.folder)
    live.poll()
    assert summarise(recording.state) == summarise(live.state)


# ---- the view


def drawn(state, folder, width: int, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=height or 25, force_terminal=True, color_system=None)
    console.print(terminal.view(state, folder, height))
    return console.file.getvalue()


def followed(run: FakeRun):
    follower = Follower(run.folder)
    follower.poll()
    return follower.state


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_view_fits_and_does_not_move(runs, width, device):
    run = FakeRun(runs, nproc=2, steps=12_345, device=device)
    run.start()
    run.step(9)
    first = drawn(followed(run), run.folder, width).splitlines()
    run.step(30)
    second = drawn(followed(run), run.folder, width).splitlines()
    assert all(len(line) <= width for line in first + second)
    table = [line for line in first if line.startswith("rank ")]
    assert table == [line for line in second if line.startswith("rank ")]
    for word in ("rank", "device", "step", "loss", "samples/s", "ms/step", "phases", "memory / peak", "exit"):
        assert word in table[0]
    text = "\n".join(second)
    assert "step 39/12345" in text
    assert ("cuda:1" if device == "cuda" else "cpu") in text
    assert "12.0 / " in text


def test_view_shows_no_more_ranks_than_the_screen_holds(runs):
    run = FakeRun(runs, nproc=64)
    run.start()
    text = drawn(followed(run), run.folder, 80, height=24)
    assert "more ranks" in text
    assert len(text.splitlines()) <= 24


def test_first_failure_stands_out_and_says_where_to_read_more(runs):
    run = FakeRun(runs)
    run.start()
    run.step(3)
    run.say(1, "Traceback …\n", "stderr")
    run.writers[1].write(
        "error", type="ValueError", message="bad [red]shape[/red]\x1b]0;title\x07\x1b[2J", traceback=""
    )
    run.status("failed", ended=run.began + 5, failures={"0": {"exit_code": -15, "signal": "SIGTERM"}})
    text = drawn(followed(run), run.folder, 200)
    assert "rank 1 failed first: " in text and "rank 0 was terminated because rank 1 failed" in " ".join(text.split())
    assert "ValueError: bad [red]shape[/red]" in text
    assert str(run.logs[1] / "stderr.log") in text
    assert "\x1b" not in text


def test_live_view_leaves_its_last_picture(recorded):
    console = Console(file=io.StringIO(), width=80, height=25, force_terminal=True, color_system="truecolor")
    state = terminal.watch(Recording(recorded.folder, speed=1000.0), recorded.folder, console)
    assert state.over
    drawn = console.file.getvalue()
    assert "\x1b[?25h" in drawn, "the cursor is shown again"
    assert "step 30/30" in drawn[drawn.rindex("DDP · cnn") :]


def test_phases_fill_the_bar(runs):
    run = FakeRun(runs)
    run.start()
    run.step(5)
    row = next(line for line in drawn(followed(run), run.folder, 120).splitlines() if line.startswith("■ 0"))
    bar = [letter for letter in row if letter in "·░▒▓█"]
    assert len(bar) == 40
    assert bar.count("▒") == pytest.approx(40 * 0.5, abs=2)


def test_run_without_events_can_be_drawn(tmp_path):
    folder = RunFolder(tmp_path / "x")
    follower = Follower(folder)
    follower.poll()
    assert "ready" in drawn(follower.state, folder, 80)
    assert terminal.line(follower.state) == "ready"


@pytest.mark.parametrize(
    ("counts", "words"),
    [((float("nan"),), "–"), ((512.0,), "512 B"), ((5e6, 9e6), "4.8 / 8.6 MiB"), ((2e12,), "1.8 TiB"), ((0.0,), "0 B")],
)
def test_sizes(counts, words):
    assert sizes(*counts) == words


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


def test_ctrl_c_stops_the_run_and_nothing_else(runs, tmp_path):
    script = tmp_path / "forever.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen(
        [*LABKIT, "run", str(script), "--nproc", "2", "--json"], cwd=CLONE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_until(lambda: any("here" in Path(log).read_text() for log in runs.glob("*/logs/*/*/*/stdout.log")))
            asked = time.monotonic()
            process.send_signal(signal.SIGINT)
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
