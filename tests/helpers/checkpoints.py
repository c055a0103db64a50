"""Checkpoints written without a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from generated import ONLY

from labkit import SpecError
from labkit.plan import checkpoints
from labkit.plan.spec import Spec
from labkit.runs.handle import settle
from labkit.training.strategies import STRATEGIES


def spec(strategy: str, workload: str | None = None, **more) -> Spec:
    workload = workload or ONLY.get(strategy, "mlp")
    ranks = STRATEGIES[strategy].default_nproc or 2
    return Spec(strategy, workload, **{"nproc": min(ranks, 4), "device": "cpu", "steps": 100, "samples": 1280} | more)


def written(by: Spec, folder: Path, step: int = 30) -> Path:
    """A checkpoint as the script of a Spec writes it, with text instead of weights."""
    path = folder / f"step{step:08}"
    path.mkdir(parents=True)
    for name in ("state.pt", "more.pt"):
        (path / name).write_text(name)
    own = {"step": step, "world_size": by.processes}
    return described(path, **checkpoints.identity(by), **own)


def described(path: Path, **manifest) -> Path:
    """Writes the manifest of a checkpoint, with the current checksums of its files."""
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": sums}))
    return path


def refused(strategy: str, resume: object, **more) -> str:
    with pytest.raises(SpecError) as error:
        settle(spec(strategy, resume=str(resume), **more))
    assert error.value.field == "resume"
    assert "\n" not in str(error.value)
    return str(error.value)


def model_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
