"""The start of a run: recorded events, the fold, and how it is displayed."""

from __future__ import annotations

import io

import pytest
from folded import apply
from places import RECORDED
from probed import PROBE, Told, launch
from rich.console import Console
from test_state import fold, spec, start, status, step

from labkit.frontends import terminal
from labkit.record.events import Startup, checked
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import (
    MILESTONES,
    RunState,
    is_starting,
    milestones,
    newest_milestone,
    start_in_words,
    start_table,
)

RECORDED = sorted(path for path in (RECORDED).iterdir() if path.is_dir())
ASKED = [spec(), status("starting", started=100.0, agent_began=100.25)]


def startup(rank: int, name: str, t: float) -> dict:
    return {"kind": "startup", "t": t, "rank": rank, "name": name}


# ---- the fold and the words


def test_each_rank_has_the_seconds_since_the_request_of_what_it_has_reached():
    state = fold(*ASKED, start(0, 103.0, began=101.5), startup(0, "group", 103.5), start(1, 103.25, began=101.5))
    assert milestones(state) == {
        0: {"agent": 0.25, "process": 1.5, "torch": 3.0, "group": 3.5},
        1: {"agent": 0.25, "process": 1.5, "torch": 3.25},
    }
    assert is_starting(state)
    assert newest_milestone(state) == "group"
    assert start_in_words(state) == "group formed on 1 of 2 ranks (3.5 s)"


def test_before_any_rank_is_there_the_agent_is():
    assert start_in_words(fold(*ASKED)) == "torchrun started (0.2 s)"
    assert not is_starting(fold(spec())), "nothing was asked for yet"


def test_a_start_is_over_when_every_rank_has_a_step():
    state = fold(*ASKED, start(0, 103.0), start(1, 103.0), step(0, 1, 104.0))
    assert is_starting(state)
    apply(state, step(1, 1, 104.5))
    assert not is_starting(state)
    assert start_in_words(state) == ""
    assert [reached["step"] for reached in milestones(state).values()] == [4.0, 4.5]


def test_only_the_first_event_of_an_attempt_counts_and_another_attempt_begins_anew():
    state = fold(*ASKED, start(0, 103.0), startup(0, "batch", 104.0), startup(0, "batch", 109.0), step(0, 1, 110.0))
    assert milestones(state)[0]["batch"] == 4.0
    apply(state, start(0, 120.0, attempt=1, began=118.0))
    assert milestones(state)[0] == {"agent": 0.25, "process": 18.0, "torch": 20.0}


def test_a_milestone_of_a_newer_version_passes():
    assert milestones(fold(*ASKED, start(0, 103.0), startup(0, "warm", 103.5)))[0] == {"agent": 0.25, "torch": 3.0}


def test_the_table_tells_what_is_still_to_come_from_what_never_came():
    events = [*ASKED, start(0, 103.0), startup(0, "data", 103.5)]
    head, rank_0, rank_1 = start_table(fold(*events))
    assert head == ("rank", *MILESTONES.values())
    assert rank_0 == ("0", "0.2 s", "–", "3.0 s", "–", "3.5 s", "…", "…")
    assert rank_1 == ("1", "0.2 s", "…", "…", "…", "…", "…", "…")
    head, rank_0, rank_1 = start_table(fold(*events, status("failed", started=100.0, agent_began=100.25)))
    assert head == ("rank", "torchrun started", "torch imported", "data ready", "first step")
    assert rank_0 == ("0", "0.2 s", "3.0 s", "3.5 s", "–")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_runs_of_a_version_that_recorded_no_start_up_still_open(path):
    follower = Follower(RunFolder(path))
    follower.poll()
    for reached in milestones(follower.state).values():
        assert set(reached) == {"torch", "step"}
        assert 0 < reached["torch"] < reached["step"]


def test_the_event_is_checked_when_it_is_read():
    event = checked(startup(0, "group", 1.0))
    assert isinstance(event, Startup) and (event.name, event.t) == ("group", 1.0)
    with pytest.raises(ValueError):
        checked(startup(0, "group", 1.0) | {"name": 3})


def test_the_terminal_says_how_far_the_ranks_are(tmp_path):
    state = fold(*ASKED, start(0, 103.0), startup(0, "group", 103.5))
    assert terminal.line(state).startswith("starting ranks · group formed on 1 of 2 ranks (3.5 s)")
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(terminal.view(state, RunFolder(tmp_path), height=30))
    told = console.export_text()
    assert "group formed" in told and "3.5 s" in told
    state = fold(*ASKED, start(0, 103.0), start(1, 103.0), step(0, 1, 104.0), step(1, 1, 104.0))
    console.print(terminal.view(state, RunFolder(tmp_path), height=30))
    assert "group formed" not in console.export_text()


# ---- the probe

SCRIPT = """
import inspect, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

assert list(inspect.signature(DataLoader.__init__).parameters)[:3] == ["self", "dataset", "batch_size"]
GROUP = {"init_method": "file://" + sys.argv[1], "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **GROUP)
dist.destroy_process_group()
dist.init_process_group("gloo", **GROUP | {"init_method": "file://" + sys.argv[1] + "2"})
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for (batch,) in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
dist.destroy_process_group()
"""
ALONE = """
import torch
model = torch.nn.Linear(2, 1)
model(torch.ones(4, 2)).sum().backward()
"""


def test_a_rank_writes_each_milestone_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = launch([*PROBE, script, tmp_path / "store"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = Told(tmp_path)
    assert [event["name"] for event in told.of("startup")] == ["group", "data", "batch"]
    assert told.of("probe_error") == []
    times = [
        told.of("start")[0]["began"],
        *(event["t"] for event in told.events if event["kind"] in ("start", "startup", "step")),
    ]
    assert times == sorted(times), "the process began first, and the first step came last"


def test_a_script_without_a_group_or_a_loader_leaves_them_out(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    ran = launch([*PROBE, script], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [event["name"] for event in Told(tmp_path).of("startup")] == ["batch"]


def test_a_device_mesh_forms_the_group_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from torch.distributed import init_device_mesh\ninit_device_mesh('cpu', (1,))\n")
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "LABKIT_LOOPBACK": "1",
    }
    ran = launch([*PROBE, script], tmp_path, **alone)
    assert ran.returncode == 0, ran.stderr
    assert [event["name"] for event in Told(tmp_path).of("startup")] == ["group"]


def test_a_fold_without_a_status_has_no_start():
    assert milestones(RunState()) == {0: {}}
    assert start_in_words(RunState()) == ""
