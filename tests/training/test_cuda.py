"""Where there is a GPU: every strategy on CUDA with NCCL, alone in its world, against one process on the same
device."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import PATIENCE
from weaving import RECORDER, TORCHRUN, record, run_alone

from labkit.launch.warm import client
from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.runs.handle import run
from labkit.training.strategies import STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
ASKED = {
    "workload": "gpt",
    "nproc": 1,
    "batch_size": 8,
    "steps": 4,
    "samples": 64,
    "device": "cuda",
    "precision": "fp32",
}


def alone(name: str) -> Spec | None:
    """The strategy with one rank; None where it needs more."""
    options = {option.name: 1 for option in STRATEGIES[name].options if option.name == "tp_size"}
    try:
        return Spec(name, options=options, **ASKED)
    except SpecError:
        return None


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single" and alone(name)])
def test_losses_on_a_gpu_are_those_of_one_process(strategy, tmp_path):
    wanted = record(Spec("single", **ASKED), tmp_path / "single")[0]["losses"]
    assert record(alone(strategy), tmp_path / "run")[0]["losses"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_two_ranks_share_one_gpu_over_gloo(strategy, tmp_path):
    asked = ASKED | {"nproc": 2, "batch_size": 4}
    source = write_script(Spec(strategy, **asked))
    for old, new in (('"nccl", device_id=device', '"gloo"'), ('int(os.environ["LOCAL_RANK"])', "0")):
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    run_alone([*TORCHRUN, "--nproc-per-node=2", str(RECORDER), "train.py", "."], tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text())["losses"] for rank in range(2)]
    wanted = record(Spec("single", **ASKED), tmp_path / "single")[0]["losses"]
    assert [sum(losses) / 2 for losses in zip(*ranks)] == pytest.approx(wanted, rel=1e-4)


def test_a_warm_start_initialises_cuda_in_the_rank(warm_server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "ANSWER", PATIENCE)
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "1"
    )  # as the server has it; one rank on a GPU has no such variable of its own
    warm_server()
    path = tmp_path / "first.py"
    path.write_text(
        "import sys, torch\nassert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()\n"
        "assert 'torch.distributed.run' in sys.modules  # it was forked from torchrun's process\n"
        "torch.cuda.set_device(0)\nprint(torch.ones(1, device='cuda').item(), torch.cuda.is_initialized())\n"
    )
    handle = run(path, nproc=1, device="cuda").wait(240)
    assert handle.logs(0) == "1.0 True\n" and handle.state.status.start == "warm"
