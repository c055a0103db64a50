"""The lifetime of a run's processes: which die together, which may be signalled, and which are halted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from bench import killed_training
from bench.kills import Attack, Moment, attack
from conftest import COLD_IS_SLOW, processes_of, wait_until
from fabricate import FakeRun
from lifetimes import LINUX, ROOT, WAITS, command, started, supervisor_in

from labkit.common.processes import TAG, identity, members, names, of_folder, tag_of
from labkit.launch.job import Job
from labkit.record.documents import plain
from labkit.record.folder import RunFolder
from labkit.record.follow import current_status
from labkit.runs.handle import run

LIMIT = 5.0  # seconds within which all processes of a stopped or abandoned run end

# Rank 0 starts two processes that hide: without a tag, in sessions of their own, one of them orphaned at once.
HIDES = """
import subprocess, sys, time
sleep = "[sys.executable, '-c', 'import time; time.sleep(100)']"
start = f"subprocess.Popen({sleep}, env={{}}, start_new_session=True, stdout=-3, stderr=-3).pid"
first = [sys.executable, "-c", f"import subprocess, sys; print({start})"]
orphan = subprocess.run(first, env={}, capture_output=True, text=True).stdout.strip()
direct = eval(start)
print("hidden", orphan, direct, flush=True)
if len(sys.argv) > 1:
    time.sleep(100)
"""


# ---- who dies with whom


@LINUX
@pytest.mark.parametrize(("parent", "code"), [("lifetime.identity(os.getppid())", 0), ("'1:1'", -9), ("''", -9)])
def test_a_process_lives_only_with_the_parent_that_it_was_told_of(parent, code):
    program = f"import os; from labkit.probe import lifetime; lifetime.end_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == code


@LINUX
def test_a_rank_whose_launcher_has_died_never_runs_its_script(tmp_path):
    """The launcher dies between the start of the rank and the rank's first line."""
    (tmp_path / "train.py").write_text("import os; open(os.environ['LABKIT_RUN_DIR'] + '/ran', 'w')")
    late = "import os, sys, time\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.01)\n"
    late += f"os.execv(sys.executable, [sys.executable, '-m', 'labkit.probe', {str(tmp_path / 'train.py')!r}])"
    launcher = "import os, subprocess, sys; from labkit.probe import lifetime; lifetime.announce()\n"
    launcher += f"subprocess.Popen([sys.executable, '-c', {late!r}, str(os.getpid())])"
    subprocess.run(
        [sys.executable, "-c", launcher], env=os.environ | {"PYTHONPATH": str(ROOT), TAG: str(tmp_path)}, check=True
    )
    wait_until(lambda: not processes_of(str(tmp_path)))
    assert not (tmp_path / "ran").exists() and not (tmp_path / "events").exists()


@LINUX
@pytest.mark.parametrize(
    "one",
    [
        Attack(victims, moment, start, warm)
        for warm in (False, True)
        for victims, moment, start in (
            (("supervisor",), Moment("supervisor", 0.02), "detached"),
            (("supervisor", "starter"), Moment("agent", 0.0), "detached"),
            (("starter", "supervisor"), Moment("supervisor", 0.1), "bound"),
            (("agent", "supervisor"), Moment("rank", 0.0), "detached"),
        )
    ],
)
def test_nothing_outlives_kills_at_early_moments(one, warm_server):
    warm_server()
    assert attack(one) == 0


@LINUX
def test_a_rank_and_the_agent_that_are_killed_at_a_checkpoint_leave_what_was_saved(warm_server):
    found = killed_training.attack(killed_training.Attack("fsdp2", ("rank 1", "agent"), "checkpoint", True, False))
    assert (found.processes, found.ports, found.shared, found.wrong, found.lost) == ((), 0, 0, "", 0)


# ---- who belongs to a run


def test_no_tag_is_not_this_tag(bystander, tmp_path):
    plain, tagged = bystander(), bystander(**{TAG: str(tmp_path)})
    assert (tag_of(psutil.Process(plain.pid)), tag_of(psutil.Process(tagged.pid))) == ("", str(tmp_path))
    assert not names("", tmp_path) and not names(None, tmp_path) and not names(str(tmp_path / "other"), tmp_path)
    assert [process.pid for process in of_folder(tmp_path)] == [tagged.pid]


@pytest.mark.parametrize("tag", [None, "another run's"])
def test_stop_signals_no_process_that_a_forged_status_names(tag, bystander, runs, capsys):
    folder, other = RunFolder.create("forged"), RunFolder.create("other")
    victim = bystander("input()", "labkit.launch.supervisor", **({TAG: str(other.path)} if tag else {}))
    who = identity(victim.pid)
    RunFolder.write_json(folder.spec, {"script": "train.py", "nproc": 1})
    RunFolder.write_json(folder.launch, {"env": {TAG: str(other.path)}})
    supervisor_in(folder, **who)
    RunFolder.write_json(folder.status, plain(folder.read_status()) | {"agent": who, "ranks": {"0": victim.pid}})
    assert command("stop", folder.name) == 0
    assert victim.poll() is None
    assert capsys.readouterr().out.startswith(f"{folder.name}: already ")


def test_a_run_within_a_run_is_not_its_members(bystander, tmp_path):
    starts = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); input()"
    mine, untagged, other = (
        bystander(**{TAG: str(tmp_path)}),
        bystander(),
        bystander(starts, **{TAG: str(tmp_path / "inner")}),
    )
    wait_until(lambda: psutil.Process(other.pid).children())
    inner = {other.pid, *(child.pid for child in psutil.Process(other.pid).children())}
    found = {process.pid for process in members(str(tmp_path))}
    assert {mine.pid, untagged.pid} <= found and not inner & found
    for child in inner:
        psutil.Process(child).kill()


@LINUX
@pytest.mark.parametrize(
    ("ending", "start"),
    [
        ("by itself", "warm"),
        ("stopped", "warm"),
        ("stopped", "cold"),
        pytest.param("by itself", "cold", marks=pytest.mark.slow),
    ],
    indirect=["start"],
)
def test_processes_that_hide_end_with_the_run(ending, script):
    handle = run(script(HIDES), nproc=1, device="cpu", args=("stay",) if ending == "stopped" else ())
    wait_until(lambda: "hidden" in handle.logs() or handle.state.over)
    hidden = [int(pid) for pid in handle.logs().split()[1:3]]
    assert len(hidden) == 2, handle.logs(0, "stderr")
    if ending == "stopped":
        assert all(psutil.pid_exists(pid) for pid in hidden)
        assert handle.stop().words == "stopped"
    else:
        assert handle.wait(120).words == "finished"
    assert not [pid for pid in hidden if psutil.pid_exists(pid)]


# ---- what is halted


@LINUX
@COLD_IS_SLOW  # see test_stop_ends_what_hangs_and_what_will_not_hear
def test_stop_is_as_quick_when_everything_is_halted(script):
    handle = started(run(script(WAITS), nproc=1, device="cpu"))
    for process in of_folder(handle.folder.path):
        process.suspend()
    begun = time.monotonic()
    assert Job.attach(handle.folder).stop() == "stopped"
    assert time.monotonic() - begun < LIMIT
    assert not processes_of(str(handle.folder.path))
    assert handle.summary()["state"] == handle.folder.read_summary().state == "stopped"


def test_stop_kills_a_supervisor_that_does_not_respond(bystander, runs):
    fake = FakeRun(runs)
    fake.start()
    tag = {TAG: str(fake.folder.path)}
    deaf = bystander(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); input()", "labkit.launch.supervisor", **tag
    )
    rank = bystander(**tag)
    supervisor_in(fake.folder, **identity(deaf.pid))
    wait_until(lambda: current_status(fake.folder).state == "running")
    begun = time.monotonic()
    assert Job.attach(fake.folder).stop() == "stopped"
    assert time.monotonic() - begun < LIMIT
    assert (deaf.wait(), rank.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert "did not respond" in fake.folder.read_status().message
    assert fake.folder.read_summary().state == "stopped"
