"""Machines on which GPUs are few, many, partitioned, hidden, or of no use to torch."""

from __future__ import annotations

import pytest
from conftest import warm_run

from cuda_stand_in.test_strategies import ASKED, STEPS, check
from labkit.analysis.diagnose import findings
from labkit.plan.spec import SpecError
from labkit.runs.handle import run as start
from labkit.runs.handle import settle
from labkit.setup.machine import Machine

MIG = ("MIG-fa4e0000-5555-6666-7777-888888888880", "MIG-fa4e0000-5555-6666-7777-888888888881")


def test_one_gpu_has_one_rank(on_machine):
    on_machine("t4x1")
    assert settle("ddp", workload="mlp").nproc == 1
    with pytest.raises(SpecError, match="nproc"):
        settle("ddp", workload="mlp", nproc=2, device="cuda")
    check(warm_run("ddp", workload="mlp", **ASKED), STEPS)


def test_eight_gpus_have_eight_ranks(on_machine):
    on_machine("h100x8")
    run = check(warm_run("ddp", workload="mlp", **ASKED | {"precision": "bf16"}), STEPS)
    assert len(run.state.ranks) == 8
    assert {rank.device_name for rank in run.state.ranks.values()} == {"NVIDIA H100 80GB HBM3"}


def test_two_runs_have_a_gpu_each(on_machine, tmp_path):
    on_machine("t4x2")
    script = tmp_path / "train.py"
    script.write_text("import os, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\ntime.sleep(10)\n")
    runs = [start(script, nproc=1, device="cuda") for _ in range(2)]
    assert sorted(run.wait(120).logs(0) for run in runs) == ["0\n", "1\n"]


def test_a_mig_device_is_chosen_by_its_uuid(on_machine, monkeypatch):
    on_machine("mig")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG[1])
    (gpu,) = Machine.here().gpus
    assert gpu.uuid == MIG[1] and gpu.memory == 85520809984 // 7
    check(warm_run("single", workload="mlp", **ASKED), STEPS)


def test_without_nvml_there_are_cpu_ranks(on_machine):
    on_machine("no-nvml")
    assert Machine.here().gpus == () and settle("ddp", workload="mlp").device == "cpu"
    with pytest.raises(SpecError, match="--device cuda is not available"):
        settle("ddp", workload="mlp", device="cuda")


def test_an_old_driver_is_named(on_machine):
    on_machine("old-driver")
    words = "the driver of its GPUs supports only CUDA 12.2"
    assert settle("ddp", workload="mlp").device == "cpu"
    with pytest.raises(SpecError, match=words):
        settle("ddp", workload="mlp", device="cuda")
    assert words in Machine.here().unused_cuda  # which run, panel and doctor print


def test_a_gpu_without_kernels_is_named(on_machine):
    on_machine("p100x1")
    run = warm_run("single", workload="mlp", **ASKED | {"precision": "fp32"})
    assert run.state.status.state == "failed"
    assert any("no kernels for this GPU" in finding.title for finding in findings(run.state))
