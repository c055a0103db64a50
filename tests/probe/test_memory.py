"""The curve of a step's memory on CPU ranks against what Python and the C library know of it, to 2 %."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from conftest import warm_run
from places import SCRIPTS

from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.setup.machine import Machine

PEAKS = SCRIPTS / "peaks.py"
WITHIN = 0.02


def peaks(strategy: str, folder: Path) -> list[dict[str, int]]:
    """What scripts/peaks.py measured in a new run, in bytes, by rank."""
    spec = Spec(strategy, workload="gpt", nproc=2, batch_size=16, steps=3, samples=96, device="cpu").on(Machine.here())
    (folder / "train.py").write_text(write_script(spec), encoding="utf-8")
    handle = warm_run(PEAKS, nproc=2, device="cpu", args=[str(folder / "train.py"), str(folder)], sample_every=0)
    assert handle.words == "finished", handle.logs(0, "stderr")
    return [json.loads((folder / f"peak{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallinfo2 is glibc's")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "fsdp2", "tp"])
def test_the_curve_is_right_to_two_percent(strategy, tmp_path):
    for rank in peaks(strategy, tmp_path):
        assert rank["curve_begins"] == pytest.approx(rank["walked"] + rank["buckets"], rel=WITHIN)
        assert rank["curve_grown"] == pytest.approx(rank["grown"], abs=WITHIN * rank["peak"])
        assert rank["peak"] >= rank["curve_begins"] + rank["curve_grown"]
