"""The lock of C++ extensions that are compiled at first use, and runs that were killed meanwhile."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.launch.extensions import abandoned_lock
from labkit.launch.job import Job, LaunchError
from labkit.plan.spec import Spec
from labkit.training.strategies import STRATEGIES

# torch's own lock, without importing torch
BATON = Path(importlib.util.find_spec("torch").origin).parent / "utils" / "file_baton.py"
COMPILES = f"import runpy, sys; print(runpy.run_path({str(BATON)!r})['FileBaton'](sys.argv[1]).try_acquire()); input()"


@pytest.mark.parametrize("chosen", [False, True])
def test_a_lock_that_a_killed_run_left_is_named_before_the_start(tmp_path, monkeypatch, runs, chosen):
    """The compiling process holds the lock open; when it is killed, the file stays, and DeepSpeed waits forever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    lock = tmp_path / "torch_extensions" / "py311_cpu" / "an adam" / "lock"
    if chosen:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    lock.parent.mkdir(parents=True)
    assert abandoned_lock() == ""
    command = [sys.executable, "-c", COMPILES, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert abandoned_lock() == "", "another run compiles, and this one waits for it"
        other.kill()
    with pytest.raises(LaunchError, match="was left by a run that was killed while it compiled") as refused:
        Job.start(Spec(strategy="deepspeed", nproc=2, device="cpu"))
    assert str(refused.value).startswith(f"{lock} ") and str(refused.value).endswith(f": rm '{lock}'")
    assert not runs.exists(), "nothing was created"
    lock.unlink()
    assert abandoned_lock() == ""


def test_strategies_that_compile_are_those_of_packages_that_do():
    assert [name for name, row in STRATEGIES.items() if row.needs.compiles] == ["deepspeed"]
