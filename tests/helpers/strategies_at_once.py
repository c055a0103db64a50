"""Several strategies in one run of two ranks, because the ranks of a run take seconds to import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from labkit.plan.script import write_script
from labkit.record.ranks import RankState
from labkit.runs.handle import Run, settle

SMALL = {"workload": "mlp", "samples": 512, "batch_size": 32, "steps": 4, "device": "cpu", "nproc": 2}
_STRATEGIES = ("ddp", "fsdp2", "pp")
_SCRIPT = """
import os, runpy
for name in {names} if os.environ["LABKIT_ATTEMPT"] == "0" else ():
    runpy.run_path(f"{folder}/{{name}}.py", run_name="__main__")
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
"""


def script_of_all(folder: Path, then: str = "") -> Path:
    """A script that trains with one strategy after another, each with a store of its own, and does something then. A
    rank that starts again omits the strategies."""
    for name in _STRATEGIES:
        (folder / f"{name}.py").write_text(write_script(settle(name, **SMALL)))
    script = folder / "train.py"
    script.write_text(_SCRIPT.format(names=_STRATEGIES, folder=folder) + then)
    return script


def check_losses(ranks: Sequence[RankState], shared_run: Callable[..., Run]) -> None:
    """Both ranks have the losses of runs on one machine."""
    assert [len(rank.steps) for rank in ranks] == [4 * len(_STRATEGIES)] * 2
    for number, name in enumerate(_STRATEGIES):
        alone = shared_run(name, **SMALL).state
        for step in range(4):
            losses = [loss for rank in ranks if not math.isnan(loss := rank.steps.loss[4 * number + step])]
            assert sum(losses) / len(losses) == pytest.approx(alone.loss_at(step), rel=1e-5)
