"""Data that are drawn once, before a run: into the user's cache folder, and for all ranks of all runs."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import warm_run

from labkit.launch import job
from labkit.launch.job import draw_data
from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError

SPEC = Spec("single", nproc=1, steps=2, batch_size=4, samples=1_600, device="cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The lab's cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "labkit"


@pytest.fixture
def drawings(monkeypatch) -> list[list[str]]:
    """The programs that were started to draw data. They draw few samples, which is fast."""
    started, run = [], subprocess.run

    def started_as(argv: list[str], **options: object) -> object:
        started.append(argv[2:])
        return run(argv, **options)

    monkeypatch.setattr(job.subprocess, "run", started_as)
    return started


def test_data_are_drawn_once_and_again_if_they_are_too_few_or_cut_off(folder, drawings):
    for _ in range(2):
        draw_data(SPEC)
    (path,) = folder.iterdir()
    assert [words[1:] for words in drawings] == [["digits-28.pt", "1", "28", "60000"]]
    with path.open("rb+") as file:
        file.truncate(1000)
    draw_data(SPEC)
    draw_data(Spec("ddp", nproc=2, samples=60_001))
    draw_data(SPEC)
    assert [words[-1] for words in drawings] == ["60000", "60000", "70000"]
    images, labels, test, _ = torch.load(path, weights_only=True)
    assert [len(images), len(labels), len(test)] == [70_000, 70_000, 360] and list(folder.iterdir()) == [path]


def test_nothing_is_drawn_for_other_data_and_for_scripts_of_the_users_own(folder, drawings):
    draw_data(Spec("single", "gpt", nproc=1))
    draw_data(Spec(script="train.py", nproc=1))
    assert not drawings and not folder.exists()


def test_what_cannot_be_drawn_is_refused_in_one_sentence(folder):
    folder.parent.write_text("a file stands in the way")
    with pytest.raises(SpecError, match=r"^digits could not be drawn into .*digits-28\.pt: .*; set XDG_CACHE_HOME"):
        draw_data(SPEC)


def test_several_runs_that_start_at_the_same_time_leave_one_whole_file(folder):
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(draw_data, [SPEC] * 2))
    (path,) = folder.iterdir()
    assert len(torch.load(path, weights_only=True)[0]) == 60_000


def test_a_script_trains_on_what_was_drawn_and_works_without_it(tmp_path, folder):
    path = tmp_path / "train.py"
    path.write_text(write_script(SPEC), encoding="utf-8")
    without = warm_run(path, nproc=1, device="cpu")
    draw_data(SPEC)
    again = warm_run(path, nproc=1, device="cpu")
    assert without.words == again.words == "finished"
    in_the_lab = warm_run(
        "single", **{name: getattr(SPEC, name) for name in ("nproc", "steps", "samples", "device")}, batch_size=4
    )
    assert again.logs(0) == in_the_lab.logs(0) != without.logs(0)
