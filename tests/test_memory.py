"""The curve of a step's memory on CPU ranks against what Python and the C library know of it, to 2 %."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest
from weaving import TORCHRUN

from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.setup.machine import Machine

ROOT = Path(__file__).parent.parent
PEAKS = Path(__file__).parent / "scripts" / "peaks.py"
WITHIN = 0.02


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallinfo2 is glibc's")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "fsdp2", "tp"])
def test_the_curve_is_right_to_two_percent(strategy, tmp_path):
    spec = Spec(strategy, workload="gpt", nproc=2, batch_size=16, steps=4, samples=256, device="cpu").on(Machine.here())
    (tmp_path / "train.py").write_text(write_script(spec), encoding="utf-8")
    place = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    argv = [*TORCHRUN, "--nproc-per-node=2", str(PEAKS), "train.py", "."]
    done = subprocess.run(argv, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=240)
    for rank in (0, 1):
        path = tmp_path / f"peak{rank}.json"
        assert path.is_file(), done.stderr[-2000:]
        told = json.loads(path.read_text())
        assert told["curve_begins"] == pytest.approx(told["walked"] + told["buckets"], rel=WITHIN)
        assert abs(told["curve_grown"] - told["grown"]) < WITHIN * told["peak"]
        assert told["peak"] >= told["curve_begins"] + told["curve_grown"]
