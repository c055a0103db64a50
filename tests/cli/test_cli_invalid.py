"""The command line: each invalid input is refused in one sentence."""

from __future__ import annotations

import json

import pytest
from commands import called

from labkit.cli import commands
from labkit.cli import parser as cli

SPEEDS = {"nan": "nan", "inf": "inf", "-1": "-1.0", "0": "0.0", "1e400": "inf", "fast": "'fast'"}


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        ("run ddpp", "strategy", "strategy must be one of single, "),
        ("run ddpp", "strategy", ", got 'ddpp' (did you mean ddp?); name your own script"),
        ("run zzz", "strategy", "; name your own script by its path, ending in .py"),
        ("run nowhere.py", "script", "has no script 'nowhere.py'"),
        ("run ddp --workload cn", "workload", "workload must be one of cnn, mlp, gpt, moe, resnet18, got 'cn'"),
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
        ("run ddp --workload=", "workload", "workload must be one of cnn, mlp, gpt, moe, resnet18, got ''"),
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
            "extra must be one of deepspeed, handout, kubeflow, mcp, mlflow, mnist, parquet, skypilot, tensorboard,"
            " trackio, wandb, got 'deepsped' (did you mean deepspeed?)",
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
    "arguments", [["runs", "--", "x"], ["stop", "a", "b"], ["run", "ddp", "--np", "2"], ["prophesy", "ddp"]]
)
def test_missing_runs_and_files_are_refused(capsys, arguments):
    assert called(*arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_command_has_its_function():
    _, names = cli.parser_of_commands()
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


def test_all_arguments_of_test_go_to_pytest_and_bench_uses_its_packages_too():
    args = cli.parse(["test", "-k", "cli and not slow", "tests/cli/test_cli.py", "-x", "--", "--lf"])
    assert args.rest == ["-k", "cli and not slow", "tests/cli/test_cli.py", "-x", "--lf"]
    assert args.extras == cli.parse(["bench"]).extras == ("lab", "test", "deepspeed")
