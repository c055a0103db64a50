"""Tests of this folder run in the CUDA environment on the stand-in (`labkit test --cuda-stand-in`); elsewhere there
are none. The process of the tests is one on two T4s, and each test may move to another machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cuda_stand_in.machines import settings

collect_ignore_glob = [] if "CUDA_STAND_IN_GPU" in os.environ else ["test_*.py"]


@pytest.fixture
def on_machine(monkeypatch) -> Callable[..., None]:
    """Makes this process, and those that it starts, processes on another machine; of the stand-in's settings, those
    that are not given have their defaults."""
    folders = []

    def move(machine: str, **more: object) -> None:
        folders.append(Path(tempfile.mkdtemp(dir="/dev/shm", prefix="cuda-stand-in-")))
        for name in [name for name in os.environ if name.startswith("CUDA_STAND_IN_")]:
            monkeypatch.delenv(name)
        for name, value in settings(machine, folders[-1], **more).items():
            monkeypatch.setenv(name, value)

    yield move
    for folder in folders:
        shutil.rmtree(folder)
