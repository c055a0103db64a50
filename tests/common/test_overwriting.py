"""Nothing of the user's is deleted or overwritten: what a command writes replaces only what the lab wrote before."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from commands import called, recorded_run
from foreign import bind

from labkit.common.files import MARK, write_output
from labkit.course.exercises import Book
from labkit.launch import job
from labkit.launch.leases import Lease, LeaseError, tickets
from labkit.plan.spec import Spec
from labkit.prediction import predict
from labkit.record.folder import RunFolder

PRECIOUS = "precious, and nobody else has it\n"


def refused(capsys, path: Path, why: str) -> None:
    """The last command was refused with one sentence that names the path."""
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("labkit: ") and str(path) in error and why in error, error


# ---- outputs that the user names


@pytest.fixture
def run(runs) -> str:
    return recorded_run(runs).folder.name


@pytest.fixture(params=["handout", "pack", "pack a run", "kubeflow", "skypilot", "notebook", "gather", "unpack"])
def writes(request, run, runs, tmp_path, monkeypatch):
    """The arguments of a command that writes to a file or folder, and whether it may be written again."""
    monkeypatch.chdir(tmp_path)
    if request.param == "unpack":
        assert called("pack", "ddp", "-o", "job.zip") == 0
    lab = tmp_path / "lab.py"
    lab.write_text("# %% [markdown]\n# # A lab\n#\n# Text.\n")
    return {
        "handout": (["handout", run, "-o"], True),
        "pack": (["pack", "ddp", "-o"], True),
        "pack a run": (["pack", run, "-o"], True),
        "kubeflow": (["submit", "ddp", "--engine", "kubeflow", "-o"], True),
        "skypilot": (["submit", "ddp", "--engine", "skypilot", "-o"], True),
        "notebook": (["notebook", str(lab), "-o"], False),
        "gather": (["gather", run, run, "-o"], False),
        "unpack": (["unpack", "job.zip", "-o"], False),
    }[request.param]


def test_a_file_of_the_user_is_not_overwritten(writes, tmp_path, capsys):
    command, _ = writes
    path = tmp_path / "notes.txt"
    path.write_text(PRECIOUS)
    assert called(*command, str(path)) != 0
    refused(capsys, path, "exists")
    assert path.read_text() == PRECIOUS
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith(".")) == []


def test_a_file_of_the_user_is_not_overwritten_through_a_link(writes, tmp_path, capsys):
    command, _ = writes
    target, link = tmp_path / "notes.txt", tmp_path / "link"
    target.write_text(PRECIOUS)
    link.symlink_to(target)
    assert called(*command, str(link)) != 0
    assert "exists" in capsys.readouterr().err
    assert target.read_text() == PRECIOUS and link.is_symlink()


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "loop", "device"])
def test_what_is_no_file_is_neither_opened_nor_replaced(writes, tmp_path, capsys, kind):
    command, _ = writes
    path = tmp_path / "there"
    held = None
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        held = socket.socket(socket.AF_UNIX)
        bind(held, path)
    elif kind == "folder":
        path.mkdir()
        (path / "notes.txt").write_text(PRECIOUS)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path = Path("/dev/null")
    before = os.lstat(path)
    assert called(*command, str(path)) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("labkit: ") and str(path)[:70] in error, error  # a message quotes 80 characters
    after = os.lstat(path)
    assert (before.st_mode, before.st_ino) == (after.st_mode, after.st_ino)
    assert kind != "folder" or (path / "notes.txt").read_text() == PRECIOUS
    if held is not None:
        held.close()


def test_what_the_lab_wrote_is_written_again_unless_it_may_contain_work(writes, tmp_path, capsys):
    command, again = writes
    if command[0] == "gather":
        pytest.skip("the two folders are not those of one run; the refusal of any existing folder is tested above")
    path = tmp_path / "output"
    assert called(*command, str(path)) == 0, capsys.readouterr().err
    if again:
        assert MARK.encode() in path.read_bytes()
        assert called(*command, str(path)) == 0
    else:
        assert called(*command, str(path)) != 0
        refused(capsys, path, "exists")


def test_an_output_without_the_mark_is_an_error_of_the_lab(tmp_path):
    with pytest.raises(ValueError, match="no mark"):
        write_output(tmp_path / "new.txt", "text")
    assert not (tmp_path / "new.txt").exists()


def test_pages_of_the_course_do_not_replace_a_site_of_the_user(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labkit.cli.pages.CLONE", tmp_path)  # a course without labs: the index alone
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text(PRECIOUS)
    assert called("handout", "--all") != 0
    refused(capsys, Path("site/index.html"), "was not written by labkit")
    assert (tmp_path / "site" / "index.html").read_text() == PRECIOUS


# ---- folders of runs


def test_clean_deletes_no_folder_that_is_not_a_run(runs, capsys):
    done = recorded_run(runs).folder.path
    foreign = runs / "another tool"
    foreign.mkdir()
    (foreign / "spec.json").write_text("{}")
    (foreign / "notes.txt").write_text(PRECIOUS)
    os.utime(foreign, (time.time() - 9999,) * 2)
    outside = runs.parent / "outside"
    outside.mkdir()
    (outside / "notes.txt").write_text(PRECIOUS)
    (done / "data").symlink_to(outside)
    assert called("clean", "--yes") == 0
    assert not done.exists()
    assert (foreign / "notes.txt").read_text() == (outside / "notes.txt").read_text() == PRECIOUS
    assert "another tool is kept because it is no run" in capsys.readouterr().out


def test_clean_removes_a_link_to_a_run_and_not_the_run(runs, tmp_path):
    run = recorded_run(tmp_path / "elsewhere").folder.path
    runs.mkdir()
    (runs / "link").symlink_to(run)
    assert called("clean", "--yes") == 0
    assert not os.path.lexists(runs / "link") and (run / "spec.json").exists()


def test_only_what_a_starting_process_has_created_again_is_deleted(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.events.mkdir(parents=True)
    (folder.events / "rank0.jsonl").write_text("")
    (folder.path / "notes.txt").write_text(PRECIOUS)
    folder.delete_recreated()
    assert folder.events.exists() and (folder.path / "notes.txt").read_text() == PRECIOUS
    (folder.path / "notes.txt").unlink()
    folder.delete_recreated()
    assert not folder.path.exists()
    folder.delete_recreated()  # and if there is nothing


# ---- folders that the environment names


@pytest.mark.parametrize("name", ["1.lock", "notes.txt"])
def test_leases_change_nothing_in_a_folder_of_something_else(tmp_path, name):
    place = tmp_path / "home"
    place.mkdir(mode=0o700)
    (place / "notes.txt").write_text(PRECIOUS)
    (place / name).write_text(PRECIOUS)
    with pytest.raises(LeaseError, match="is not a folder of leases"):
        Lease("run", "cpu", 1, ("0",), place)
    with pytest.raises(LeaseError, match="is not a folder of leases"):
        tickets(place)
    assert {path.name for path in place.iterdir()} == {"notes.txt", name}
    assert place.stat().st_mode & 0o777 == 0o700


def test_old_predictions_are_removed_and_nothing_else_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(predict, "_KEPT", 1)
    mine = tmp_path / "labkit" / "predictions" / "mine"
    mine.mkdir(parents=True)
    (mine / "plan.json").write_text(PRECIOUS)
    os.utime(mine, (0, 0))
    for steps in (1, 2):
        predict.keep(Spec("ddp", nproc=2, steps=steps), {})
        time.sleep(0.01)
    assert (mine / "plan.json").read_text() == PRECIOUS
    assert len(list(mine.parent.iterdir())) == 2


def test_records_that_cannot_be_read_are_set_aside_one_after_another(tmp_path):
    book = Book(tmp_path / "exercises.json")
    for number in range(3):
        (tmp_path / "exercises.json").write_text(f"{number}: {PRECIOUS}")
        assert book.read() == {}
    texts = {path.read_text() for path in tmp_path.iterdir()}
    assert texts == {f"{number}: {PRECIOUS}" for number in range(3)}


def test_a_job_that_cannot_start_deletes_only_its_own_folder(runs, monkeypatch):
    def fail(*_):
        raise OSError("no process")

    kept = recorded_run(runs).folder.path
    monkeypatch.setattr(job, "start_supervisor", fail)
    with pytest.raises(OSError, match="no process"):
        job.Job.start(Spec("ddp", nproc=2, device="cpu"), root=runs)
    assert list(runs.iterdir()) == [kept]
