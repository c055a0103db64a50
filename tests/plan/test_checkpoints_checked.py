"""Checkpoints that are refused before a launch, and how they are located. Nothing is launched here."""

from __future__ import annotations

import pytest
from checkpoints import described, refused, spec, written
from generated import ONLY

from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.plan import checkpoints
from labkit.plan.script import settings, write_script
from labkit.plan.spec import Spec, SpecError
from labkit.record.folder import RunFolder
from labkit.runs.handle import settle
from labkit.training.strategies import STRATEGIES
from labkit.training.strategies import checkpoints as training
from labkit.training.workloads import WORKLOADS

SAVING = [name for name, row in STRATEGIES.items() if "save_every" not in row.lacks]


# ---- a different identity


def trains(strategy: str, workload: str) -> bool:
    """Whether a strategy can train a workload."""
    try:
        return bool(spec(strategy, workload))
    except SpecError:
        return False


@pytest.mark.parametrize("writer", SAVING)
def test_a_checkpoint_is_resumed_by_those_that_read_its_layout_and_refused_by_every_other(writer, tmp_path):
    workload = ONLY.get(writer, "gpt")
    path = written(spec(writer, workload), tmp_path)
    for reader in (name for name in SAVING if trains(name, workload)):
        if STRATEGIES[writer].layout in STRATEGIES[reader].reads:
            assert settle(spec(reader, workload, resume=str(path))).resume == str(path)
        else:
            said = refused(reader, path, workload=workload)
            assert f"{path} contains {checkpoints.LAYOUTS[STRATEGIES[writer].layout]}, and {reader} loads " in said
            assert writer in said.split("resume with ")[1]


def test_every_layout_has_a_description_and_every_script_the_identity_that_the_launcher_expects():
    assert {row.layout for row in STRATEGIES.values()} == set(checkpoints.LAYOUTS)
    assert all(row.layout in row.reads for row in STRATEGIES.values()), "a restart reads what the run has written"
    for strategy in SAVING:
        one = spec(strategy, save_every=5)
        assert settings(one)["MANIFEST"] == checkpoints.identity(one)
        assert f'"layout": "{STRATEGIES[strategy].layout}"' in write_script(one)
    assert checkpoints.identity(Spec("single", "cnn")) == training.MANIFEST


@pytest.mark.parametrize("other", [name for name in WORKLOADS if name != "mlp"])
def test_another_workload_is_refused_with_the_one_to_use(other, tmp_path):
    path = written(Spec("ddp", other, nproc=2), tmp_path)
    assert f"{path} belongs to the workload '{other}', and this run trains mlp; use --workload {other}, or" in refused(
        "ddp", path
    )


def test_another_size_of_the_model_is_refused_with_the_option_to_use(tmp_path):
    path = written(spec("ddp", "gpt", options={"size": "10M"}), tmp_path)
    said = refused("ddp", path, workload="gpt")
    assert "has size='10M', and this run has size='1M'; use --option size=10M, or run without --resume" in said
    described(path, **checkpoints.identity(spec("ddp", "gpt")) | {"step": 30, "world_size": 2, "context": "\x1b]0;"})
    assert r"has context='\x1b]0;', and this run has context=128; run without" in refused("ddp", path, workload="gpt")


def test_other_ranks_and_stages_resume(tmp_path):
    for strategy in ("ddp", "fsdp2", "tp", "pp"):
        path = written(spec(strategy, nproc=2), tmp_path / strategy)
        assert settle(spec(strategy, nproc=3 if strategy == "pp" else 4, resume=str(path))).resume == str(path)
    path = written(spec("pp", "gpt", nproc=2, options={"schedule": "Interleaved1F1B"}), tmp_path / "two stages")
    assert settle(spec("pp", "gpt", nproc=2, resume=str(path))).resume == str(path)


def test_deepspeed_resumes_only_what_the_same_engine_has_written(tmp_path):
    path = written(spec("deepspeed", options={"stage": 2}), tmp_path)
    assert settle(spec("deepspeed", options={"stage": 2}, resume=str(path))).resume == str(path)
    for more in ({"options": {"stage": 3}}, {"nproc": 4}, {}):
        said = refused("deepspeed", path, **more)
        assert "was written with stage=2, ranks=2, precision='fp32', and this run has stage=" in said
    described(path, **checkpoints.identity(spec("deepspeed")) | {"step": 30, "world_size": 2, "engine": "\x1b]0;"})
    assert r"was written with '\x1b]0;', and this run has" in refused("deepspeed", path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"steps": 20}, "use --steps 31 or more"), ({"steps": None, "epochs": 1}, "use --epochs 7 or more")],
)
def test_a_run_with_nothing_left_to_train_is_refused(fields, says, tmp_path):
    # 1,280 samples, 256 per step: 5 steps per epoch
    path = written(spec("ddp"), tmp_path)
    said = refused("ddp", path, **fields)
    assert "was written at step 30, and the run ends at step " in said
    assert said.endswith(f"nothing is left to train; {says}")


@pytest.mark.parametrize(
    ("strategy", "more", "says"),
    [
        (
            "ddp",
            {"save_every": 5},
            "ddp cannot write checkpoints while training continues: it saves the whole",
        ),
        (
            "deepspeed",
            {"save_every": 5},
            "it saves the state of DeepSpeed.s engine in one call; leave",
        ),
        ("fsdp2", {}, "checkpoint-async has no effect without checkpoints; add --save-every N"),
    ],
)
def test_checkpoints_in_a_thread_are_refused_where_one_call_writes_them(strategy, more, says):
    with pytest.raises(SpecError, match=says):
        spec(strategy, checkpoint_async=True, **more)
    with pytest.raises(SpecError, match="applies only to a strategy"):
        Spec(script="train.py", checkpoint_async=True)
    asked = cli.parse(("script", "fsdp2", "--save-every", "5", "--checkpoint-async"))
    assert cli.fields_of(asked) == {"save_every": 5, "checkpoint_async": True, "options": {}}


# ---- locating checkpoints


def test_a_run_is_named_by_its_name_its_path_its_checkpoints_or_one_of_them(runs, tmp_path, monkeypatch):
    folder = RunFolder.create("ddp-x2", runs)
    RunFolder.write_json(folder.spec, spec("ddp").to_json())
    older, newer = (written(spec("ddp"), folder.checkpoints, step) for step in (20, 30))
    monkeypatch.chdir(runs)
    for place in (folder.name, "last", f"./{folder.name}", folder.path, folder.checkpoints, newer):
        assert settle(spec("ddp", resume=str(place))).resume == str(newer)
    monkeypatch.chdir(tmp_path)
    assert settle("ddp", workload="mlp", nproc=2, device="cpu", steps=100, resume=folder.name).resume == str(newer)
    assert settle(spec("ddp", resume=str(older))).resume == str(older)


def test_a_script_that_is_only_printed_names_the_checkpoint_too(runs, capsys):
    folder = RunFolder.create("ddp-x2", runs)
    RunFolder.write_json(folder.spec, spec("ddp").to_json())
    path = written(spec("ddp"), folder.checkpoints)
    asked = ("--workload", "mlp", "--nproc", "2", "--steps", "40", "--resume", folder.name)
    assert act(cli.parse(("script", "zero1", *asked))) == 0
    assert f'\nRESUME = "{path}"' in capsys.readouterr().out
    assert act(cli.parse(("script", "zero1", *asked, "--workload", "cnn"))) == 2
    assert f"labkit: {path} belongs to the workload 'mlp'" in capsys.readouterr().err


def test_folders_without_checkpoints_are_refused(runs, tmp_path):
    assert "there is no run 'nothing'" in refused("ddp", "nothing")
    assert "there are no checkpoints in" in refused("ddp", tmp_path)
    (tmp_path / "step00000010.pt").write_bytes(b"")
    assert "have no manifest.json (an older version wrote them" in refused("ddp", tmp_path)
    shards = tmp_path / "shards" / "step00000010"
    shards.mkdir(parents=True)
    assert "have no manifest.json" in refused("ddp", shards)
    assert "have no manifest.json" in refused("ddp", shards.parent)
