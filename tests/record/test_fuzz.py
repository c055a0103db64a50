"""Recorded runs with random mutations: some fifty here, always the same ones, and ten thousand in `labkit bench`."""

from __future__ import annotations

import json

import pytest
from bench import fuzz
from fabricate import FakeRun
from foreign import FINISHED, HANG, KILLED, THREADS, copy_of

from labkit.analysis.summary import summarise
from labkit.record import events
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower


@pytest.mark.thorough
@pytest.mark.parametrize(("run", "seed"), [(FINISHED, 0), (THREADS, 1), (HANG, 2), (KILLED, 3)])
def test_no_mutation_of_a_run_makes_anything_raise(runs, run, seed):
    folder = copy_of(runs, run)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    fuzz.read(folder, slow=True)
    report = fuzz.fuzz(folder, 50, seed)
    assert not report.crashes, "\n".join(report.examples.values())
    assert report.mutations == 50 and 0 < report.refused < 50
    assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


@pytest.fixture
def with_step_files(runs) -> RunFolder:
    """A run whose steps are binary records, as this version writes them."""
    run = FakeRun(runs, steps=20)
    run.start()
    run.step(20)
    run.system.write(
        "system", cpu_percent=100.0, memory_used=1 << 30, gpus=[], ranks={"0": {"cpu_percent": 99.0, "rss": 1 << 28}}
    )
    run.end()
    run.close()
    follower = Follower(run.folder)
    follower.poll()
    RunFolder.write_json(run.folder.summary, summarise(follower.state, run.folder.name))
    return run.folder


@pytest.mark.thorough
def test_no_mutation_of_step_files_makes_anything_raise(with_step_files):
    assert with_step_files.events_of(0).with_suffix(".steps").exists()
    report = fuzz.fuzz(with_step_files, 80, seed=9)
    assert not report.crashes, "\n".join(report.examples.values())


def test_the_fuzzer_finds_what_is_not_checked(runs, monkeypatch):
    def unchecked(value):
        kind = events.KINDS[value["kind"]]
        return kind(**{name: value[name] for name in kind.__struct_fields__ if name in value})

    monkeypatch.setattr(events, "checked", unchecked)
    report = fuzz.fuzz(copy_of(runs), 80, seed=4)
    assert report.crashes and set(report.crashes) == set(report.examples)


def test_mutations_depend_on_the_seed_alone(runs):
    seen: dict[int, list[bytes]] = {}

    def note(folder: RunFolder, slow: bool) -> None:
        seen[seed].append(folder.spec.read_bytes() + folder.status.read_bytes() + folder.events_of(0).read_bytes())

    folder = copy_of(runs)
    for seed in (5, 6, 7):
        seen[seed] = []
        fuzz.fuzz(folder, 40, seed=min(seed, 6), read=note)
    assert seen[6] == seen[7] != seen[5]
    assert len(set(seen[6])) >= 10


def test_a_crash_is_counted_by_its_site(runs):
    def fall(folder: RunFolder, slow: bool) -> None:
        json.loads("{")

    report = fuzz.fuzz(copy_of(runs), 5, seed=8, read=fall)
    assert list(report.crashes.values()) == [5] and next(iter(report.crashes)).startswith("JSONDecodeError")
