"""Long runs while they last, folders of older versions, and replay."""

from __future__ import annotations

import io
import json
import math
import random
import tracemalloc
from pathlib import Path

import numpy
import pytest
from folded import apply, one_by_one
from long_runs import measured, opened, written
from rich.console import Console

import labkit
from labkit.analysis.summary import summarise
from labkit.figures import CHARTS
from labkit.figures.as_svg import drawing
from labkit.frontends.panel.view import RunView
from labkit.frontends.terminal import watch
from labkit.record.follow import Follower, Recording
from labkit.record.reader import Block, Reader
from labkit.record.state import RunState
from labkit.record.writer import COLUMNS, Writer, header, steps_path
from labkit.runs.handle import Run

pytestmark = pytest.mark.thorough

# ---- live


def test_steps_and_lines_keep_their_order(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader = Writer(path, 0), Reader(path)
    writer.write("start", attempt=0)
    assert [event.kind for event in one_by_one(reader.poll())] == ["start"]
    for step in (1, 2):
        writer.write("step", **measured(step))
    writer.write("waiting", since=1.0)
    writer.write("step", **measured(3))
    writer.write("step", **measured(4, extra="no column holds this"))
    writer.write("end", exit_code=1)
    writer.close()
    again = Writer(path, 0)
    again.write("start", attempt=1)
    again.write("step", **measured(2))
    again.close()
    found = [(event.kind, getattr(event, "step", None)) for event in one_by_one(reader.poll())]
    assert found == [
        ("step", 1),
        ("step", 2),
        ("waiting", None),
        ("step", 3),
        ("step", 4),
        ("end", None),
        ("start", None),
        ("step", 2),
    ]
    blocks = [event for event in Reader(path).poll() if isinstance(event, Block)]
    assert [len(block) for block in blocks] == [2, 1, 1]
    state = RunState()
    for event in Reader(path).poll():
        apply(state, event)
    assert state.ranks[0].attempts == {0: 0, 1: 4} and list(state.ranks[0].steps.step) == [1, 2, 3, 4, 2]


def test_a_line_that_comes_while_steps_are_read_waits_for_the_steps_before_it(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader = Writer(path, 0), Reader(path)
    writer.write("step", **measured(1))
    polled = reader.poll()
    assert next(polled).records["step"].tolist() == [
        1
    ]  # the lines were read, and the number of steps was asked for before
    writer.write("step", **measured(2))
    writer.write("waiting", since=1.0)
    writer.write("step", **measured(3))
    assert list(polled) == []
    assert [getattr(event, "step", None) for event in one_by_one(reader.poll())] == [2, None, 3]
    writer.close()


def test_following_reads_new_records_only_and_joins_them(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader, state = Writer(path, 0), Reader(path), RunState()
    for step in range(1, 501):
        writer.write("step", **measured(step, loss=math.nan if step == 7 else 0.5 if step > 2 else None))
        for event in reader.poll():
            assert len(event) == 1
            apply(state, event)
    writer.close()
    rank = state.ranks[0]
    assert len(rank.steps) == 500 and len(rank.steps._older) == 0
    assert rank.not_finite == 7, "a loss that is not a number is none that is not known"
    assert rank.steps.has_loss and math.isnan(rank.steps.loss[0])


def test_memory_does_not_grow_with_the_steps_that_are_followed(tmp_path):
    path, records = tmp_path / "rank0.jsonl", numpy.zeros(200_000, list(COLUMNS))
    records["t"] = records["step"] = numpy.arange(1, len(records) + 1)
    steps_path(path).write_bytes(header(0))
    reader, state, held = Reader(path), RunState(), []
    tracemalloc.start()
    try:
        with open(steps_path(path), "ab") as file:
            for first in range(0, len(records), 400):
                file.write(records[first : first + 400].tobytes())
                file.flush()
                for event in reader.poll():
                    apply(state, event)
                known = state.ranks[0].steps
                assert known.step[len(known) // 2] == len(known) // 2 + 1, "of older steps, only what was read last"
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(known) == 200_000 and max(held) < 1e6, "bytes, of which a sample of all steps takes a quarter"
    assert max(held[250:]) - max(held[25:250]) < 100_000, "of 100,000 more steps, less than one byte each"


def test_a_loss_that_is_not_known_is_told_from_one_that_is_not_a_number(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer = Writer(path, 0)
    for loss in (None, math.nan, math.inf, 0.5):
        writer.write("step", **measured(1, loss=loss))
    writer.close()
    losses = [event.loss for event in one_by_one(Reader(path).poll())]
    assert losses[0] is None and math.isnan(losses[1]) and losses[2:] == [math.inf, 0.5]


# ---- folders of older versions, and replay


def test_a_folder_whose_steps_are_json_lines_opens_as_before(tmp_path):
    new = written(tmp_path / "new", 300)
    old = written(tmp_path / "old", 300)
    steps_path(old.events_of(0)).unlink()
    head = {"v": 1, "rank": 0}
    lines = [{"t": 1000.0, "kind": "start", "pid": 1, "device": "cpu", "attempt": 0}]
    lines += [{"kind": "step"} | measured(step) for step in range(1, 301)]
    lines += [{"t": 1003.0, "kind": "end", "exit_code": 0, "steps": 300, "seconds": 3.0}]
    old.events_of(0).write_text("".join(json.dumps(head | line) + "\n" for line in lines))
    assert summarise(opened(old)) == summarise(opened(new))
    for name in ("loss", "throughput", "memory", "phases"):
        assert CHARTS[name](opened(old)).drawn().points == CHARTS[name](opened(new)).drawn().points


def test_a_replay_reads_steps_as_they_are_due(tmp_path, monkeypatch):
    folder = written(tmp_path, 40_000, ranks=2)
    now = [100.0]
    monkeypatch.setattr("labkit.record.follow.time.monotonic", lambda: now[0])
    recording = Recording(folder, speed=10.0)
    recording.poll()
    assert (recording.state.step, recording.state.over) == (0, False)
    for seconds in (0.0555, 1.0, 30.0):
        now[0] += seconds
        recording.poll()
        played = round((now[0] - 100) * 10 * 100)
        assert abs(recording.state.step - played) <= 1 and not recording.state.over
    now[0] += 10.0
    recording.poll()
    assert recording.state.over and summarise(recording.state) == summarise(opened(folder))


def test_reading_says_how_far_it_is_once_it_has_taken_a_second(tmp_path, monkeypatch):
    folder = written(tmp_path, 60_000)
    said: list[float] = []
    monkeypatch.setattr("labkit.record.follow.time.monotonic", lambda: 0.0)
    Follower(folder, progress=said.append).poll()
    assert said == [], "a run that opens at once"
    clock = iter(range(0, 1000))
    monkeypatch.setattr("labkit.record.follow.time.monotonic", lambda: next(clock))
    Follower(folder, progress=said.append).poll()
    assert said and said == sorted(said) and said[0] > 0 and said[-1] > 0.99


def test_no_event_has_a_field_that_the_order_of_the_files_needs(tmp_path):
    """`after` of older versions' `going_on` was a number of seconds: it says nothing about the order."""
    folder = written(tmp_path, 3)
    with open(folder.events_of(0), "a", encoding="utf-8") as file:
        for after in (31.0, 0.5, None):
            file.write(json.dumps({"t": 1001.0, "rank": 0, "kind": "going_on", "after": after}) + "\n")
    state = opened(folder)
    assert state.broken == 0 and len(state.ranks[0].steps) == 3
    fields = [
        line for path in (Path(labkit.__file__).parent / "probe").glob("*.py") for line in path.read_text().splitlines()
    ]
    assert not [line for line in fields if ".write(" in line and " after=" in line]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_says_how_far_a_long_run_is_read(tmp_path, monkeypatch, terminal):
    monkeypatch.setattr("labkit.record.follow._PATIENCE", -1.0)
    monkeypatch.setattr("labkit.record.follow._TICK", 0.0)
    folder = written(tmp_path, 100)
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)
    watch(Follower(folder), folder, console)
    shown = console.file.getvalue()
    assert shown.index("reading the run: ") < shown.index("finished")


def test_the_panel_says_how_far_a_long_run_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.record.follow._PATIENCE", -1.0)
    monkeypatch.setattr("labkit.record.follow._TICK", 0.0)
    folder, said = written(tmp_path, 100), []
    view = RunView()
    view.words.observe(lambda change: said.append(change["new"]), "value")

    class Job:
        def __init__(self) -> None:
            self.folder = folder

        def stop(self) -> None:
            """Nothing runs."""

    view.follow(Job())
    view.wait(60)
    reading = [number for number, words in enumerate(said) if "reading the run: " in words]
    assert reading and "finished" in said[-1] and reading[-1] < len(said) - 1


def test_a_handle_says_on_stderr_how_far_a_long_run_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("labkit.record.follow._PATIENCE", -1.0)
    folder = written(tmp_path, 100)
    run = Run.attach(folder.path)
    assert run.state.step == 100
    assert capsys.readouterr().err.startswith(f"labkit: reading {folder.name}: ")


def test_step_files_with_random_bytes_in_them_open_and_draw(tmp_path):
    folder, choose = written(tmp_path, 40), random.Random(17)
    path = steps_path(folder.events_of(0))
    whole, head = path.read_bytes(), len(header(0))
    for number in range(300):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 20)):
            data[choose.randrange(head) if number % 3 == 0 else choose.randrange(head, len(data))] = choose.randrange(
                256
            )
        if number % 5 == 0:
            del data[choose.randrange(len(data)) :]
        path.write_bytes(data)
        state = opened(folder)
        summarise(state)
        for name in ("loss", "throughput", "memory", "phases"):
            drawing(CHARTS[name](state).drawn(), 300, 200)
        events = [event for event in one_by_one(Reader(folder.events_of(0)).poll()) if event.kind == "step"]
        assert [event.step for event in events] == list(rank.steps.step) if (rank := state.ranks.get(0)) else not events
