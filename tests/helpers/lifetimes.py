"""Runs whose processes are killed, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from conftest import wait_until
from places import ROOT

from labkit.cli.commands import act
from labkit.cli.parser import parse
from labkit.common.processes import TAG, here, identity
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promises that are used here are Linux's")

WAITS = """
import time
print("waits", flush=True)
time.sleep(100)
"""


def python(code: str, *arguments: str, **changes: str) -> subprocess.Popen:
    """Starts a process of another program with these changes to its environment."""
    environment = (
        {name: value for name, value in os.environ.items() if name != TAG} | {"PYTHONPATH": str(ROOT)} | changes
    )
    command = [sys.executable, "-c", f"print(flush=True)\n{code}", *arguments]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


@contextmanager
def bystanders():
    """Starts processes that wait, and kills them after the test."""
    started = []

    def start(code: str = "input()", *arguments: str, **changes: str) -> subprocess.Popen:
        started.append(python(code, *arguments, **changes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def started(handle: Run, word: str = "waits") -> Run:
    wait_until(lambda: handle.state.over or all(word in handle.logs(rank) for rank in range(handle.state.world_size)))
    assert not handle.state.over, handle
    return handle


def command(*words: str) -> int:
    return act(parse(words))


def supervisor_in(folder: RunFolder, **changes: object) -> None:
    """Writes a status that names a supervisor."""
    RunFolder.write_json(
        folder.status, {"state": "running", "started": time.time(), "supervisor": identity() | here() | changes}
    )
