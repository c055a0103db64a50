"""Limits of runs: read from two files, enforced, and shown by the doctor."""

from __future__ import annotations

import getpass
import os

import pytest
from conftest import started_warm
from fabricate import FakeRun

from labkit import SpecError
from labkit.frontends.doctor import limits as checked
from labkit.launch.job import LaunchError, keep_quota
from labkit.record.folder import RunFolder
from labkit.runs.handle import settle
from labkit.setup import limits
from labkit.setup.limits import Limits, in_force


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The machine's configuration file and the user's; neither exists yet."""
    monkeypatch.setattr(limits, "SYSTEM", tmp_path / "system.conf")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "system.conf", tmp_path / "labkit.conf"


def test_the_user_can_only_be_stricter(files):
    system, own = files
    assert in_force() == Limits()
    system.write_text(f"[limits]\nhours = 4\nranks = 8\ndisk = 20 GB\n[limits {getpass.getuser()}]\nranks = 16\n")
    own.write_text("[limits]\nhours = 9\nranks = 2\ncpu_slots = 99\n")
    found = in_force()
    assert (found.hours, found.ranks, found.disk, found.slots) == (4.0, 2, 20 * 10**9, 99)
    assert found.sources["hours"] == f"{system} [limits]"
    assert found.sources["ranks"] == f"{own} [limits]"
    said = checked()
    assert said.level == "fine"
    assert f"4.0 hours per run ({system} [limits])" in said.says
    own.unlink()
    assert (in_force().ranks, in_force().sources["ranks"]) == (16, f"{system} [limits {getpass.getuser()}]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\nhours = many\n", "hours must be a number from 0.001 to 8760, got 'many'"),
        ("[limits]\ndisk = 20\n", "disk must be a size such as 20 GB, got '20'"),
        ("[limits]\nrank = 2\n", "has no 'rank'; it may have: hours, ranks, disk, cpu_slots"),
    ],
)
def test_an_invalid_file_is_named_and_starts_nothing(files, text, said):
    files[1].write_text(text)
    with pytest.raises(limits.ConfigError) as caught:
        in_force()
    assert said in str(caught.value) and str(files[1]) in str(caught.value)
    assert (checked().level, checked().says) == ("broken", str(caught.value))
    with pytest.raises(SpecError, match=r"labkit\.conf"):
        settle("ddp", nproc=2, device="cpu")


def test_too_many_ranks_are_refused_with_the_file(files):
    files[0].write_text("[limits]\nranks = 2\n")
    with pytest.raises(SpecError, match=r"exceeds the limit of 2 ranks \(.*system.conf \[limits\]\); use --nproc 2"):
        settle("ddp", nproc=4, device="cpu")
    files[0].write_text("[limits]\ncpu_slots = 3\n")
    with pytest.raises(SpecError, match="exceeds the 3 CPU slots"):
        settle("ddp", nproc=4, device="cpu")
    assert settle("ddp", nproc=3, device="cpu").nproc == 3


def test_a_run_ends_at_the_longest_time(files, tmp_path):
    files[1].write_text("[limits]\nhours = 0.001\n")  # 3.6 s
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    run = started_warm(str(tmp_path / "train.py"), nproc=1, device="cpu").wait(120)
    assert run.state.words == "stopped"
    assert run.state.status.message == "it reached the limit of 0.001 hours for a run (see labkit doctor)"


def finished(runs, name: str, size: int) -> RunFolder:
    run = FakeRun(runs)
    run.start()
    run.end()
    (run.folder.path / "checkpoint").write_bytes(os.urandom(size))
    return RunFolder(run.folder.path.rename(runs / name))


def test_the_oldest_finished_runs_make_room_and_no_other(runs):
    size = 1 << 20
    oldest, needed, running, newest = (finished(runs, name, size) for name in ("1", "2", "3", "4"))
    running.write_json(running.status, {"state": "running", "started": 1.0})
    limits = Limits(disk=int(3.5 * size), sources={"disk": "labkit.conf [limits]"})
    assert keep_quota(Limits()) == []
    assert keep_quota(limits, needed=str(needed.checkpoints / "step00000005")) == [oldest.name]
    assert [folder.name for folder in RunFolder.all()] == ["2", "3", "4"]
    assert keep_quota(limits) == []
    assert keep_quota(Limits(disk=2 * size, sources=limits.sources)) == [needed.name, newest.name]
    with pytest.raises(LaunchError, match=r"the quota is 512\.0 KiB \(labkit.conf \[limits\]\); none"):
        keep_quota(Limits(disk=size // 2, sources=limits.sources))
    assert running.path.is_dir()
