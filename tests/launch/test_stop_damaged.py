"""`labkit stop` needs only the tag of the processes: it stops a run whose documents are damaged, false or special
files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from conftest import processes_of, wait_until
from fabricate import FakeRun
from foreign import bind, command

from labkit.common.processes import TAG, here, identity
from labkit.launch.job import Job
from labkit.record.folder import RunFolder


@pytest.fixture
def run(runs) -> Iterator[FakeRun]:
    """A run under way, of which one process still lives."""
    fake = FakeRun(runs)
    fake.start()
    fake.step(3)
    gone = {"pid": 2**22, "create_time": 1.0}
    fake.status("running", supervisor=gone | here(), agent=gone | here())
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {TAG: str(fake.folder.path)}
    )
    fake.process = psutil.Process(process.pid)
    yield fake
    process.kill()
    process.wait()
    fake.close()


def replaced(path, how: str) -> None:
    """The file is damaged, or something else is in its place."""
    path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to("/dev/zero")
    elif how == "loop":
        path.symlink_to(path)
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as held:
            bind(held, path)
    elif how != "missing":
        path.write_text(how)


def ended(run: FakeRun) -> bool:
    return not run.process.is_running() or run.process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "how", ["", "{", '{"state": "run', '{"nproc": "x"}', "fifo", "folder", "link", "loop", "socket", "missing"]
)
@pytest.mark.parametrize("name", ["spec.json", "status.json", "both"])
def test_a_damaged_document_does_not_keep_the_processes_alive(run, name, how):
    for path in ("spec.json", "status.json") if name == "both" else (name,):
        (run.folder.path / path).touch()
        replaced(run.folder.path / path, how)
    code, said = command("stop", run.folder.name)
    assert code == 0 and said.startswith((run.folder.name, str(run.folder.path))), said
    assert ended(run), said


@pytest.mark.parametrize("how", ["{", "fifo"])
@pytest.mark.parametrize("name", ["guess.json", "launch.json", "plan.json", "summary.json", "events"])
def test_nor_does_any_other_file(run, name, how):
    path = run.folder.path / name
    if path.is_dir():
        shutil.rmtree(path)
    path.touch()
    replaced(path, how)
    code, said = command("stop", run.folder.name)
    assert code == 0 and ended(run), said


@pytest.mark.parametrize(
    "status",
    [
        {"state": "finished"},
        {"state": "failed", "ended": 1.0},
        {"state": "running", "supervisor": {"pid": 1, "create_time": 1.0, "host": "another host"}},
        {"state": "running", "supervisor": None},
        {"state": "lost"},
    ],
)
def test_a_false_status_does_not_keep_the_processes_alive(run, status):
    RunFolder.write_json(run.folder.status, status)
    code, said = command("stop", run.folder.name)
    assert code == 0 and ended(run), said


def test_no_other_process_is_signalled(run, runs):
    """Neither one that a damaged status names, nor one of a run with a similar name."""
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {TAG: f"{run.folder.path}-2"}
    )
    try:
        RunFolder.write_json(run.folder.status, {"state": "running", "supervisor": identity(other.pid) | here()})
        run.folder.spec.write_text("{")
        assert command("stop", run.folder.name)[0] == 0
        assert ended(run) and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_run_that_cannot_be_read_and_has_no_process_is_refused(run):
    run.process.kill()
    wait_until(lambda: ended(run))
    run.folder.spec.write_text("{")
    code, said = command("stop", run.folder.name)
    assert code == 1 and "spec.json is not JSON" in said


@pytest.mark.parametrize("damaged", [("status.json",), ("spec.json", "status.json", "launch.json")], ids=len)
def test_a_real_run_trains_on_and_is_stopped(runs, tmp_path, damaged):
    script = tmp_path / "forever.py"
    script.write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
    done = subprocess.run(
        [sys.executable, "-m", "labkit", "run", str(script), "--nproc", "1", "--device", "cpu", "--detach", "--json"],
        **{"env": os.environ | {"LABKIT_RUNS": str(runs)}, "capture_output": True, "text": True, "check": True},
    )
    folder = RunFolder.find(json.loads(done.stdout)["run"], runs)
    try:
        wait_until(lambda: folder.read_status().state == "running", 60)
        for name in damaged:
            (folder.path / name).write_text("{")
        time.sleep(1.5)  # longer than the supervisor waits between two readings
        assert len(processes_of(str(folder.path))) > 1, "the run was ended by the damage"
    finally:
        code, said = command("stop", folder.name)
    assert code == 0, said
    assert not Job(folder).has_processes
    assert folder.read_status().state == "stopped"
