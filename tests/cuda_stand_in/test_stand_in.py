"""The stand-in itself: torch.cuda, the profiler with CUDA activities, NVML, and NCCL between two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from weaving import TORCHRUN

SCRIPTS = Path(__file__).with_name("scripts")


def test_torch_sees_two_gpus_and_trains_on_one():
    seen = json.loads(subprocess.check_output([sys.executable, SCRIPTS / "one_gpu.py"], text=True))
    assert seen["devices"] == ["Tesla T4"] * 2 and seen["capability"] == [7, 5] and not seen["bf16"]
    assert seen["copied"] == [1.0, 2.0] and seen["filled"] == [3.0, 3.0]
    assert 0 < seen["allocated"] <= seen["peak"] <= seen["reserved"] < seen["used"]
    assert 0.1 < seen["milliseconds"] < 50  # twenty products of 20 µs
    assert seen["nvml"] == "Tesla T4" and seen["kernels"] > 10


def test_nccl_collectives_have_values(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=2", SCRIPTS / "collectives.py", tmp_path]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, seen in enumerate(ranks):
        assert seen["all_reduce"] == [3.0] * 4
        assert seen["all_gather"] == [0.0] * 4 + [1.0] * 4
        assert seen["reduce_scatter"] == [4.0 * rank, 4.0 * rank + 2.0]
        assert seen["broadcast"] == [1.0] * 2
        assert seen["all_to_all"] == [float(rank), 10.0 + rank]
        assert seen["received"] == [float(1 - rank)] * 3
        assert seen["objects"] == [{"rank": 0}, {"rank": 1}]
        assert {"nccl:all_reduce", "nccl:all_to_all", f"nccl:send {rank}->{1 - rank}"} <= set(seen["recorded"])
