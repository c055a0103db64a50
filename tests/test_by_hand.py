"""The scripts that `labkit bench` measures the written-out ones against: they are whole, and train."""

from __future__ import annotations

from pathlib import Path

import pytest
from weaving import TORCHRUN, run_alone

import labkit

BY_HAND = Path(labkit.__file__).parent / "benchmarks" / "by_hand"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", "pp"])
def test_a_script_by_hand_trains(strategy, tmp_path):
    source = (BY_HAND / f"{strategy}.py").read_text(encoding="utf-8").replace("STEPS = 40", "STEPS = 2")
    (tmp_path / "train.py").write_text(source + "\nprint(f'steps {step}\\n', end='')\n", encoding="utf-8")
    assert run_alone([*TORCHRUN, "--nproc-per-node=2", "train.py"], tmp_path).count("steps 2") == 2
