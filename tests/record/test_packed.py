"""Recorded runs as zips: a round trip, hostile zips, and the runs that come with the lab."""

from __future__ import annotations

import json
import re
import zipfile

import pytest
from fabricate import finished_folder

from labkit.analysis.profiled import newest
from labkit.analysis.summary import summarise
from labkit.jobs import zipped
from labkit.record import packed
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.packed import MARK, SHIPPED, opened, recording, shipped
from labkit.training.strategies import STRATEGIES

MOST = 1 << 20  # bytes of a shipped recording


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def state_of(folder: RunFolder):
    follower = Follower(folder)
    follower.poll()
    return follower.state


def test_a_zip_opens_as_the_run_that_it_holds(runs, tmp_path):
    run = finished_folder(runs, "ddp", 2, step_seconds=0.05)
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / "big.pt").write_bytes(bytes(1000))
    (run.logs / "link.log").symlink_to("/etc/hostname")
    path = tmp_path / "mine.zip"
    path.write_bytes(zipped(recording(run)))
    found = RunFolder.find(str(path))
    assert not (found.logs / "link.log").exists()
    assert found.name == run.name and not (found.path / "checkpoints").exists()
    assert summarise(state_of(found), found.name) == summarise(state_of(run), run.name)
    assert found.path.parents[1].stat().st_mode & 0o777 == 0o700
    assert RunFolder.find(str(path)).path == found.path, "it is unpacked once"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../spec.json", "leaves the folder"),
        ("/spec.json", "leaves the folder"),
        ("recording/x/a\nb", "control characters"),
        ("other/spec.json", "has no recorded run"),
    ],
)
def test_a_hostile_zip_is_one_sentence(tmp_path, name, says):
    path = tmp_path / "hostile.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "{}")
    with pytest.raises(LookupError, match=says):
        RunFolder.find(str(path))
    assert not list((tmp_path / "cache").rglob("spec.json")) or name == "other/spec.json"


def test_a_damaged_zip_and_a_zip_bomb_are_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / "damaged.zip"
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(LookupError, match="damaged"):
        RunFolder.find(str(path))
    monkeypatch.setattr("labkit.record.packed._MOST_BYTES", 1 << 20)
    path.write_bytes(zipped({"recording/x/spec.json": bytes(2 << 20)}))
    with pytest.raises(LookupError, match="exceed"):
        RunFolder.find(str(path))
    monkeypatch.setattr(packed, "_MOST_ZIP", 10)
    with pytest.raises(LookupError, match="larger than 10 bytes"):
        opened(str(path))


def test_a_run_that_does_not_come_with_the_lab_is_named():
    with pytest.raises(LookupError, match=f"no run {MARK}nothing; there are: {MARK}"):
        RunFolder.find(f"{MARK}nothing")


# ---- the runs that come with the lab


def test_every_strategy_has_a_recording():
    there = {name.removeprefix(MARK).rpartition("-x")[0] for name in shipped()}
    assert there == set(STRATEGIES)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_recording_is_whole_small_and_names_no_machine(name):
    path = SHIPPED / f"{name.removeprefix(MARK)}.zip"
    assert path.stat().st_size <= MOST
    state = state_of(RunFolder.find(name))
    assert state.status.state == "finished" and state.step == state.total_steps
    assert state.prediction is not None, "it was predicted"
    assert newest(state) is not None, "it has a profiled step"
    assert not state.broken
    with zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            text = archive.read(entry).decode(errors="replace")
            if entry.endswith((".json", ".jsonl", ".txt", ".log")):
                assert not re.search(r"/(home|root|tmp|work|Users|usr|var)/", text), entry
            if entry.endswith(".jsonl"):
                hosts = {json.loads(line).get("host", "lab") for line in text.splitlines()}
                assert hosts <= {"lab", None}, entry
