"""What the probe adds to the steps of a script on a GPU: no wait for the device, and no event that is never returned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import warm_run

SCRIPT = Path(__file__).parent / "scripts" / "counting.py"
WAITS, QUERIES, CREATED, DESTROYED, ASKED = slice(0, 3), 3, 4, 5, 6
FIRST = 10  # steps after which nothing is new to the probe


def counted(output: str) -> list[list[int]]:
    """The counts of each step, from those since the start."""
    (line,) = (line for line in output.splitlines() if line.startswith("counted "))
    totals = json.loads(line.removeprefix("counted "))
    return [[now - before for before, now in zip(*pair)] for pair in zip(totals, totals[1:])]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The counts of the script without the probe."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    return counted(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


@pytest.fixture(scope="module")
def observed(warm_server, tmp_path_factory) -> list[list[int]]:
    """The counts under the probe; no step but an early one is profiled."""
    run = warm_run(SCRIPT, tmp_path_factory.mktemp("runs"), nproc=2, device="cuda", sample_every=0)
    assert run.state.status["state"] == "finished" and not run.state.unwatched
    return counted(run.logs(0))


def test_no_step_waits_for_the_device(alone, observed):
    assert not any(sum(step[WAITS]) for step in alone[FIRST:])
    assert not any(sum(step[WAITS]) for step in observed[FIRST:])


def test_memory_is_not_queried_from_the_driver(observed):
    assert not any(step[QUERIES] for step in observed[FIRST:])
    assert max(step[ASKED] for step in observed[FIRST:]) <= 1


def test_events_are_returned(observed):
    """Of 40 steps as many events are destroyed as created, or they are used again."""
    kept = [step[CREATED] - step[DESTROYED] for step in observed[FIRST:]]
    assert abs(sum(kept)) <= 20
