"""Scripts that leave the loop to a framework, run in the lab as they are: the loss and the samples of each step are the
framework's own."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import pytest
from folded import events_in
from places import SCRIPTS
from weaving import TORCHRUN, assert_trained

from labkit.runs import handle
from labkit.setup.environment import CLONE

FRAMEWORKS = SCRIPTS / "frameworks"


@dataclass(frozen=True)
class Case:
    """A script of two ranks; `mean` if one rank prints the mean loss over ranks, instead of each its own."""

    script: str
    samples: tuple[int, ...]  # of each step of a rank
    mean: bool = False
    tolerance: float = 1e-5
    metric: tuple[str, tuple[int, ...]] | None = None  # that its integration records, and after which steps


CASES = (
    Case("lightning_fit.py", samples=(16, 16, 8) * 2, metric=("valid", (3, 6))),  # an epoch has five batches
    Case("accelerate_loop.py", samples=(16, 16, 8) * 2, metric=("epoch_loss", (3, 6))),
    Case("hf_trainer.py", samples=(8,) * 6, mean=True, metric=("eval_loss", (4, 6))),
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
    shown, printed, metrics = [], [], []
    for rank in (0, 1):
        events = events_in(run.folder.events_of(rank))
        assert [event for event in events if event["kind"] in ("probe_error", "error")] == []
        steps = [event for event in events if event["kind"] == "step"]
        assert tuple(step["samples"] for step in steps) == case.samples
        shown.append([step["loss"] for step in steps])
        metrics.append([event for event in events if event["kind"] == "metric"])
        printed.append([float(line.split()[1]) for line in run.logs(rank).splitlines() if line.startswith("loss ")])
    if case.mean:
        shown, printed = [[sum(losses) / 2 for losses in zip(*shown)]], [printed[0]]
    for losses, own in zip(shown, printed, strict=True):
        assert losses == pytest.approx(own, rel=case.tolerance)
    assert metrics[1] == [], "rank 0 alone logs"
    if case.metric is None:
        assert metrics[0] == []
        return
    name, steps = case.metric
    recorded = [event for event in metrics[0] if event["name"] == name]
    own = [float(line.split()[2]) for line in run.logs(0).splitlines() if line.startswith(f"metric {name} ")]
    assert tuple(event["step"] for event in recorded) == steps
    assert [event["value"] for event in recorded] == pytest.approx(own, rel=1e-6)
    assert all(isinstance(event["value"], float) for event in metrics[0])


WITH_METRIC = [case for case in CASES if case.metric]
SLOW = [
    pytest.param(case, marks=pytest.mark.slow) if case.script != "accelerate_loop.py" else case for case in WITH_METRIC
]


@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.script)
def test_integrations_do_nothing_without_the_lab(case, tmp_path, tmp_path_factory):
    """Under torchrun itself, with labkit on the path only."""
    logs = tmp_path_factory.mktemp("logs")
    command = [*TORCHRUN, "--nproc-per-node=2", f"--log-dir={logs}"]
    done = subprocess.run(
        [*command, str(FRAMEWORKS / case.script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(CLONE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_trained(done)
    assert f"metric {case.metric[0]} " in done.stdout
    assert list(tmp_path.iterdir()) == []
