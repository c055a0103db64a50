"""Checkpoints: a run that was broken goes on as if it had not been; what cannot be used is named, and the one before it is used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from weaving import RECORDER, TORCHRUN, record, run_alone

from labkit import SpecError
from labkit.api import run, settle
from labkit.script import write_script
from labkit.spec import Spec
from labkit.strategies import STRATEGIES

ASKED = {"batch_size": 32, "scaling": "strong", "samples": 110, "seed": 3, "device": "cpu", "save_every": 2}
CASES = {name: min(row.default_nproc or 2, 4) for name, row in STRATEGIES.items() if "save_every" not in row.lacks}


def asked(strategy: str, **more) -> Spec:
    sized = {"workload": "gpt", "batch_size": 8, "samples": 26} if strategy == "cp" else {"workload": "mlp"}
    return Spec(strategy, nproc=CASES[strategy], **ASKED | sized | more)


def again(spec: Spec, folder: Path, rank: int = 0) -> tuple[list, str]:
    """Writes the script of `spec` over the one in `folder` and runs it there: a rank's losses, and what was printed."""
    (folder / "train.py").write_text(write_script(spec), encoding="utf-8")
    launcher = [sys.executable] if spec.processes == 1 else [*TORCHRUN, f"--nproc-per-node={spec.processes}"]
    said = run_alone([*launcher, str(RECORDER), "train.py", "."], folder)
    return json.loads((folder / f"rank{rank}.json").read_text())["losses"], said


@pytest.mark.parametrize("strategy", CASES)
def test_losses_after_a_resume_are_those_of_an_unbroken_run_bit_for_bit(strategy, tmp_path):
    spec = asked(strategy, steps=7)
    speaker = spec.strategy_row.constants(spec).get("LOSS_RANK", 0)
    unbroken = record(spec, tmp_path / "run")[speaker]["losses"]
    for newest in (tmp_path / "run" / "checkpoints").glob("step00000006*"):  # as if it had been broken off before
        newest.rename(tmp_path / newest.name)
    resumed, said = again(spec, tmp_path / "run", speaker)
    assert "step00000004" in said
    assert len(unbroken) == 7
    assert resumed == unbroken[4:], "in the second epoch, after the fourth step"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_checkpoint_that_cannot_be_used_is_named_and_the_one_before_it_is_used(strategy, tmp_path):
    folder = tmp_path / "run"
    record(asked(strategy, steps=6), folder)
    newest = sorted((folder / "checkpoints").glob("step*"))[-1]
    cut = newest if newest.is_file() else max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(cut, cut.stat().st_size // 2)
    losses, said = again(asked(strategy, steps=7), folder)
    assert f"{newest.name}" in said.split("cannot be used")[0]
    assert "going on from" in said
    assert len(losses) == 3, "steps 5, 6 and 7"


def test_foreign_checkpoints_alone_end_the_run(tmp_path):
    folder = tmp_path / "run"
    record(asked("single", steps=2), folder)
    spec = Spec("single", "cnn", **ASKED, steps=3)
    (folder / "train.py").write_text(write_script(spec), encoding="utf-8")
    with pytest.raises(AssertionError, match="none of them can be used"):
        run_alone([sys.executable, "train.py"], folder)


def test_a_killed_rank_brings_the_group_back_from_the_newest_checkpoint():
    started = run("ddp", workload="mlp", nproc=2, device="cpu", batch_size=16, steps=400, samples=6400, save_every=10, max_restarts=1)
    wait_until(lambda: (started.folder.checkpoints / "step00000010.pt").exists())
    os.kill(started.state.ranks[1].pid, signal.SIGKILL)
    summary = started.wait(120).summary()
    assert (summary["state"], summary["restarts"], summary["steps"]) == ("finished", 1, 400)
    state = started.state
    assert {rank.attempt for rank in state.ranks.values()} == {1}
    first = state.ranks[0].steps.step[state.ranks[0].first_step]
    assert first > 10
    assert first % 10 == 1, "the step after a checkpoint"
    assert "going on from" in started.logs(0)


def test_resume_takes_the_checkpoints_of_another_run(tmp_path):
    first = run("single", workload="mlp", device="cpu", batch_size=16, steps=4, samples=160, save_every=2).wait(120)
    second = run("single", workload="mlp", device="cpu", batch_size=16, steps=6, samples=160, resume=first.name).wait(120)
    assert second.summary()["state"] == "finished"
    assert list(second.state.ranks[0].steps.step) == [5, 6]
    shutil.rmtree(first.folder.checkpoints)
    with pytest.raises(SpecError, match="there are no checkpoints in"):
        settle("single", workload="mlp", resume=first.name)
    with pytest.raises(SpecError, match="there is no run 'nothing'"):
        settle("single", workload="mlp", resume="nothing")
