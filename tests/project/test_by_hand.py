"""The scripts that `labkit bench` measures the written-out ones against: they are whole, and train."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import warm_run
from places import BY_HAND
from weaving import TORCHRUN, run_alone


def short(strategy: str, folder: Path) -> Path:
    """The script with two steps, in `folder`; it says how many there were."""
    source = (BY_HAND / f"{strategy}.py").read_text(encoding="utf-8").replace("STEPS = 40", "STEPS = 2")
    assert "labkit" not in source
    script = folder / "train.py"
    script.write_text(source + "\nprint(f'steps {step}\\n', end='')\n", encoding="utf-8")
    return script


def test_a_script_by_hand_trains_as_a_person_starts_it(tmp_path):
    assert run_alone([*TORCHRUN, "--nproc-per-node=2", short("ddp", tmp_path).name], tmp_path).count("steps 2") == 2


@pytest.mark.parametrize("strategy", ["fsdp2", "tp", "pp"])
def test_a_script_by_hand_trains(strategy, tmp_path):
    handle = warm_run(short(strategy, tmp_path), nproc=2, device="cpu", sample_every=0)
    assert handle.words == "finished", handle.logs(0, "stderr")
    assert [handle.logs(rank) for rank in (0, 1)] == ["steps 2\n"] * 2
