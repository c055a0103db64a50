"""Runs without a final status: the folder goes away, nobody brings them to their end, or the disk is full."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from conftest import COLD_IS_SLOW, wait_until
from fabricate import FakeRun
from folded import apply, one_by_one
from lifetimes import LINUX, WAITS, command, started, supervisor_in
from msgspec import structs

from labkit.common.processes import TAG, identity, of_folder
from labkit.launch import ending
from labkit.launch.job import Job, LaunchError
from labkit.launch.watch import Anchor
from labkit.probe.journal import Journal
from labkit.record.folder import RunFolder
from labkit.record.follow import QUIET, current_status
from labkit.record.reader import Reader
from labkit.record.state import RunState
from labkit.record.writer import Reserve, Writer
from labkit.runs.handle import Run, run

# ---- the folder goes away


def test_an_anchor_knows_what_became_of_its_folder(tmp_path):
    folder = RunFolder.create("anchored", tmp_path)
    RunFolder.write_json(folder.spec, {})
    anchor = Anchor(folder)
    assert (anchor.lost(), anchor.path()) == ("", folder.path)
    folder.spec.unlink()
    assert anchor.lost() == "emptied"
    moved = folder.path.rename(tmp_path / "moved")
    folder.path.mkdir()
    assert anchor.lost() == f"moved to {moved}" and anchor.path() == moved
    shutil.rmtree(moved)
    assert (anchor.lost(), anchor.path()) == ("deleted", None)


def test_a_run_whose_folder_is_deleted_ends_and_says_why(script):
    handle = started(run(script(WAITS), nproc=1, device="cpu"))
    other = Run.attach(handle.folder.path)
    assert other.words in ("starting ranks", "training")
    shutil.rmtree(handle.folder.path)
    assert (
        handle.words
        == other.words
        == "failed (the run folder was deleted or moved while the run was under way, so the run was stopped)"
    )
    assert "deleted" in handle.wait(60).words
    assert not of_folder(handle.folder.path), "wait returns when all processes of the run have ended"
    assert handle.stop().summary()["state"] == "failed"
    assert not handle.folder.path.exists(), "nothing is written to its old path"


@LINUX
def test_a_run_whose_folder_is_moved_ends_and_says_so_there(script, runs):
    handle = run(script(WAITS), nproc=1, device="cpu")
    moved = RunFolder(handle.folder.path.rename(runs / "moved"))
    assert "deleted or moved" in handle.wait().words and not of_folder(handle.folder.path)
    status = wait_until(lambda: (status := current_status(moved)).state == "failed" and status)
    assert f"the run folder was moved to {moved.path} while the run was under way" in status.message
    assert moved.read_summary().state == "failed"


def test_stop_finds_a_run_whose_folder_is_deleted(bystander, runs, capsys):
    folder = RunFolder.create("deleted")
    rank, other = bystander(**{TAG: str(folder.path)}), bystander(**{TAG: str(runs / "another")})
    shutil.rmtree(folder.path)
    assert command("stop", folder.name[:-2]) == 0
    assert "was deleted while its run was in progress" in capsys.readouterr().out
    assert rank.wait() == -signal.SIGTERM and other.poll() is None


# ---- a run that nobody brings to its end


@pytest.fixture
def elsewhere(runs):
    """The folder of a run on another host, copied here without its supervisor."""
    fake = FakeRun(runs, steps=3)
    fake.start()
    fake.step(3)
    quiet = time.time() - 2 * QUIET
    fake.system.write("system", t=quiet, cpu_percent=1.0, memory_used=1, gpus=[], ranks={})
    fake.close()
    supervisor_in(fake.folder, host="gpu-server-7")
    for path in fake.folder.path.rglob("*"):
        os.utime(path, (quiet, quiet))
    return fake.folder


def test_a_run_of_another_host_is_lost_when_it_gives_no_sign_of_life(elsewhere, tmp_path, capsys):
    assert current_status(elsewhere).state == "lost"
    assert "it ran on gpu-server-7 and has written nothing since" in current_status(elsewhere).message
    assert Job.attach(elsewhere).wait(0.0) == "lost"
    assert command("stop", elsewhere.name) == 0
    assert "already lost (it ran on gpu-server-7" in capsys.readouterr().out
    assert command("show", elsewhere.name) == 0
    assert "lost (it ran on gpu-server-7" in " ".join(capsys.readouterr().out.split())
    assert command("replay", elsewhere.name, "--speed", "1000") == 0
    assert command("handout", elsewhere.name, "-o", str(tmp_path / "page.html")) == 0
    assert "gpu-server-7" in (tmp_path / "page.html").read_text()
    assert command("clean", "--yes") == 0
    assert not elsewhere.path.exists()


@pytest.mark.parametrize("sign", ["sample", "file"])
def test_a_run_of_another_host_that_gives_a_sign_of_life_is_under_way(sign, elsewhere, capsys):
    """Hosts' clocks may differ: either the sample's own time or the file's is enough."""
    if sign == "sample":
        Writer(elsewhere.system).write("system", t=time.time() + QUIET / 2, cpu_percent=1.0)
        os.utime(elsewhere.system, (1e9, 1e9))
    else:
        os.utime(elsewhere.events_of(1))
    assert current_status(elsewhere).state == "running"
    with pytest.raises(LaunchError, match="runs on gpu-server-7; stop it there"):
        Job.attach(elsewhere).stop()


@pytest.mark.parametrize("field", [{"host": "gpu-server-7"}, {"boot": "before the restart"}])
def test_a_process_of_another_host_is_never_found_here(field, elsewhere, bystander):
    """The same pid is a different process on another host, after a reboot, and in another container."""
    stranger = bystander("input()", "labkit.launch.supervisor", **{TAG: str(elsewhere.path)})
    supervisor_in(elsewhere, **(identity(stranger.pid) | field))
    for path in (elsewhere.status, elsewhere.system):
        os.utime(path, (1e9, 1e9))
    assert current_status(elsewhere).state == "lost"


def test_a_copy_of_a_run_that_is_under_way_says_that_it_is_one(bystander, runs):
    folder = RunFolder.create("original")
    RunFolder.write_json(folder.spec, {"script": "train.py", "nproc": 1})
    supervisor = bystander("input()", "labkit.launch.supervisor", **{TAG: str(folder.path)})
    supervisor_in(folder, **identity(supervisor.pid))
    copy = RunFolder(shutil.copytree(folder.path, runs / "copy"))
    assert current_status(folder).state == "running"
    lost = {"state": "lost", "message": f"this folder is a copy of {folder.path}, where the run is under way"}
    assert structs.replace(current_status(copy), supervisor=None) == structs.replace(
        current_status(folder), supervisor=None, **lost
    )
    assert Job.attach(copy).stop() == "lost"
    assert supervisor.poll() is None


# ---- the disk is full


def test_a_line_that_was_written_in_part_is_completed_first(tmp_path, monkeypatch):
    path, room, write = tmp_path / "events.jsonl", [90], os.write

    def limited(file: int, data: bytes) -> int:
        taken = min(len(data), room[0])
        room[0] -= taken
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:taken])

    monkeypatch.setattr(os, "write", limited)
    writer, reader = Writer(path, 0), Reader(path)
    writer.write("checkpoint", step=1)
    writer.write("checkpoint", step=2)
    with pytest.raises(OSError, match="No space left"):
        writer.write("checkpoint", step=3)
    assert [event.step for event in one_by_one(reader.poll())] == [1]
    room[0] = 1 << 20
    writer.write("checkpoint", step=4)
    assert [event.step for event in one_by_one(reader.poll())] == [2, 4] and reader.broken == 0


def test_what_a_killed_writer_left_is_one_broken_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"v":1,"t":1.0,"kind":"st')
    Writer(path, 0).write("start", pid=1)
    reader = Reader(path)
    assert [event.kind for event in one_by_one(reader.poll())] == ["start"] and reader.broken == 1


def test_a_journal_drops_events_while_the_disk_is_full_and_counts_them(tmp_path, monkeypatch):
    journal, write = Journal(tmp_path, 0), os.write

    def full(file: int, data: bytes) -> int:
        if list((tmp_path / "events").glob(".*.reserve")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    for step in range(3):
        journal.write("step", step=step)
    assert not journal.silent
    journal.write("error", type="OSError", message="No space left on device")
    state = RunState()
    for event in Reader(tmp_path / "events" / "rank0.jsonl").poll():
        apply(state, event)
    assert state.dropped == {0: 3} and state.ranks[0].error.type == "OSError"


def test_the_end_is_written_into_the_room_that_was_reserved(tmp_path, monkeypatch):
    fake = FakeRun(tmp_path)
    fake.start()
    ending.reserve(fake.folder)
    Reserve(fake.folder.events / ".rank0.reserve").make(100)
    write = RunFolder.write_json
    sizes = []

    def limited(path: Path, value: dict) -> None:
        sizes.append(len(msgspec.json.encode(value)))
        if path == fake.folder.summary and sizes[-1] > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        if path == fake.folder.status:
            assert not fake.folder.reserve.exists()
        write(path, value)

    monkeypatch.setattr(RunFolder, "write_json", staticmethod(limited))
    before = fake.folder.reserve.stat().st_size
    ending.make_room(fake.folder)
    assert 0 < fake.folder.reserve.stat().st_size < before
    ending.conclude_unattended(fake.folder, "failed", ending.DISK_FULL)
    summary = fake.folder.read_summary()
    assert summary.state == "failed" and summary.world_size == 2 and summary.ranks == []
    assert fake.folder.read_status().message == ending.DISK_FULL
    assert not list(fake.folder.path.rglob(".*reserve"))


# Once both have begun, rank 1 takes all the room there is, and both go on until a line of their output finds none.
FILLS = """
import os, pathlib, time
from contextlib import suppress
run = pathlib.Path(os.environ["LABKIT_RUN_DIR"])
while sum(path.stat().st_size > 0 for path in run.glob("events/rank*.jsonl")) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    with open(run / "filler", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
time.sleep(2)
while True:
    print("x" * 1000)
"""


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A file system of 4 MiB for the run folders."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root alone")
    monkeypatch.setenv("LABKIT_RUNS", str(place))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@LINUX
@COLD_IS_SLOW  # see test_a_run_whose_folder_is_deleted_ends_and_says_why
def test_a_run_on_a_full_disk_says_so_and_has_its_end(small_disk, script):
    handle = run(script(FILLS), nproc=2, device="cpu").wait()
    status, summary = handle.folder.read_status(), handle.folder.read_summary()
    assert (status.state, summary.state) == ("failed", "failed"), status
    assert ending.DISK_FULL in status.message
    assert "disk_full" in [finding.name for finding in summary.findings], summary
    assert "No space left on device" in handle.words or ending.DISK_FULL in handle.words
    for path in (handle.folder.system, *handle.folder.event_files().values()):
        reader = Reader(path)
        assert list(reader.poll()) and reader.broken == 0, path
    assert not list(handle.folder.path.rglob(".*reserve"))
