"""What every test shares: run folders of its own, a way to wait, and the proof that nothing is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import pytest


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Run folders go to this test's own place; at its end no process of any of them may be left."""
    root = tmp_path / "runs"
    monkeypatch.setenv("LABKIT_RUNS", str(root))
    yield root
    left = processes_of(str(root))
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"


def processes_of(tag: str) -> list[psutil.Process]:
    """The processes whose environment names a run folder under `tag`, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            folder = process.environ().get("LABKIT_RUN_DIR", "")
        except psutil.Error:
            continue
        if folder.startswith(tag) and process.pid != os.getpid():
            found.append(process)
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> object:
    """Polls `condition` until it is true, and gives back what it gave; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {condition}")
