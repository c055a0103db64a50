"""Real runs under torchrun: how they end, how they are stopped, and that no process remains."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from conftest import COLD_IS_SLOW, processes_of, wait_until
from jupyter_client.manager import start_new_kernel

from labkit.common.processes import of_folder
from labkit.launch import local
from labkit.launch.job import Job
from labkit.record.documents import plain
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run, run

LIMIT = 5.0  # seconds within which all processes of a stopped or abandoned run end

# It leaves a child of its own behind.
ENDS_WELL = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), "args", *sys.argv[1:])
print("threads", torch.get_num_threads(), "at", os.getcwd(), file=sys.stderr)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
time.sleep(1)
dist.destroy_process_group()
"""

CRASHES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("no such layer")
dist.barrier()
"""

DIES = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""

# Rank 0 waits in a collective that never comes; rank 1 will not hear, nor will its child, which has a session of its
# own.
HANGS = """
import os, signal, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print("hangs", flush=True)
    dist.barrier()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
print("hangs", flush=True)
time.sleep(100)
"""

WAITS = """
import time
print("waits", flush=True)
time.sleep(100)
"""

# Starts two runs, one of them detached; and two children that must not keep the first one's lifeline.
STARTER = """
import os, subprocess, sys, time
from labkit.runs.handle import run
runs = [run(sys.argv[1], nproc=1, device="cpu", detached=detached) for detached in (False, True)]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], close_fds=False)
fork = os.fork()
if fork == 0:
    time.sleep(100)
print(*(run.folder.path.name for run in runs), child.pid, fork, flush=True)
time.sleep(100)
"""


@pytest.fixture
def script(tmp_path, start):
    """Writes a script to a folder whose name contains spaces, and returns its path. Tests with it run warm and cold."""

    def write(text: str) -> Path:
        path = tmp_path / "my own scripts" / "train it.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def started(run: Run, word: str = "waits", times: int = 1) -> Run:
    """Waits until every rank has printed `word` that many times."""
    ranks = range(run.state.world_size)
    wait_until(lambda: run.state.over or all(run.logs(rank).count(word) >= times for rank in ranks))
    assert not run.state.over, run
    return run


def nothing_left(folder: RunFolder, seconds: float = LIMIT) -> None:
    wait_until(lambda: not of_folder(folder.path), seconds)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel has no groups of sessions")
def test_a_rank_with_a_niceness_lets_other_sessions_go_first(tmp_path, monkeypatch):
    """Linux shares the cores between sessions before it looks at processes: a rank has a session of its own."""
    monkeypatch.setenv("LABKIT_NICENESS", "5")
    script = tmp_path / "nice.py"
    script.write_text(
        "import os\nfor name in (os.nice(0), open('/proc/self/autogroup').read().split()[-1]): print(name)"
    )
    done = run(script, nproc=1, device="cpu", cold=True).wait(120)
    assert done.logs(0).split() == ["5", "5"]


# ---- runs that come to their own end


def test_a_run_ends_well(script, runs):
    path = script(ENDS_WELL)
    handle = run(path, nproc=2, device="cpu", args=("--name", "two words"))
    assert stat.S_IMODE(handle.folder.path.stat().st_mode) == 0o700
    listening = listened_to(handle)
    assert handle.wait(60).words == "finished", handle.folder.launcher_log.read_text()
    assert not processes_of(str(runs)), "wait returns when all processes of the run have ended"
    for rank in (0, 1):
        assert handle.logs(rank) == "sum 2.0 args --name two words\n"
        assert f"threads 1 at {Path.cwd()}" in handle.logs(rank, "stderr")
    assert (
        handle.folder.command.read_text() == f"torchrun --standalone --nproc-per-node=2 '{path}' --name 'two words'\n"
    )
    assert listening, "the ranks' store has to listen somewhere"
    assert {address for address in listening if not address.startswith("127.")} == set()

    summary = handle.folder.read_summary()
    assert plain(summary) == handle.summary()
    assert (summary.state, summary.failure, summary.world_size) == ("finished", None, 2)
    assert [rank.exit_code for rank in summary.ranks] == [0, 0]
    status = handle.folder.read_status()
    assert (status.exit_code, status.detached, sorted(status.ranks)) == (0, False, [0, 1])
    samples = [json.loads(line) for line in handle.folder.system.read_text().splitlines()]
    assert {"0", "1"} == {rank for sample in samples for rank in sample["ranks"]}
    assert all(sample["ranks"][rank]["rss"] > 1 << 20 for sample in samples for rank in sample["ranks"])
    assert handle.stop().words == "finished", "stop does nothing if the run is over"


def listened_to(handle: Run) -> set[str]:
    """Every address that a process of the run was found listening on."""
    found = set()
    while not handle.state.over:
        pids = {process.pid for process in processes_of(str(handle.folder.path))}
        found |= {
            c.laddr.ip for c in psutil.net_connections("inet") if c.pid in pids and c.status == psutil.CONN_LISTEN
        }
        time.sleep(0.05)
    return found


def test_the_rank_that_crashed_is_named(script):
    handle = run(script(CRASHES), nproc=2, device="cpu").wait(60)
    assert handle.words == "failed (rank 1: ValueError: no such layer)"
    failure = handle.folder.read_summary().failure
    assert (failure.rank, failure.type, failure.collateral) == (1, "ValueError", [0])
    assert 'raise ValueError("no such layer")' in failure.traceback and "no such layer" in handle.logs(1, "stderr")
    assert handle.state.exit_code(1) == 1


@COLD_IS_SLOW  # see test_the_rank_that_crashed_is_named
def test_a_rank_that_was_killed_is_the_first_failure(script):
    handle = run(script(DIES), nproc=2, device="cpu").wait(60)
    assert handle.words == "failed (rank 1: SIGKILL)"
    failure = handle.summary()["failure"]
    assert (failure["rank"], failure["exit_code"], failure["collateral"]) == (1, -9, [0])


# ---- runs that are ended


def test_stop_ends_what_hangs_and_what_will_not_hear(script):
    handle = run(script(HANGS), nproc=2, device="cpu")
    # Another run whose name only begins like this one's.
    bystander = subprocess.Popen(
        [sys.executable, "-c", WAITS], env=os.environ | {"LABKIT_RUN_DIR": f"{handle.folder.path}-2"}
    )
    try:
        started(handle, "hangs")
        wait_until(lambda: "deaf" in handle.logs(1))
        begun, states = time.monotonic(), []
        stops = [threading.Thread(target=lambda: states.append(Job.attach(handle.folder).stop())) for _ in range(2)]
        for thread in stops:
            thread.start()
        for thread in stops:
            thread.join()
        assert time.monotonic() - begun < LIMIT
        assert states == ["stopped", "stopped"]
        assert [process.pid for process in processes_of(str(handle.folder.path))] == [bystander.pid]
        assert bystander.poll() is None, "a process of another run must not be killed"
    finally:
        bystander.kill()
        bystander.wait()
    assert handle.words == handle.folder.read_summary().state == "stopped"


@pytest.fixture
def hears_interrupts():
    """A shell's background job ignores SIGINT from the start, and so would tests that run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@COLD_IS_SLOW  # see test_a_run_ends_with_its_starter_unless_detached
@pytest.mark.usefixtures("hears_interrupts")
def test_an_interrupt_of_the_wait_stops_the_run(script):
    handle = started(run(script(WAITS), nproc=1, device="cpu"))
    begun = time.monotonic()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert time.monotonic() - begun < LIMIT
    assert handle.words == "stopped"
    assert not processes_of(str(handle.folder.path))


def test_a_run_ends_with_its_starter_unless_detached(script, runs, tmp_path):
    (tmp_path / "starter.py").write_text(STARTER)
    environment = os.environ | {"PYTHONPATH": str(Path(local.__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "starter.py"), str(script(WAITS))]
    starter = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    pids = []
    try:
        bound, detached, *pids = starter.stdout.readline().split()
        bound, detached = started(Run.attach(bound)), started(Run.attach(detached))
        starter.kill()
        nothing_left(bound.folder)
        assert bound.words == "stopped"
        assert "the process that started it has ended" in bound.state.status.message
        assert detached.words in ("starting ranks", "training") and processes_of(str(detached.folder.path))
        begun = time.monotonic()
        assert detached.stop().words == "stopped"
        assert time.monotonic() - begun < LIMIT
    finally:
        starter.kill()
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        starter.communicate()


@pytest.mark.parametrize(
    ("how", "start"),
    [
        ("interrupted", "warm"),
        ("killed", "warm"),
        # see test_a_run_ends_with_its_starter_unless_detached
        pytest.param("interrupted", "cold", marks=pytest.mark.slow),
        pytest.param("killed", "cold", marks=pytest.mark.slow),
    ],
    indirect=["start"],
)
def test_a_run_ends_with_the_kernel_that_waits_for_it(how, script, runs):
    manager, client = start_new_kernel(env=os.environ | {"PYTHONPATH": str(Path(local.__file__).parents[2])})
    try:
        client.execute(f"from labkit import run; run({str(script(WAITS))!r}, nproc=1, device='cpu').wait()")
        folder = wait_until(lambda: next(iter(RunFolder.all(runs)), None), 120)
        handle = started(Run.attach(str(folder.path)))
        if how == "interrupted":
            manager.interrupt_kernel()
        else:
            os.kill(manager.provisioner.pid, signal.SIGKILL)
        nothing_left(folder)
        assert handle.wait(LIMIT).words == "stopped"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@COLD_IS_SLOW  # see test_nothing_outlives_kills_at_early_moments
def test_nothing_outlives_a_supervisor_that_is_killed(script):
    handle = started(run(script(HANGS), nproc=2, device="cpu"), "hangs")
    wait_until(lambda: "deaf" in handle.logs(1))
    psutil.Process(handle.state.status.supervisor.pid).kill()
    nothing_left(handle.folder)
    assert "its supervisor" in handle.wait(LIMIT).words
    assert handle.stop().summary()["state"] == "failed"
