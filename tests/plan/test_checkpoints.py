"""Checkpoints in training: a resumed run continues as if it had not been interrupted, and never starts from scratch
instead."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import started_warm, wait_until, warm_run
from generated import ONLY

from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.record.state import RunState
from labkit.runs.handle import Run
from labkit.training.strategies import STRATEGIES

STEPS, SAVED = 8, 6  # the run resumes within the second epoch of five steps, the last of which is smaller
ASKED = {
    "batch_size": 32,
    "scaling": "strong",
    "samples": 142,
    "seed": 3,
    "device": "cpu",
    "steps": STEPS,
    "save_every": 3,
}
CASES = {name: min(row.default_nproc or 2, 4) for name, row in STRATEGIES.items() if "save_every" not in row.lacks}


def asked(strategy: str, **more) -> dict:
    """The arguments of `run`; `nproc` is the strategy's in CASES unless it is given."""
    sized = {"batch_size": 8, "samples": 34} if strategy in ONLY else {}
    sized["workload"] = ONLY.get(strategy, "mlp")
    changing = {"warmup_steps": 3, "lr_decay": "cosine"}  # the learning rate of every step is another
    stage = {"stage": 3} if strategy == "deepspeed" else {}
    sized["options"] = changing | stage | more.pop("options", {})
    return {"nproc": CASES[strategy], **ASKED, **sized, **more}


@pytest.fixture
def unbroken(shared_run) -> Callable[..., Run]:
    """A run of a strategy that was not interrupted, with checkpoints of steps 3 and 6."""

    def of(strategy: str, **more) -> Run:
        handle = shared_run(strategy, **asked(strategy, **more))
        assert handle.words == "finished", handle.logs(0, "stderr")
        return handle

    return of


def checkpoint(of: Run, step: int = SAVED) -> Path:
    return of.folder.checkpoints / f"step{step:08}"


def column(state: RunState, name: str, after: int = 0) -> dict[int, list[str]]:
    """A column of the steps behind `after`, by rank, as text: NaN equals itself there."""
    return {
        number: [repr(value) for step, value in zip(rank.steps.step, getattr(rank.steps, name)) if step > after]
        for number, rank in state.ranks.items()
    }


def mean_losses(state: RunState, after: int) -> list[float]:
    """The mean of the ranks' losses of each step behind `after`."""
    found: dict[int, list[float]] = {}
    for rank in state.ranks.values():
        for step, loss in zip(rank.steps.step, rank.steps.loss):
            if step > after and not math.isnan(loss):
                found.setdefault(int(step), []).append(loss)
    return [sum(losses) / len(losses) for losses in found.values()]


def continues(resumed: Run, whole: Run, after: int) -> None:
    """Asserts that a run that resumed after a step has trained and reported what the uninterrupted run has."""
    assert resumed.words == "finished", resumed.logs(0, "stderr")
    state = resumed.state
    steps = [repr(float(step)) for step in range(after + 1, STEPS + 1)]
    assert column(state, "step") == dict.fromkeys(state.ranks, steps), (
        "no step of an optimizer that only creates its state"
    )
    assert column(state, "loss") == column(whole.state, "loss", after), "bit for bit"
    assert column(state, "samples") == column(whole.state, "samples", after), "no sample of a batch that was skipped"
    for number, rank in state.ranks.items():
        continued = next(event.t for event in state.metrics if event.name == "step" and event.rank == number)
        assert rank.steps.t[0] - rank.steps.seconds[0] >= continued - 0.005, "no time of a batch that was skipped"


# Below, three strategies continue within an epoch; the slow ones save and resume by the same functions as others.
SLOW = ("cp", "fsdp2_tp", "pp_ddp", "pp_fsdp2_tp")
WITHOUT_DROPOUT = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in CASES
    if name not in ("ddp", "fsdp2", "pp")
]


@pytest.mark.parametrize("strategy", WITHOUT_DROPOUT)
def test_a_resumed_run_trains_and_reports_the_steps_of_an_unbroken_one(unbroken, strategy):
    whole = unbroken(strategy)
    resumed = warm_run(strategy, **asked(strategy, resume=str(checkpoint(whole))))
    continues(resumed, whole, SAVED)
    assert resumed.summary()["steps"] == STEPS


# Each layout, written in every way in which its files differ, and each way to read it.
PAIRS = [
    *(("ddp", "fsdp2", 2), ("ddp", "fsdp", 4), ("zero1", "tp", 2), ("zero1", "pp", 3)),
    *(("fsdp2", "zero1", 2), ("pp", "dp", 2), ("fsdp2", "fsdp2_tp", 4), ("tp", "pp", 2)),
]


@pytest.mark.parametrize(("writer", "reader", "nproc"), PAIRS)
def test_a_strategy_resumes_from_the_checkpoint_of_another_with_other_ranks(unbroken, writer, reader, nproc):
    whole = unbroken(writer)
    resumed = warm_run(reader, **asked(reader, nproc=nproc, resume=str(checkpoint(whole))))
    assert resumed.words == "finished", resumed.logs(0, "stderr")
    assert mean_losses(resumed.state, 0) == pytest.approx(mean_losses(whole.state, SAVED), rel=1e-5)


# Stages in a V: rank 0 has the first and the last one. Its tensors have the names of the whole model, as any others.
V, TWO_V = ({"options": {"schedule": schedule}} for schedule in ("ZBVZeroBubble", "DualPipeV"))
V_PAIRS = [
    *((("pp", V), ("pp", {"nproc": 3})), (("pp", V), ("ddp", {}))),
    *((("single", {}), ("pp", TWO_V)), (("fsdp2", {}), ("pp", V))),
]


def test_a_pipeline_in_a_v_resumes_as_if_it_had_not_been_interrupted(unbroken):
    whole = unbroken("pp", workload="cnn", **V)
    resumed = warm_run("pp", **asked("pp", workload="cnn", **V, resume=str(checkpoint(whole))))
    continues(resumed, whole, SAVED)


@pytest.mark.parametrize(("writer", "reader"), V_PAIRS)
def test_stages_in_a_v_are_read_and_written_for_other_strategies_and_ranks(unbroken, writer, reader):
    whole = unbroken(writer[0], workload="cnn", **writer[1])
    resumed = warm_run(reader[0], **asked(reader[0], workload="cnn", **reader[1], resume=str(checkpoint(whole))))
    assert resumed.words == "finished", resumed.logs(0, "stderr")
    assert mean_losses(resumed.state, 0) == pytest.approx(mean_losses(whole.state, SAVED), rel=1e-5)


# ---- the script by hand


def by_hand(folder: Path, strategy: str, edits: dict[str, str] | None = None, **more) -> Run:
    """Runs a script in `folder` as one's own, with `edits`: the launcher knows nothing of its checkpoints."""
    spec = Spec(strategy, **asked(strategy, **more))
    script, source = folder / "train.py", write_script(spec)
    for old, new in (edits or {}).items():
        assert old in source
        source = source.replace(old, new)
    script.write_text(source, encoding="utf-8")
    return warm_run(script, nproc=spec.processes, device=spec.device)


DROPOUT = {
    "nn.ReLU()": "nn.ReLU(), nn.Dropout(0.5)",
    "    done = resume(": '    torch.rand(int(os.environ["RANK"]) + 1)  # differs by rank\n    done = resume(',
}


@pytest.mark.parametrize(("strategy", "in_thread"), [("ddp", False), ("fsdp2", True), ("pp", False)])
def test_random_numbers_of_every_rank_continue_within_an_epoch(strategy, in_thread, tmp_path):
    how = {"save_every": 3, "checkpoint_async": in_thread}
    (tmp_path / "save").touch()
    whole = by_hand(tmp_path, strategy, DROPOUT, **how)
    assert whole.words == "finished", whole.logs(0, "stderr")
    assert {1, 3, 6} <= {int(path.name[4:]) for path in (tmp_path / "checkpoints").glob("step*")}, "1: as asked"
    assert not (tmp_path / "save").exists(), "the request was served"
    resumed = by_hand(tmp_path, strategy, DROPOUT, **how)
    continues(resumed, whole, SAVED)
    assert len(set(map(str, column(resumed.state, "loss").values()))) == 2, "each rank draws its own"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("strategy", "weights"), [("single", "state.pt"), ("fsdp2", "__1_0.distcp")])
def test_a_damaged_checkpoint_is_named_and_a_restart_uses_the_one_before_it(unbroken, strategy, weights, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken(strategy).folder.checkpoints, folder / "checkpoints")
    flip_a_bit(folder / "checkpoints" / "step00000006" / weights)
    handle = by_hand(folder, strategy)
    said = handle.logs(0)
    assert handle.words == "finished", handle.logs(0, "stderr")
    assert f"step00000006 cannot be used: {weights} is missing or has changed since it was written\n" in said
    assert "resuming from" in said
    assert "step00000003\n" in said
    repaired = json.loads((folder / "checkpoints" / "step00000006" / "manifest.json").read_text())
    assert repaired["step"] == 6, "written again in the place of the damaged one"


@pytest.mark.parametrize(
    ("strategy", "more", "says"),
    [
        ("single", {"workload": "cnn"}, "Cannot resume: {} cannot be used: workload must be 'cnn', got 'mlp'"),
        ("fsdp2", {"workload": "cnn"}, "Cannot resume: {} cannot be used: workload must be 'cnn', got 'mlp'"),
        ("fsdp2", {"steps": 4}, "Nothing to train: step 6 is saved, the last is 4"),
    ],
)
def test_a_script_by_hand_never_starts_from_scratch_when_it_was_to_resume(unbroken, strategy, more, says, tmp_path):
    written = checkpoint(unbroken("fsdp2"))
    handle = by_hand(tmp_path, strategy, resume=str(written), **more)
    assert handle.state.status.state == "failed"
    said = [handle.logs(rank, "stderr") for rank in handle.state.ranks]  # the first to end has torchrun end the others
    assert any(says.format(written) in one for one in said), said


# ---- restarts


@pytest.mark.parametrize(("strategy", "in_thread"), [("ddp", False), ("fsdp2", True)])
def test_a_killed_rank_brings_the_group_back_from_the_newest_checkpoint(strategy, in_thread):
    how = {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 16, "samples": 6400}
    how["checkpoint_async"] = in_thread
    started = started_warm(strategy, steps=100, save_every=10, max_restarts=1, sample_every=0, **how)
    wait_until(lambda: (started.folder.checkpoints / "step00000010").exists(), 120)
    os.kill(started.state.ranks[1].pid, signal.SIGKILL)
    summary = started.wait(240).summary()
    assert (summary["state"], summary["restarts"], summary["steps"]) == ("finished", 1, 100)
    for rank in started.state.ranks.values():
        assert rank.attempt == 1
        steps = [int(step) for step in rank.steps.step[rank.first_step :]]
        assert steps[0] > 10
        assert steps[0] % 10 == 1, "the step after a checkpoint"
        assert steps == list(range(steps[0], 101))
        assert set(rank.steps.samples) == {16.0}, "no sample of a batch that was skipped"
    assert "resuming from" in started.logs(0)
