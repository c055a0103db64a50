"""The watchdog: what is left of a run whose supervisor is killed, alone or together with its starter or its agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import COLD_IS_SLOW, processes_of, wait_until
from lifetimes import LINUX, ROOT

from labkit.common.files import NotOurs, create, runtime_folder
from labkit.common.processes import TAG, members, of_folder, tagged, watchdog_tag
from labkit.launch import watchdog
from labkit.launch.job import Job
from labkit.launch.warm import client
from labkit.record.folder import RunFolder
from labkit.record.follow import current_status

# Instead of torchrun: a process with a socket of multiprocessing, and a child that ends with none of the others, has a
# segment of shared memory and is in the middle of sending it.
AGENT = """
import os, pathlib, subprocess, sys
from multiprocessing.connection import Listener
from labkit.probe.__main__ import use_temporary_folder

use_temporary_folder(os.environ["LABKIT_TEMPORARY"])
socket = Listener(family="AF_UNIX")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
pathlib.Path(f"/dev/shm/torch_{child.pid}_1_1").touch()
pathlib.Path(os.environ["LABKIT_RUN_DIR"], "ready").write_text(f"{child.pid} {socket.address}")
sys.stdin.read()
"""
STARTER = """
import json, os, sys, time
from msgspec import structs
from labkit.launch import job, local
from labkit.launch.job import Job
from labkit.launch.warm import client
from labkit.runs.handle import settle

script, agent, detached, stdin = json.loads(sys.argv[1])
client.ANSWER = 60.0
def plan(spec, folder):
    return structs.replace(local.plan(spec, folder), argv=[sys.executable, "-c", agent])
if not agent:  # a supervisor that never gets to its first status
    import subprocess
    def launch(folder, plan, asked, files, start):
        command = [sys.executable, "-c", "input()", "labkit.launch.supervisor"]
        return subprocess.Popen(command, stdin=0, pass_fds=files[2:3], env=os.environ | plan.env)
    job._launch = launch
Job.start(settle(script, nproc=1, device="cpu"), detached=detached, stdin=0, planned=plan)
time.sleep(100)
"""


class Begun:
    """A run that was started in another process, and what there is of it outside of its folder."""

    def __init__(self, runs: Path, starter: subprocess.Popen):
        self.runs, self.starter = runs, starter
        self.folder = wait_until(lambda: next(iter(RunFolder.all(runs)), None))

    def ready(self) -> Begun:
        """Returns when the run has everything that it could leave."""
        ready = self.folder.path / "ready"
        wait_until(lambda: ready.exists() and ready.read_text() and current_status(self.folder).supervisor)
        child, self.socket = ready.read_text().split()
        self.child, self.segment = int(child), Path(f"/dev/shm/torch_{child}_1_1")
        assert self.left() == [True, True, True]
        return self

    def left(self) -> list[bool]:
        temporary = Path(self.socket).parent
        assert temporary.parent == runtime_folder()
        return [bool(processes_of(str(self.runs))), temporary.exists(), self.segment.exists()]

    def kill(self, who: str) -> None:
        if who == "starter":
            self.starter.kill()
        else:
            os.kill(getattr(self.folder.read_status(), who).pid, signal.SIGKILL)

    def watchdog(self) -> psutil.Process:
        (found,) = tagged(lambda tag: tag == watchdog_tag(self.folder.path))
        return found


@pytest.fixture
def begin(start, tmp_path, runs):
    """Starts a run in a process that can be killed."""
    (tmp_path / "train.py").write_text("")
    starters = []

    def begun(agent: str = AGENT, detached: bool = True) -> Begun:
        asked = json.dumps([str(tmp_path / "train.py"), agent, detached, 0])
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        starters.append(
            subprocess.Popen([sys.executable, "-c", STARTER, asked], stdin=subprocess.PIPE, env=environment)
        )
        return Begun(runs, starters[-1])

    yield begun
    for starter in starters:
        starter.kill()
        starter.communicate()


@LINUX
@pytest.mark.parametrize("detached", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "victims", [("supervisor",), ("starter", "supervisor"), ("supervisor", "agent"), ("agent", "supervisor")]
)
def test_nothing_is_left_when_a_supervisor_is_killed(victims, detached, begin, start):
    run = begin(detached=detached).ready()
    assert run.folder.read_launch().start == start
    for who in victims:
        run.kill(who)
    wait_until(lambda: not any(run.left()))
    status, summary = run.folder.read_status(), run.folder.read_summary()
    assert status.state == summary.state == "failed"
    assert status.message == f"its supervisor (pid {status.supervisor.pid}) was killed, which ended the run"
    assert run.folder.end_of(run.folder.supervisor_log) == ""
    if start == "warm":
        said = f"process {status.supervisor.pid}, a supervisor or a tracer, was ended by signal {signal.SIGKILL:d}"
        wait_until(lambda: said in client.server_log().read_text())


@LINUX
@COLD_IS_SLOW
@pytest.mark.parametrize("name", ["launch", "status"])
def test_nothing_is_left_if_a_document_of_the_run_is_damaged(name, begin, start):
    begun = begin().ready()
    supervisor = begun.folder.read_status().supervisor.pid
    document = getattr(begun.folder, name)
    wait_until(lambda: document.exists())
    psutil.Process(supervisor).suspend()  # it would write its status again
    document.write_text("{")
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not any(begun.left()))


@LINUX
@COLD_IS_SLOW
def test_a_run_whose_starter_and_supervisor_are_killed_before_its_first_status_has_failed(begin):
    run = begin(agent="")
    supervisor = wait_until(lambda: next(iter(of_folder(run.folder.path)), None))
    assert run.watchdog().is_running() and not current_status(run.folder).supervisor
    run.kill("starter")
    run.starter.wait()
    time.sleep(0.5)
    assert run.watchdog().is_running() and not current_status(run.folder).supervisor, (
        "the supervisor may still write a status"
    )
    supervisor.kill()
    wait_until(lambda: not processes_of(str(run.runs)))
    assert run.folder.read_status().state == run.folder.read_summary().state == "failed"
    assert "were killed before it began" in run.folder.read_status().message


@LINUX
@COLD_IS_SLOW
@pytest.mark.parametrize("ending", ["by itself", "stopped"])
def test_a_run_that_ends_leaves_no_watchdog_and_nothing_else(ending, begin):
    run = begin().ready()
    assert run.watchdog().name() == "sh"
    job = Job.attach(run.folder)
    if ending == "stopped":
        assert job.stop() == "stopped"
    else:
        run.starter.stdin.close()
        job.wait(60)
    assert run.left() == [False, False, False]


@LINUX
@COLD_IS_SLOW
def test_a_run_goes_on_without_its_watchdog(begin):
    run = begin().ready()
    run.watchdog().kill()
    wait_until(lambda: not tagged(lambda tag: tag == watchdog_tag(run.folder.path)))
    assert current_status(run.folder).state == "starting"
    assert Job.attach(run.folder).stop() == "stopped"
    assert run.left() == [False, False, False]


def test_a_watchdog_belongs_to_no_run(bystander, tmp_path):
    """Neither to its own, which it must survive, nor to one that contains this one."""
    outer, inner = RunFolder.create("outer", tmp_path), RunFolder.create("inner", tmp_path)
    process = bystander(**{TAG: watchdog_tag(inner.path)})
    assert process.pid in {one.pid for one in tagged(lambda tag: tag.startswith(str(inner.path)))}
    assert not of_folder(inner.path) and process.pid not in {one.pid for one in members(str(outer.path))}


def test_a_folder_for_sockets_that_others_can_enter_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "x" * 60)
    assert runtime_folder().parent == Path("/tmp"), "too long for the path of a socket"
    monkeypatch.setattr(watchdog, "runtime_folder", lambda: tmp_path / "open")
    monkeypatch.setenv(watchdog.TEMPORARY, "of the run that contains this one")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(NotOurs, match="must be a folder of this user with mode 0700"):
        create(tmp_path / "open")
    watchdog.create_temporary(tmp_path / "run")
    assert watchdog.TEMPORARY not in os.environ and not watchdog.temporary(tmp_path / "run").exists()


@LINUX
def test_the_shared_memory_of_other_processes_stays(bystander, tmp_path):
    """Also that of one that a forged status names, and of one that ended without being a process of this run."""
    mine, named, ended = bystander(), bystander(), bystander()
    ended.kill()
    ended.wait()
    segments = [Path(f"/dev/shm/torch_{process.pid}_1_1") for process in (mine, named, ended)]
    for segment in segments:
        segment.touch()
    try:
        found = [psutil.Process(mine.pid)]
        watchdog.end_all(tmp_path, lambda: found if mine.poll() is None else [], 0.0, known=[named.pid])
        assert [segment.exists() for segment in segments] == [False, True, True]
    finally:
        for segment in segments[1:]:
            segment.unlink()
