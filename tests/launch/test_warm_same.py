"""Warm starts: a script cannot tell the difference."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from conftest import PATIENCE, processes_of, wait_until
from places import SCRIPTS
from warm import how, started

from labkit.common.processes import is_supervisor, is_watchdog
from labkit.launch.warm import client, fork
from labkit.probe.torch_private import CALLER
from labkit.runs.handle import run

SEES = SCRIPTS / "sees.py"

OF_ONE_RUN = {
    "LABKIT_CLOCK",
    "LABKIT_COLD",
    "LABKIT_RUN_DIR",
    "LABKIT_TEMPORARY",
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
}


@pytest.fixture(scope="module")
def seen(warm_server, tmp_path_factory):
    """The environment that each of two ranks observes, by kind of start."""
    warm_server()
    before = client.ANSWER
    client.ANSWER = PATIENCE
    told = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.chdir(SEES.parent)
        for cold in (False, True):
            handle = run("sees.py", nproc=2, device="cpu", args=["one", "two words"], cold=cold).wait(240)
            assert handle.words == "finished", handle.logs(0, "stderr")
            start = handle.state.status.start
            told[start] = [json.loads(handle.logs(rank).splitlines()[-1]) for rank in (0, 1)]
            for one in told[start]:
                folder = str(handle.folder.path)
                one["same"] = json.loads(json.dumps(one["same"]).replace(folder, "RUN"))
                for name in OF_ONE_RUN:
                    one["same"]["environ"].pop(name, None)
    client.ANSWER = before
    assert told.keys() == {"warm", "cold"}
    return told


ASPECTS = (
    *(
        "environ",
        "argv",
        "path",
        "file",
        "cwd",
        "main",
        "flags",
        "orig_argv",
        "threads",
        "signals",
        "blocked",
        "descriptors",
    ),
    *(
        "streams",
        "session",
        "start methods",
        "children",
        "workers",
        "umask",
        "limits",
        "name",
        "tempdir",
        "logging",
        "hooks",
        "zone",
    ),
    "recursion",
)


@pytest.mark.parametrize("aspect", ASPECTS)
def test_a_script_sees_the_same(aspect, seen):
    for warm, cold in zip(seen["warm"], seen["cold"]):
        assert warm["same"][aspect] == cold["same"][aspect]


def test_every_aspect_is_compared(seen):
    assert set(ASPECTS) == seen["warm"][0]["same"].keys() == seen["cold"][0]["same"].keys()


def test_ranks_draw_different_random_numbers_and_keys(seen):
    chance = [value for one in seen["warm"] for value in (*one["own"]["chance"], one["own"]["key"])]
    assert len(set(chance)) == 8


def test_events_of_a_rendezvous_are_named_as_by_torch_without_a_look_at_every_source(tmp_path, server):
    """What the agent has replaced is seen in its ranks, which are forked from it."""
    path = tmp_path / "train.py"
    path.write_text(
        "from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchrun\n"
        "print(torchrun.get_method_name.__module__)\n"
    )
    assert started(path).logs(0).split() == [fork.__name__]

    def named(function):
        return function()

    def asks(function):
        return named(function)

    assert asks(fork.caller) == asks(CALLER.get()) == "asks"


@pytest.mark.parametrize(
    ("strategy", "workload"), [("fsdp2", "gpt"), pytest.param("ddp", "cnn", marks=pytest.mark.slow)]
)
def test_losses_are_bit_identical(strategy, workload, server):
    losses = []
    for cold in (False, True):
        handle = run(
            strategy,
            workload=workload,
            nproc=2,
            device="cpu",
            steps=4,
            batch_size=2,
            samples=64,
            cold=cold,
        )
        handle.wait(240)
        assert handle.words == "finished"
        assert how(handle)[0] == ("cold" if cold else "warm")
        losses.append([handle.state.ranks[rank].steps.loss[:].tolist() for rank in (0, 1)])
        assert len(losses[-1][0]) == 4
    assert losses[0] == losses[1]


def test_a_restarted_rank_is_forked_again(server, tmp_path):
    path = tmp_path / "fails_once.py"
    path.write_text(
        "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt',"
        " attempt)\nsys.exit(attempt == '0')\n"
    )
    handle = started(path, nproc=2, max_restarts=1)
    assert how(handle) == ("warm", "") and handle.state.status.restarts == 1
    assert [handle.logs(rank).splitlines()[-1] for rank in (0, 1)] == ["attempt 1"] * 2


def test_files_that_a_script_leaves_open_are_written_whole(server, tmp_path):
    """The script can use descriptor numbers that the launcher had used."""
    path = tmp_path / "leaves_open.py"
    path.write_text(
        "files = [open(f'{__file__}.{number}', 'w') for number in range(40)]\n"
        "for number, file in enumerate(files):\n    file.write(f'{number}\\n' * 10)\n"
    )
    started(path)
    assert [Path(f"{path}.{number}").read_text() for number in range(40)] == [
        f"{number}\n" * 10 for number in range(40)
    ]


def test_the_processes_of_a_run_have_its_tag_and_their_own_commands(server, tmp_path):
    path = tmp_path / "waits.py"
    path.write_text("import time\nprint('waits', flush=True)\ntime.sleep(100)\n")
    handle = run(path, nproc=2, device="cpu")
    wait_until(lambda: handle.state.over or all("waits" in handle.logs(rank) for rank in (0, 1)))
    assert how(handle) == ("warm", "")
    processes = processes_of(str(handle.folder.path))
    commands = [" ".join(process.cmdline()) for process in processes]
    assert len(processes) == 5
    assert [len(list(filter(matches, processes))) for matches in (is_supervisor, is_watchdog)] == [1, 1]
    assert sum(" -m torch.distributed.run " in command for command in commands) == 1
    assert sum(" -u -m labkit.probe " in command for command in commands) == 2
    assert psutil.Process(server["pid"]).cmdline()[1:] == ["-m", "labkit.launch.warm.server"]
    handle.stop()
    assert processes_of(str(handle.folder.path)) == []
