"""A new strategy is one module and one row of the table: everything else takes what it needs from the row."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import labkit

MODULE = '''"""Local SGD: every rank trains its own replica; the parameters are averaged every SYNC_EVERY steps."""

from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from labkit.training.strategies.base import LEARNING_RATE

SYNC_EVERY = 4  # steps between two averages of the parameters


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; after every SYNC_EVERY steps, the parameters become the mean over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps = count(1)

    def average(*_) -> None:
        if next(steps) % SYNC_EVERY == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()

    optimizer.register_step_post_hook(average)
    return optimizer
'''
ROW = """
        Strategy(
            name="toy",
            title="Local SGD",
            splits="The batch: every rank holds the whole model and trains on its own samples.",
            sends="Parameters: an all-reduce every few steps.",
            states="whole",
            data_ranks=lambda spec: spec.nproc,
            differs=lambda spec: "the replicas differ between two averages of their parameters",
            options=(Option("sync_every", 4, "steps between two averages of the parameters", minimum=1, maximum=1000),),
            lacks=dict.fromkeys(("save_every", "resume"), "a checkpoint holds one replica; use ddp"),
        ),
"""
USES = """
import json, sys
from labkit import Spec, run, write_script
from labkit.analysis.theory.formulas import states, theory
from labkit.frontends.panel.lab import Choices
from labkit.frontends.panel.predict import plan_html
from labkit.setup.machine import Machine
machine = Machine(gpus=(), cores=4, memory=2**34)
choices = Choices(machine, {"strategy": "toy", "nproc": 2, "workload": "mlp"}, lambda: None)
spec = choices.spec()
print(json.dumps({
    "titles": [title for title, _ in choices.strategy.options],
    "explanation": choices.explanation.value,
    "options": list(spec.options),
    "script": "SYNC_EVERY = 4" in write_script(spec),
    "traffic": theory(spec),
    "states": len(states(spec)),
    "plan": plan_html(spec),
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the package with one more module and one more row."""
    folder, package = tmp_path_factory.mktemp("clone"), Path(labkit.__file__).parent
    shutil.copytree(package, folder / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package.parent / "pyproject.toml", folder)
    strategies = folder / "labkit" / "training" / "strategies"
    (strategies / "toy.py").write_text(MODULE, encoding="utf-8")
    table = strategies / "__init__.py"
    text, last = table.read_text(encoding="utf-8"), "\n    )\n}\n"
    assert text.count(last) == 1
    table.write_text(text.replace(last, ROW + last[1:]), encoding="utf-8")
    return folder


def output(copy: Path, *argv: str) -> str:
    environment = os.environ | {"LABKIT_RUNS": str(copy / "runs"), "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, *argv], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_front_ends_and_the_formulas_take_it_from_its_row(copy):
    found = json.loads(output(copy, "-c", USES))
    assert "Local SGD" in found["titles"] and "an all-reduce every few steps" in found["explanation"]
    assert "sync_every" in found["options"] and found["script"]
    assert found["traffic"] is None and found["states"] == 2
    assert "there is no formula for Local SGD" in found["plan"]
    assert "toy" in output(copy, "-m", "labkit", "run", "--help")


def test_it_trains_and_has_a_summary(copy):
    asked = ("toy", "--nproc", "2", "--device", "cpu", "--workload", "mlp", "--samples", "1024", "--steps", "10")
    summary = json.loads(output(copy, "-m", "labkit", "run", *asked, "--json", "--cold"))
    assert (summary["strategy"], summary["state"], summary["world_size"]) == ("toy", "finished", 2)
    shown = json.loads(output(copy, "-m", "labkit", "show", "--json"))
    assert shown["strategy"] == "toy"
