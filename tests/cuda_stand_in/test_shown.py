"""What people are shown of GPUs and of runs on them: the doctor's lines, snapshots, and figures of memory."""

from __future__ import annotations

import pickle

import pytest
from conftest import wait_until, warm_run

from cuda_stand_in.test_strategies import ASKED, check
from labkit.analysis.profiled import beyond
from labkit.figures.charts import memory_by_owner
from labkit.frontends import doctor
from labkit.frontends.panel.charts import apart
from labkit.runs.handle import run as start
from labkit.setup import preflight


@pytest.fixture
def asked_anew():
    """What torch says of itself depends on the machine."""
    preflight.torch.cache_clear()
    yield
    preflight.torch.cache_clear()


@pytest.mark.parametrize(
    ("machine", "line", "said"),
    [
        ("t4x2", doctor.devices, ("fine", "Tesla T4 (15 GiB, 7.5), Tesla T4 (15 GiB, 7.5)")),
        ("t4x2", doctor.precision, ("fine", "fp32 and fp16; Tesla T4 has no bf16")),
        ("h100x8", doctor.precision, ("fine", "fp32, fp16 and bf16")),
        ("t4x2", doctor.backends, ("fine", "gloo and nccl")),
        ("t4x2", doctor.all_reduce, ("fine", "nccl")),
        ("p100x1", doctor.devices, ("broken", "not for Tesla P100")),
        ("old-driver", doctor.devices, ("fine", "supports only CUDA 12.2")),
    ],
)
def test_doctor(machine, line, said, on_machine, asked_anew):
    on_machine(machine)
    found = line()
    level, words = said
    assert found.level == level and words in found.says, found


def test_doctor_without_a_connection_between_gpus(on_machine, asked_anew):
    on_machine("t4x2", nccl_error="socketStartConnect: Connect to 10.0.0.1<40001> failed : Connection refused")
    found = doctor.all_reduce()
    assert found.level == "broken" and "NCCL_DEBUG=INFO" in found.fix


def test_memory_of_a_run_is_drawn_and_captured(on_machine):
    on_machine("t4x2")
    run = check(warm_run("ddp", workload="mlp", **ASKED), ASKED["steps"])
    state = run.state
    for rank in state.ranks.values():
        kept, used = beyond(state, rank)
        assert kept >= 0 and used > 0
    assert "rank 0" in apart(state) and "rank 1" in apart(state)
    names = [bars.name for bars in memory_by_owner(state).bars]
    assert names[-2:] == ["cached by the allocator", "context, NCCL, others"]


def test_a_snapshot_is_one_of_torch(on_machine):
    on_machine("t4x2")
    run = start("ddp", workload="mlp", batch_size=16, steps=60, device="cuda", fault="slow_loader")
    wait_until(lambda: min((len(rank.steps) for rank in run.state.ranks.values()), default=0) > 3, 120)
    step = run.capture(snapshot=True)
    run.wait(120)  # to its end: coverage of a rank that is killed is lost
    assert all(step in rank.timelines for rank in run.state.ranks.values())
    paths = sorted((run.folder.path / "snapshots").iterdir())
    assert [path.name for path in paths] == [f"rank{rank}-step{step}.pickle" for rank in range(2)]
    for path in paths:
        assert pickle.loads(path.read_bytes())["segments"]
