"""A class for the tests: learners whose runs and exercises are as the lab writes them, in folders and zips."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import called
from fabricate import FakeRun

from labkit.analysis.summary import summarise
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower

LAB = "03_ddp"


def run_of(
    runs: Path,
    state: str = "finished",
    ended: float | None = None,
    error: str = "",
    guess: Mapping[str, float] | None = None,
    **spec: Any,
) -> RunFolder:
    """A run that has ended `ended` (Unix seconds, default: now), with its summary, as the supervisor leaves it."""
    runs.mkdir(parents=True, exist_ok=True)
    run = FakeRun(runs, steps=10, **spec)
    if guess:
        RunFolder.write_json(run.folder.guess, {"v": 1, "figures": dict(guess), "notebook": LAB})
    run.start()
    run.step(10)
    if error:
        run.writers[0].write("error", type="RuntimeError", message=error, traceback=f"train.py:7: {error}")
    failures = {"failures": {"0": {"message": error, "exit_code": 1}}, "exit_code": 1} if error else {}
    run.end(state, **failures)
    run.close()
    follower = Follower(run.folder)
    follower.poll()
    RunFolder.write_json(run.folder.summary, summarise(follower.state, run.folder.name))
    status = run.folder.read_status()
    status.ended = time.time() if ended is None else ended
    RunFolder.write_json(run.folder.status, status)
    return run.folder


def tried(runs: Path, **done: tuple[int, bool]) -> None:
    """The record of the exercises: attempts, and whether each is done; two underscores stand for the dot."""
    runs.mkdir(parents=True, exist_ok=True)
    noted = {name.replace("__", "."): {"tries": tries, "done": right} for name, (tries, right) in done.items()}
    RunFolder.write_json(runs / "exercises.json", noted)


def hand_in(runs: Path, path: Path, monkeypatch: Any) -> None:
    """What a learner sends: `labkit progress --zip`."""
    with monkeypatch.context() as patch:
        patch.setenv("LABKIT_RUNS", str(runs))
        assert called("progress", "--zip", str(path)) == 0


def a_class(place: Path, monkeypatch: Any) -> Path:
    """Five learners: in a folder, in a clone in a home, in a zip, in the folder of an LMS, and one who has begun."""
    folder = place / "autumn"
    folder.mkdir()
    ada, bob = folder / "Adalind Quill", folder / "bob" / "lab" / "runs"
    tried(ada, ddp__steps=(1, True), ddp__sampler=(4, False), build_data_parallel__naive=(2, True))
    run_of(ada, guess={"step_ms": 51.0, "peak_mb": 200.0})
    tried(bob, ddp__steps=(2, False), ddp__sampler=(1, False))
    run_of(bob, guess={"step_ms": 10.0})
    run_of(bob, "failed", time.time() - 200, "cannot read /home/bob/Bob Marlowe/data.csv")
    for name, path in (("cleo", folder / "cleo.zip"), ("dora", folder / "Dora Finch_42_file" / "homework.zip")):
        tried(place / name, ddp__steps=(3, True), zero__stage=(2, False))
        run_of(place / name, guess={"step_ms": 130.0})
        path.parent.mkdir(exist_ok=True)
        hand_in(place / name, path, monkeypatch)
    tried(folder / "emil" / "runs", start__steps=(1, False))
    return folder
