"""The curve of a step's memory on CPU ranks against what Python and the C library know of it, to 2 %."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from conftest import warm_run

from labkit.machine import Machine
from labkit.script import write_script
from labkit.spec import Spec

PEAKS = Path(__file__).parent / "scripts" / "peaks.py"
WITHIN = 0.02


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallinfo2 is glibc's")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "fsdp2", "tp"])
def test_the_curve_is_right_to_two_percent(strategy, tmp_path):
    spec = Spec(strategy, workload="gpt", nproc=2, batch_size=16, steps=3, samples=96, device="cpu").on(Machine.here())
    (tmp_path / "train.py").write_text(write_script(spec), encoding="utf-8")
    handle = warm_run(PEAKS, nproc=2, device="cpu", args=[str(tmp_path / "train.py"), str(tmp_path)], sample_every=0)
    assert handle.words == "finished", handle.logs(0, "stderr")
    for rank in (0, 1):
        told = json.loads((tmp_path / f"peak{rank}.json").read_text())
        assert told["curve_begins"] == pytest.approx(told["walked"] + told["buckets"], rel=WITHIN)
        assert abs(told["curve_grown"] - told["grown"]) < WITHIN * told["peak"]
        assert told["peak"] >= told["curve_begins"] + told["curve_grown"]
