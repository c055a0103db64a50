"""Data that are made once: read again from the cache, by any number of ranks, and made anew where the cache is no
help."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from conftest import warm_run

from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.training.workloads import digits
from labkit.training.workloads.digits import cached

made = []


def make(count: int) -> tuple[torch.Tensor, ...]:
    """What is slow to make."""
    made.append(count)
    return torch.arange(count, dtype=torch.float32), torch.ones(2, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The user's cache folder of this test."""
    made.clear()
    monkeypatch.setattr(digits, "CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "labkit"


def is_made(tensors: tuple[torch.Tensor, ...], count: int) -> bool:
    return torch.equal(tensors[0], torch.arange(count, dtype=torch.float32)) and torch.equal(
        tensors[1], torch.ones(2, dtype=torch.uint8)
    )


def test_what_was_made_is_read_again_and_may_be_changed(folder, capfd):
    first, second = cached(make, 1000), cached(make, 1000)
    assert made == [1000] and is_made(first, 1000) and is_made(second, 1000)
    assert len(list(folder.iterdir())) == 1
    assert capfd.readouterr().out == ""
    second[0][0] = -1.0  # in memory alone
    assert is_made(cached(make, 1000), 1000)
    assert len(list(folder.iterdir())) == 1
    assert capfd.readouterr() == ("", "")


def test_other_arguments_and_another_source_have_files_of_their_own(folder, monkeypatch):
    cached(make, 1000)
    assert is_made(cached(make, 10), 10)
    monkeypatch.setattr(digits.inspect, "getsource", lambda function: "another")
    cached(make, 10)
    assert made == [1000, 10, 10] and len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"no tensors", None, "archive"])
def test_a_damaged_file_is_named_and_not_used(damage, folder, capfd):
    cached(make, 100_000)
    (path,) = folder.iterdir()
    if damage == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("note.txt", "not written by torch.save")
    else:
        path.write_bytes(path.read_bytes()[:1000] if damage is None else damage)
    capfd.readouterr()
    assert is_made(cached(make, 100_000), 100_000) and made == [100_000, 100_000]
    assert capfd.readouterr().out.startswith(f"cache file {path} cannot be used (delete it if damaged): ")
    path.unlink()
    assert is_made(cached(make, 100_000), 100_000) and is_made(cached(make, 100_000), 100_000)
    assert len(made) == 3 and capfd.readouterr().out == ""


def test_a_cache_that_cannot_be_written_is_named_and_not_used(folder, capfd):
    folder.parent.write_text("a file stands in the way")
    assert is_made(cached(make, 10), 10) and is_made(cached(make, 10), 10)
    assert made == [10, 10], "it is known before the data are made"
    assert capfd.readouterr().out.count("cannot be used") == 2, "once for each run"


def test_a_full_disk_leaves_no_half_file(folder, monkeypatch, capfd):
    def save(tensors: object, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    assert is_made(cached(make, 10), 10)
    assert list(folder.iterdir()) == [] and "No space left" in capfd.readouterr().out


def test_ranks_that_write_at_the_same_time_leave_one_whole_file(folder, monkeypatch, capfd):
    def meanwhile(count: int) -> tuple[torch.Tensor, ...]:
        if made.count(count) < 2:  # another rank has found no file either
            made.append(count)
            assert is_made(cached(meanwhile, count), count)
        return make(count)

    assert is_made(cached(meanwhile, 1000), 1000)
    (path,) = folder.iterdir()
    assert is_made(torch.load(path, weights_only=True), 1000)
    assert capfd.readouterr().out == ""


def test_digits_from_the_cache_are_those_that_were_made(monkeypatch):
    monkeypatch.setattr(digits, "SAMPLES", 2000)
    (fresh, test), (again, test_again) = digits.load_data(), digits.load_data()
    for one, other in ((fresh, again), (test, test_again)):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors))
    assert [len(one) for one in (again, test_again)] == [2000, 360]


def test_a_script_keeps_its_data_where_the_user_keeps_caches_and_works_without(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(write_script(Spec("single", nproc=1, steps=2, batch_size=4, samples=1_600, device="cpu")))
    printed = []
    for place in ("caches", "caches", "/proc/nowhere"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
        lines = warm_run(path, nproc=1, device="cpu").logs(0).splitlines()
        told = [line for line in lines if "cannot be used" in line]
        assert len(told) == (place == "/proc/nowhere")
        printed.append([line for line in lines if line not in told])
    assert printed == [printed[0]] * 3 and printed[0]
    assert len(list((tmp_path / "caches" / "labkit").iterdir())) == 1
