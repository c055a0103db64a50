"""What the probe adds to the steps of a script on a GPU: no wait for the device but around profiled steps, and no event
that is kept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import warm_run
from weaving import TORCHRUN

from labkit.record.events import Input

SCRIPT = Path(__file__).parent / "scripts" / "counting.py"
WAITS, QUERIES, CREATED, DESTROYED, ASKED = slice(0, 3), 3, 4, 5, 6
FIRST = 15  # steps after which nothing is new to the probe
EVERY = 10
WAITS_OF_A_PROFILE = {EVERY - 1: 1, 0: 2}  # one before the step that is profiled; the probe's and torch's after it

# A graph is being captured in the second and third step: nothing may be asked of the device then.
CAPTURING = """
import torch
step = 0
torch.cuda.is_current_stream_capturing = lambda: step in (1, 2)
model = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    model(torch.full((2, 4), float(step), device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def counted(output: str) -> list[list[int]]:
    """The counts of each step after the first ones."""
    (line,) = (line for line in output.splitlines() if line.startswith("counted "))
    return json.loads(line.removeprefix("counted "))[FIRST:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[list[int]]:
    """The counts of the script without the probe."""
    command, folder = [*TORCHRUN, "--nproc-per-node=2", str(SCRIPT)], tmp_path_factory.mktemp("alone")
    return counted(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=folder).stdout)


@pytest.fixture(scope="module")
def observed(warm_server, tmp_path_factory) -> list[list[int]]:
    """The counts under the probe, which profiles every tenth step."""
    run = warm_run(SCRIPT, tmp_path_factory.mktemp("runs"), nproc=2, device="cuda", sample_every=EVERY)
    assert run.state.status.state == "finished" and not run.state.unwatched
    return counted(run.logs(0))


def test_only_profiled_steps_wait_for_the_device(alone, observed):
    assert not any(sum(step[WAITS]) for step in alone)
    for number, step in enumerate(observed, FIRST + 1):
        assert sum(step[WAITS]) <= WAITS_OF_A_PROFILE.get(number % EVERY, 0), number


def test_memory_is_not_queried_from_the_driver(observed):
    assert not any(step[QUERIES] for step in observed)
    assert max(step[ASKED] for step in observed) <= 1


def test_events_are_used_again(observed):
    kept = sum(step[CREATED] - step[DESTROYED] for step in observed)
    assert kept < len(observed) / 2  # a mark of each phase would be several per step


def test_inputs_are_read_after_a_graph_was_captured(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CAPTURING)
    state = warm_run(script, nproc=2, device="cuda").state
    assert state.status.state == "finished" and not state.unwatched
    digests = [seen.digest for seen in state.ranks[0].saw if isinstance(seen, Input)]
    assert len(digests) == 3 and all(digests)
