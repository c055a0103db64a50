"""Scripts that leave the loop to a framework, run in the lab as they are: the loss and the samples of each step are the
framework's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from folded import events_in
from places import SCRIPTS

from labkit.runs import handle

FRAMEWORKS = SCRIPTS / "frameworks"


@dataclass(frozen=True)
class Case:
    """A script of two ranks; `mean` if one rank prints the mean loss over ranks, instead of each its own."""

    script: str
    samples: tuple[int, ...]  # of each step of a rank
    mean: bool = False
    tolerance: float = 1e-5


CASES = (
    Case("lightning_fit.py", samples=(16, 16, 8) * 2),  # an epoch has five batches, two per step
    Case("accelerate_loop.py", samples=(16, 16, 8) * 2),
    Case("hf_trainer.py", samples=(8,) * 6, mean=True),
    Case("deepspeed_engine.py", samples=(12,) * 5),
    Case("nanogpt_style.py", samples=(12,) * 6),
)


def test_every_script_of_the_folder_is_run():
    helpers = {"whole_torchvision.py"}
    assert {case.script for case in CASES} == {path.name for path in FRAMEWORKS.glob("*.py")} - helpers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script)
def test_loss_and_samples_of_a_step_are_the_frameworks_own(case, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run = handle.run(FRAMEWORKS / case.script, nproc=2, device="cpu")
    run.wait(900)
    assert run.state.exit_code(0) == 0, run.logs(0, "stderr") + run.logs(1, "stderr")
    shown, printed = [], []
    for rank in (0, 1):
        events = events_in(run.folder.events_of(rank))
        assert [event for event in events if event["kind"] in ("probe_error", "error")] == []
        steps = [event for event in events if event["kind"] == "step"]
        assert tuple(step["samples"] for step in steps) == case.samples
        shown.append([step["loss"] for step in steps])
        printed.append([float(line.split()[1]) for line in run.logs(rank).splitlines() if line.startswith("loss ")])
    if case.mean:
        shown, printed = [[sum(losses) / 2 for losses in zip(*shown)]], [printed[0]]
    for losses, own in zip(shown, printed, strict=True):
        assert losses == pytest.approx(own, rel=case.tolerance)
