"""The run folder, and what is read from it without processes: plan, status, torchrun's report."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import wait_until
from machines import LAPTOP

from labkit.common.processes import identity, is_same, living
from labkit.common.text import last_line
from labkit.launch import local, watch
from labkit.plan.spec import Spec
from labkit.record.documents import Status, Unreadable
from labkit.record.folder import RunFolder, runs_root
from labkit.record.follow import Follower, current_status, supervisor_of
from labkit.record.writer import Writer
from labkit.setup.machine import Machine


@pytest.fixture
def folder():
    made = RunFolder.create("ddp-x2")
    RunFolder.write_json(made.spec, Spec("ddp", nproc=2, device="cpu").to_json())
    return made


# ---- names and paths


def test_a_run_folder_is_its_users_own(folder, runs):
    assert folder.path.parent == runs == runs_root()
    for path in (folder.path, folder.events, folder.logs):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.spec.stat().st_mode) == 0o600


def test_runs_of_one_second_get_folders_of_their_own():
    names = {RunFolder.create("my script!-x2").name for _ in range(3)}
    assert len(names) == 3
    assert all("my-script--x2" in name and "/" not in name for name in names)


def test_find_by_name_end_path_and_last(folder):
    other = RunFolder.create("single-x1")
    RunFolder.write_json(other.spec, {})
    RunFolder.create("without-spec-x1")
    assert [run.name for run in RunFolder.all()] == sorted([folder.name, other.name])
    for word in (folder.name, "ddp-x2", str(folder.path)):
        assert RunFolder.find(word).path == folder.path
    assert RunFolder.find("last").name == max(folder.name, other.name)
    with pytest.raises(LookupError, match="there is no run 'fsdp'"):
        RunFolder.find("fsdp")
    with pytest.raises(LookupError, match="is ambiguous"):
        RunFolder.find(folder.name[:4])


def test_writing_replaces_whole_files_and_half_a_file_is_unreadable(folder):
    RunFolder.write_json(folder.status, {"state": "running"})
    RunFolder.write_json(folder.status, {"state": "finished"})
    assert folder.read_status() == Status("finished")
    with pytest.raises(TypeError):
        RunFolder.write_json(folder.status, {"state": object()})
    assert folder.read_status() == Status("finished")
    folder.status.write_text('{"state": "fin')
    with pytest.raises(Unreadable, match=r"status\.json is not JSON"):
        folder.read_status()
    assert sorted(path.name for path in folder.path.iterdir()) == ["events", "logs", "spec.json", "status.json"]


def test_logs_are_found_by_rank_and_newest_attempt(folder):
    assert folder.log_of(0) is None
    for attempt, rank in ((0, 0), (0, 1), (1, 0), (0, 10)):
        place = folder.logs / "none_abc" / f"attempt_{attempt}" / str(rank)
        place.mkdir(parents=True)
        (place / "stdout.log").touch()
    assert list(folder.log_files()) == [(0, 0), (0, 1), (0, 10), (1, 0)]
    assert folder.log_of(0).parent.parent.name == "attempt_1"
    assert folder.log_of(1, "stderr") is None


# ---- the plan


def test_the_plan_keeps_to_loopback_and_names_everything(folder, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = local.plan(Spec("ddp", nproc=2, device="cpu"), folder)
    argv = plan.argv
    assert "--standalone" not in argv
    assert f"--rdzv-endpoint={folder.rendezvous}" in argv
    assert argv[-3:] == ["-m", "labkit.probe", str(folder.script)]
    assert plan.cwd == str(Path.cwd())
    assert plan.env["LABKIT_RUN_DIR"] == str(folder.path)
    assert (
        plan.env["GLOO_SOCKET_IFNAME"]
        == plan.env["NCCL_SOCKET_IFNAME"]
        == ("lo0" if sys.platform == "darwin" else "lo")
    )
    assert (plan.env["CUDA_VISIBLE_DEVICES"], plan.env["OMP_NUM_THREADS"]) == ("", "1")


def test_the_plan_keeps_what_the_user_set(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTHONPATH", "/of/my/own")
    spec = Spec("ddp", nproc=2, device="cpu")
    env = local.plan(spec, folder).env
    assert "OMP_NUM_THREADS" not in env
    assert env.get("PYTHONPATH", "/of/my/own").endswith("/of/my/own")
    assert "CUDA_VISIBLE_DEVICES" not in local.plan(replace(spec, device="cuda"), folder).env


@pytest.mark.parametrize(("ranks", "niceness"), [(2, None), (3, "2"), (4, "3"), (8, "6")])
def test_cpu_ranks_below_a_page_take_one_share_of_each_core(ranks, niceness, folder, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: LAPTOP)
    spec = Spec("ddp", nproc=ranks, device="cpu")
    assert local.plan(spec, folder, below_page=True).env.get("LABKIT_NICENESS") == niceness
    assert "LABKIT_NICENESS" not in local.plan(spec, folder).env
    assert "LABKIT_NICENESS" not in local.plan(replace(spec, device="cuda"), folder, below_page=True).env


@pytest.mark.parametrize(("what", "threads"), [({"strategy": "single"}, "1"), ({"script": "mine.py"}, None)])
def test_one_gpu_has_one_thread_like_several_unless_the_script_is_ones_own(what, threads, folder, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert local.plan(Spec(**what, nproc=1, device="cuda"), folder).env.get("OMP_NUM_THREADS") == threads


def test_the_plan_of_a_script_of_ones_own(folder):
    plan = local.plan(Spec(script="of mine.py", args=("--lr", "0.1", "a b"), nproc=2, device="cpu"), folder)
    assert plan.argv[-6:] == [
        "-m",
        "labkit.probe",
        "of mine.py",
        "--lr",
        "0.1",
        "a b",
    ]  # argv as under bare torchrun
    assert plan.cwd == str(Path.cwd()), "where that name is looked up"


# ---- the status


def _supervisor(folder, command="input()"):
    """A process that looks like the supervisor of the run in `folder`."""
    argv = [sys.executable, "-c", command, "labkit.launch.supervisor"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, env=os.environ | {"LABKIT_RUN_DIR": str(folder.path)})
    wait_until(lambda: "LABKIT_RUN_DIR" in psutil.Process(process.pid).environ())
    return process


def _status(folder, process, **changes):
    supervisor = identity(process.pid) | {"host": socket.gethostname()}
    RunFolder.write_json(folder.status, {"state": "running", "supervisor": supervisor} | changes)


def test_a_run_whose_supervisor_is_gone_has_failed(folder):
    process = _supervisor(folder)
    _status(folder, process)
    follower = Follower(folder)
    follower.poll()
    assert follower.state.status.state == "running"
    process.kill()
    process.wait()
    assert current_status(folder).state == "failed"
    assert follower.poll()
    assert "its supervisor" in follower.state.words and str(process.pid) in follower.state.words
    assert not follower.poll()


def test_a_zombie_a_stranger_and_another_host_are_told_apart(folder):
    process = subprocess.Popen([sys.executable, "-c", ""])
    who = identity(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert living(who["pid"]) is None, "a process that is only waiting to be reaped is not living"
    process.wait()
    mine = psutil.Process()
    assert is_same(mine, **identity()) and not is_same(mine, mine.pid, mine.create_time() - 60)
    _status(folder, mine, supervisor=identity() | {"host": "elsewhere"})
    assert current_status(folder).state == "running"
    _status(folder, mine, supervisor=identity() | {"host": socket.gethostname(), "create_time": 0.0})
    assert current_status(folder).state == "failed"


def test_another_runs_supervisor_is_not_this_ones(folder):
    other = RunFolder.create("other-x2")
    process = _supervisor(other)
    try:
        _status(folder, process)
        assert supervisor_of(folder, folder.read_status()) is None
        link = folder.path.parent / "link"
        link.symlink_to(other.path)
        assert supervisor_of(RunFolder(link), folder.read_status()).pid == process.pid
    finally:
        process.kill()
        process.communicate()


def test_the_follower_reads_on_where_it_stopped(folder):
    follower = Follower(folder)
    writer = Writer(folder.events_of(0), 0)
    writer.write("start", pid=1, attempt=0)
    assert follower.poll()
    assert follower.state.spec.strategy == "ddp"
    for step in (1, 2):
        writer.write("step", step=step, loss=0.5, samples=8, seconds={"step": 0.1}, memory={})
    writer.close()
    with open(folder.events_of(0), "a") as file:
        file.write('not json\n{"half')
    assert follower.poll()
    assert (len(follower.state.ranks[0].steps), follower.state.broken) == (2, 1)
    assert not follower.poll()


# ---- torchrun's report

REPORT = """E1120 some other line failed (exitcode: 1) local_rank: 0 (pid: 6914) of binary: python
============================================================
labkit.probe FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_23:27:16
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6913)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 6913
[2]:
  time      : 2026-11-20_23:27:16
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 6915)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_23:27:15
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 6914)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 6914
"""


def test_the_report_of_failed_ranks(folder):
    folder.launcher_log.write_text(REPORT)
    place = folder.logs / "none_abc" / "attempt_0" / "2"
    place.mkdir(parents=True)
    (place / "stderr.log").write_text("Traceback\nModuleNotFoundError: No module named 'lightning'\n\n")
    found = watch.failures(folder)
    assert {rank: (failure.exit_code, failure.signal) for rank, failure in found.items()} == {
        0: (-15, "SIGTERM"),
        1: (-9, "SIGKILL"),
        2: (1, None),
    }
    assert found[1].pid == 6914 and found[1].t == found[0].t - 1
    assert found[2].message == "ModuleNotFoundError: No module named 'lightning'"


def test_a_log_without_a_report(folder):
    assert watch.failures(folder) == {}
    folder.launcher_log.write_bytes(b"\xff\xfe torchrun: error: no such rank : 3\n\n")
    assert watch.failures(folder) == {}
    assert last_line(folder.end_of(folder.launcher_log)).endswith("no such rank : 3")
