"""Links, FIFOs and devices in a run folder: nothing outside of it is read, and no read blocks."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from bench.fuzz import time_limit
from fabricate import FakeRun
from foreign import FINISHED, RECORDED, copy_of, everything

import labkit
from labkit.course.answers import Wrong, source
from labkit.frontends.handout.execute import stand_in
from labkit.record import files
from labkit.record.files import NotPlain, names_below, open_below, read_below
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run

pytestmark = pytest.mark.thorough

SECRET = "SECRET-7c1f"
LOG = next((RECORDED / FINISHED / "logs").glob("none_*")).name
FILES = (
    *("spec.json", "status.json", "summary.json", "launch.json", "system.jsonl", "train.py", "command.txt"),
    *(
        "events/rank0.jsonl",
        f"logs/{LOG}/attempt_0/0/stdout.log",
        f"logs/{LOG}/attempt_0/1/stderr.log",
        "logs/torchrun.log",
    ),
)
FOLDERS = ("events", "logs", f"logs/{LOG}", f"logs/{LOG}/attempt_0/0")


@pytest.fixture
def folder(runs):
    return copy_of(runs)


def marked(path: Path) -> None:
    """Puts the secret into every text of a file, in a form that keeps it valid."""
    text = path.read_text(encoding="utf-8")
    for valid in ("cnn", "0.9300", "Distributed"):
        text = text.replace(valid, SECRET)
    path.write_text(text if path.suffix in (".json", ".jsonl") else f"{SECRET}\n{text}", encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_file_outside_is_not_followed(folder, name, tmp_path):
    outside = tmp_path / "outside"
    shutil.copy(folder.path / name, outside)
    marked(outside)
    (folder.path / name).unlink()
    (folder.path / name).symlink_to(outside)
    assert SECRET not in everything(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_to_a_folder_outside_is_not_followed(folder, name, tmp_path):
    outside = tmp_path / "outside"
    shutil.move(folder.path / name, outside)
    for path in outside.rglob("*"):
        if path.is_file():
            marked(path)
    (folder.path / name).symlink_to(outside)
    assert SECRET not in everything(folder)


@pytest.mark.parametrize("name", ["rank0.steps", "rank1.steps"])
def test_step_files_are_opened_the_same_way(runs, tmp_path, name):
    run = FakeRun(runs, steps=5)
    run.start()
    run.step(5)
    run.end()
    run.close()
    path = run.folder.events / name
    outside = shutil.move(path, tmp_path / name)
    for spoil in (lambda: path.symlink_to(outside), lambda: os.mkfifo(path), path.mkdir):
        spoil()
        with time_limit():
            said = everything(run.folder)
        assert f"run {run.folder.name} cannot be read" in said and "step 5/5" not in said
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.move(outside, path)
    assert "step 5/5" in everything(run.folder)


def test_what_is_marked_does_show_without_a_link(folder):
    """The tests above can fail."""
    for name in ("train.py", f"logs/{LOG}/attempt_0/0/stdout.log"):
        marked(folder.path / name)
        assert SECRET in everything(folder)
        (folder.path / name).write_text("", encoding="utf-8")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_at_once(folder, name, kind):
    path = folder.path / name
    path.unlink()
    {"fifo": lambda: os.mkfifo(path), "zero": lambda: path.symlink_to("/dev/zero"), "directory": path.mkdir}[kind]()
    with time_limit():
        assert everything(folder)


def test_the_page_says_why_something_is_not_shown(folder, tmp_path):
    folder.script.unlink()
    folder.script.symlink_to(tmp_path / "train.py")
    folder.command.unlink()
    folder.command.symlink_to("/etc/hostname")
    said = everything(folder)
    assert "The script is not shown: train.py is a symbolic link" in said
    assert "The command is not shown: command.txt is a symbolic link" in said


def test_a_folder_that_is_reached_by_a_link_is_read(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    assert "finished" in everything(RunFolder(link))


def test_a_copy_holds_plain_files_only(folder, tmp_path):
    folder.script.unlink()
    folder.script.symlink_to("/etc/hostname")
    os.mkfifo(folder.path / "pipe")
    copy = folder.copy(tmp_path / "copy")
    assert not (copy.path / "train.py").exists() and not (copy.path / "pipe").exists()
    assert copy.spec.read_bytes() == folder.spec.read_bytes()
    assert all(not path.is_symlink() for path in copy.path.rglob("*"))


def test_recorded_runs_of_a_lab_are_copied_the_same_way(folder, runs, tmp_path, monkeypatch):
    from labkit.launch.job import Job

    folder.command.unlink()
    folder.command.symlink_to("/etc/hostname")
    monkeypatch.setattr(Job, "start", Job.start)
    stand_in(str(runs))
    job = Job.start(folder.read_spec().to_spec(), root=tmp_path / "lab")
    assert job.state == "finished" and not os.path.lexists(job.folder.command)


def test_deleting_a_link_leaves_what_it_leads_to(folder, runs, tmp_path):
    kept = shutil.move(folder.path, tmp_path / "kept")
    folder.path.symlink_to(kept)
    folder.delete()
    assert not os.path.lexists(folder.path) and RunFolder(kept).spec.is_file()


def test_a_script_outside_that_is_no_file_keeps_no_exercise_waiting(folder, tmp_path):
    script = tmp_path / "mine.py"
    os.mkfifo(script)
    RunFolder.write_json(folder.spec, {"script": str(script), "nproc": 2})
    with time_limit(), pytest.raises(Wrong, match="cannot be read; run it again from its current location"):
        source(Run.attach(folder.path))


# ---- opening files, with and without openat


@pytest.fixture(params=[True, False], ids=["openat", "without openat"])
def either(request, monkeypatch):
    if request.param and not files._HAS_OPENAT:
        pytest.skip("this system has no openat")
    monkeypatch.setattr(files, "_HAS_OPENAT", request.param)


def test_files_below_are_opened(either, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"text")
    assert read_below(tmp_path, tmp_path / "a" / "b" / "file", 4) == b"text"
    assert names_below(tmp_path, tmp_path) == ["a"] and names_below(tmp_path, tmp_path / "a" / "b") == ["file"]
    assert names_below(tmp_path, tmp_path / "none") == []
    with pytest.raises(FileNotFoundError):
        open_below(tmp_path, tmp_path / "a" / "none")
    with pytest.raises(NotPlain, match="larger than 3 bytes"):
        read_below(tmp_path, tmp_path / "a" / "b" / "file", 3)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("link", "link is a symbolic link"),
        ("through/file", "through is a symbolic link"),
        ("dangling", "dangling is a symbolic link"),
        ("folder", "folder is a directory"),
        ("pipe", "pipe is a FIFO"),
        ("../outside", "does not lie below"),
        ("folder/../../outside", "does not lie below"),
    ],
)
def test_everything_else_is_refused(either, tmp_path, path, says):
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "through").symlink_to(tmp_path / "far")
    (root / "dangling").symlink_to(tmp_path / "none")
    os.mkfifo(root / "pipe")
    with pytest.raises(NotPlain, match=says):
        open_below(root, root / path)
    assert names_below(root, root / "through") == []


def test_a_component_that_is_replaced_while_it_is_opened_leads_nowhere(tmp_path, monkeypatch):
    """The race that checking before opening would lose."""
    root, far = tmp_path / "root", tmp_path / "far"
    for place, content in ((root / "logs", b"own"), (far, b"secret")):
        place.mkdir(parents=True)
        (place / "file").write_bytes(content)
    original = os.open

    def swapping(path, flags, *args, **kwargs):
        opened = original(path, flags, *args, **kwargs)
        if path == "logs":
            (root / "logs").rename(root / "old")
            (root / "logs").symlink_to(far)
        return opened

    monkeypatch.setattr(os, "open", swapping)
    assert read_below(root, root / "logs" / "file", 10) == b"own"


def test_nothing_reads_a_run_folder_but_through_its_class():
    root = Path(labkit.__file__).parent
    direct = re.compile(
        r"(?:folder|run)\.(?:spec|script|command|plan|status|summary|system|capture|events_of\(.*?\)|log_of\(.*?\)|launcher_log|supervisor_log)"
        r"\.(?:read_text|read_bytes|open)\(|open\([\w.]*folder\.[\w.]+(?:, \"rb?\")?\)"
    )
    allowed = {root / "record" / "folder.py"}
    found = {
        path.name: direct.findall(path.read_text(encoding="utf-8"))
        for path in root.rglob("*.py")
        if path not in allowed
    }
    assert not {name: hits for name, hits in found.items() if hits}
    assert direct.search("folder.script.read_text()") and direct.search("open(self.folder.spec)")
