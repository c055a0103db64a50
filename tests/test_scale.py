"""Long runs: the cost of a step on disk and in memory, and reading step files, including broken ones."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy
import pytest
from rich.console import Console

from labkit.analysis import metrics
from labkit.analysis.summary import summarise
from labkit.figures import CHARTS
from labkit.figures.as_svg import drawing
from labkit.frontends.panel.view import RunView
from labkit.frontends.terminal import watch
from labkit.launch.system import interval
from labkit.probe.journal import Journal
from labkit.record import stepfile, steps
from labkit.record.documents import Unreadable
from labkit.record.events import PHASES, Reader, Writer
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.replay import Recording
from labkit.record.state import RunState
from labkit.runs.handle import Run

RECORD = 88  # bytes


def measured(step: int, **fields) -> dict:
    seconds = {"step": 0.0123456} | {phase: 0.001 * number for number, phase in enumerate(PHASES)}
    memory = {"allocated": 1 << 20, "reserved": None, "peak": (3 << 33) + step}
    return {
        "t": 1000.0 + step / 100,
        "step": step,
        "loss": 1 / step,
        "samples": 128,
        "seconds": seconds,
        "memory": memory,
    } | fields


def written(root, count: int, ranks: int = 1, **fields) -> RunFolder:
    """The folder of a finished run with `count` steps per rank, written by the real writer."""
    folder = RunFolder.create("long", root)
    RunFolder.write_json(folder.spec, {"script": "train.py", "nproc": ranks})
    RunFolder.write_json(folder.status, {"state": "finished", "started": 1000.0, "ended": 1000.0 + count / 100})
    for rank in range(ranks):
        writer = Writer(folder.events_of(rank), rank)
        writer.write("start", t=1000.0, pid=1, device="cpu", attempt=0)
        for step in range(1, count + 1):
            writer.write("step", **measured(step, **fields))
        writer.write("end", t=1000.0 + count / 100, exit_code=0, steps=count, seconds=count / 100)
        writer.close()
    return folder


def opened(folder: RunFolder) -> RunState:
    follower = Follower(folder)
    follower.poll()
    return follower.state


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs"), 3 * steps.HELD)


# ---- the cost of a step


def test_a_step_takes_88_bytes_and_the_rest_of_a_run_does_not_grow(long):
    path = long.events_of(0)
    records = 3 * steps.HELD
    assert stepfile.steps_path(path).stat().st_size == len(stepfile.header(0)) + RECORD * records
    assert path.stat().st_size < 1000
    assert RECORD * 8 * 100_000 < 75e6


def test_numpy_reads_the_file_as_the_docstring_says(long):
    with open(stepfile.steps_path(long.events_of(0)), "rb") as file:
        header = json.loads(file.readline())
        read = numpy.fromfile(file, dtype=[tuple(column) for column in header["columns"]])
    assert len(read) == 3 * steps.HELD and read["step"][-1] == 3 * steps.HELD and read["losses"].all()


def calls_of(work) -> int:
    """The number of calls of Python and C functions."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def test_opening_calls_no_function_for_each_step(long):
    summarise(opened(long))  # what is imported and compiled late is not what is counted
    assert calls_of(lambda: summarise(opened(long))) < steps.HELD / 2, "a call per step would be six times as many"


def test_drawing_costs_the_points_of_a_line_and_not_the_steps(long, tmp_path):
    states = opened(written(tmp_path, 2 * steps.HELD)), opened(long)
    shorter, longer = (
        calls_of(lambda state=state: [chart(state).drawn() for chart in CHARTS.values()]) for state in states
    )
    assert longer < 1.25 * shorter, "of steps there are 1.5 times as many"


def test_a_state_holds_a_bounded_part_of_a_long_run(long, tmp_path):
    def held(folder: RunFolder) -> int:
        tracemalloc.start()
        try:
            state = opened(folder)
            summarise(state)
            assert len(state.ranks[0].steps) % steps.HELD == 0
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    opened(long)  # what is imported late is not what is counted
    shorter = held(written(tmp_path, 2 * steps.HELD))
    assert held(long) < shorter + steps.HELD * 8, "of further steps not even one column stays"


def test_a_long_run_can_be_read_when_its_folder_is_gone(tmp_path):
    folder = written(tmp_path, 2 * steps.HELD)
    state = opened(folder)
    for path in folder.events.iterdir():
        path.unlink()
    assert state.ranks[0].steps.loss[0] == 1.0 and state.ranks[0].steps.step[5] == 6


def test_columns_are_the_same_in_memory_and_from_the_file(long):
    state = opened(long)
    known = state.ranks[0].steps
    count = len(known)
    expected = numpy.arange(1, count + 1, dtype=float)
    assert (known.step[:] == expected).all() and (known.loss[:] == 1 / expected).all()
    assert known.step[-3:].tolist() == [count - 2, count - 1, count]
    for part in (
        slice(5, 9),
        slice(steps.HELD - 3, steps.HELD + 3),
        slice(None, None, 1000),
        slice(-5, None),
        slice(9, 9),
        slice(50, 2, -7),
    ):
        assert known.step[part].tolist() == expected[part].tolist()
    assert known.seconds[0] == known.seconds[-1] == 0.0123456, "what was measured, to 0.1 µs, also from 32 bits"
    assert (known.memory["peak"][0], known.memory["peak"][-1], known.peak) == (
        3 * 2**33 + 1,
        3 * 2**33 + count,
        3 * 2**33 + count,
    )
    assert math.isnan(known.memory["reserved"][0])
    assert sum(1 for _ in known.t) == count
    assert 1000 < len(known.sample("step")) <= 2048 and metrics.median(known.step[:]) == (count + 1) / 2
    assert (
        metrics.median(known.phases["copy"][1:]) == 0.001
        and sum(piece.sum() for piece in known.samples.pieces()) == 128 * count
    )
    with pytest.raises(IndexError):
        known.step[count]


def test_samples_from_outside_become_rarer():
    elapsed, taken = 0.0, 0
    while elapsed < 12 * 3600:
        elapsed += interval(elapsed)
        taken += 1
    assert taken < 20_000 and interval(0) == interval(60) == 0.2 and interval(1e9) == 5.0


def test_what_is_written_regularly_grows_with_the_logarithm_of_a_run(tmp_path):
    journal = Journal(tmp_path, 0)
    size, sampled = {}, 0
    for number in range(1, 200_001):
        if number % journal.spaced(50) == 0:
            sampled += 1
            journal.write("timeline", step=number, spans="x" * 20_000)
        if number in (100_000, 200_000):
            size[number] = (tmp_path / "events" / "rank0.jsonl").stat().st_size
    assert size[100_000] < 16e6 and size[200_000] - size[100_000] < 5e6, "20 kB for each of 2,000 would be 40 MB"
    assert Journal(tmp_path, 0).spaced(50) > 50, "a restarted rank continues as rarely"


def test_metrics_and_reports_of_a_long_run_are_bounded():
    state = RunState()
    for step in range(5000):
        state.apply({"kind": "metric", "t": float(step), "rank": 0, "name": "lr", "value": step, "step": step})
        state.apply({"kind": "report", "t": float(step), "rank": 0, "values": {f"value {step}": step, "last": step}})
    state.apply({"kind": "metric", "t": 1.0, "rank": 0, "name": "accuracy", "value": 0.5, "step": 1})
    assert len(state.metrics) == 1000 and (state.metric("lr"), state.metric("accuracy"), state.metric("other")) == (
        4999,
        0.5,
        None,
    )
    assert len(state.reports[0]) == 1000 and state.reports[0]["last"] == 4999


# ---- live


def test_steps_and_lines_keep_their_order(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader = Writer(path, 0), Reader(path)
    writer.write("start", attempt=0)
    assert [event["kind"] for event in reader.poll()] == ["start"]
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
    found = [(event["kind"], event.get("step")) for event in reader.poll()]
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
    blocks = [event for event in Reader(path).poll(blocks=True) if event["kind"] == "steps"]
    assert [len(event["block"]) for event in blocks] == [2, 1, 1]
    state = RunState()
    for event in Reader(path).poll(blocks=True):
        state.apply(event)
    assert state.ranks[0].attempts == {0: 0, 1: 4} and list(state.ranks[0].steps.step) == [1, 2, 3, 4, 2]


def test_a_line_that_comes_while_steps_are_read_waits_for_the_steps_before_it(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader = Writer(path, 0), Reader(path)
    writer.write("step", **measured(1))
    polled = reader.poll()
    assert next(polled)["step"] == 1  # the lines were read, and the number of steps was asked for before
    writer.write("step", **measured(2))
    writer.write("waiting", since=1.0)
    writer.write("step", **measured(3))
    assert list(polled) == []
    assert [event.get("step") for event in reader.poll()] == [2, None, 3]
    writer.close()


def test_following_reads_new_records_only_and_joins_them(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader, state = Writer(path, 0), Reader(path), RunState()
    for step in range(1, 501):
        writer.write("step", **measured(step, loss=math.nan if step == 7 else 0.5 if step > 2 else None))
        for event in reader.poll(blocks=True):
            assert len(event["block"]) == 1
            state.apply(event)
    writer.close()
    rank = state.ranks[0]
    assert len(rank.steps) == 500 and len(rank.steps._chunks) == 1
    assert rank.not_finite == 7, "a loss that is not a number is none that is not known"
    assert rank.steps.has_loss and math.isnan(rank.steps.loss[0])


def test_a_loss_that_is_not_known_is_told_from_one_that_is_not_a_number(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer = Writer(path, 0)
    for loss in (None, math.nan, math.inf, 0.5):
        writer.write("step", **measured(1, loss=loss))
    writer.close()
    losses = [event["loss"] for event in Reader(path).poll()]
    assert losses[0] is None and math.isnan(losses[1]) and losses[2:] == [math.inf, 0.5]


# ---- broken files


def test_a_torn_record_is_waited_for_and_cut_off_when_a_rank_restarts(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader = Writer(path, 0), Reader(path)
    writer.write("step", **measured(1))
    writer.close()
    file = stepfile.steps_path(path)
    whole = file.read_bytes()
    file.write_bytes(whole + whole[-RECORD:-40])
    assert [event["step"] for event in reader.poll()] == [1]
    assert list(reader.poll()) == [] and reader.broken == 0
    writer = Writer(path, 0)
    writer.write("start", attempt=1)
    writer.write("step", **measured(2))
    writer.close()
    assert [event.get("step") for event in reader.poll()] == [None, 2] and reader.broken == 0


def test_a_header_of_which_a_part_was_written_is_written_again(tmp_path):
    path = tmp_path / "rank0.jsonl"
    file = stepfile.steps_path(path)
    file.write_bytes(stepfile.header(0)[:20])
    assert list(Reader(path).poll()) == []
    writer = Writer(path, 0)
    writer.write("step", **measured(1))
    writer.close()
    assert [event["step"] for event in Reader(path).poll()] == [1]


def test_a_record_of_which_a_full_disk_took_a_part_is_completed_first(tmp_path, monkeypatch):
    writer = Writer(tmp_path / "rank0.jsonl", 0)
    writer.write("step", **measured(1))
    real, room = os.write, [30, 0]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: room.pop(0)])

    monkeypatch.setattr(os, "write", write)
    writer.write("step", **measured(2))
    with pytest.raises(OSError, match="No space left"):
        writer.write("step", **measured(3))
    monkeypatch.undo()
    reader = Reader(tmp_path / "rank0.jsonl")
    assert [event["step"] for event in reader.poll()] == [1]
    writer.write("step", **measured(4))
    writer.close()
    assert [event["step"] for event in reader.poll()] == [2, 4] and reader.broken == 0


WRONG = (
    {"step": math.nan}, {"step": 1.5}, {"step": -1.0}, {"step": 2.0**60}, {"step": math.inf},
    {"t": math.nan}, {"t": 1e18}, {"t": -1.0}, {"samples": -1.0}, {"samples": math.inf},
    {"peak": -5.0}, {"peak": 1e300}, {"seconds": math.inf}, {"backward": -1e20},
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_record_that_makes_no_sense_is_counted_and_passed_over(tmp_path, wrong):
    folder = written(tmp_path, 5)
    file = stepfile.steps_path(folder.events_of(0))
    data = bytearray(file.read_bytes())
    at = len(stepfile.header(0))
    rows = numpy.frombuffer(data, dtype=list(stepfile.COLUMNS), offset=at).copy()
    for name, value in wrong.items():
        rows[name][2] = value
    file.write_bytes(bytes(data[:at]) + rows.tobytes())
    state = opened(folder)
    assert list(state.ranks[0].steps.step) == [1, 2, 4, 5] and state.broken == 1
    reader = Reader(folder.events_of(0))
    assert [event["step"] for event in reader.poll() if event["kind"] == "step"] == [1, 2, 4, 5] and reader.broken == 1


STEPS = b'{"kind":"steps","rank":%s,"columns":[%s]}\n'
TWO = b'["t","<f8"],["step","<f8"]'
HEADERS = (
    b"",
    b"{\n",
    b"[]\n",
    b"[" * 4000 + b"\n",
    b"x" * 10_000,
    b'{"kind":"steps"}\n',
    STEPS % (b"0", b""),
    STEPS % (b"-1", TWO),
    STEPS % (b"true", TWO),
    STEPS % (b"0", b'["t","<f8"]'),
    STEPS % (b"0", b'["t","<f8"],["step","O"]'),
    STEPS % (b"0", TWO + b',["t","<f8"]'),
    STEPS % (b"0", TWO + b',["__import__(1)","<f8"]'),
    STEPS % (b"0", TWO + b"".join(b',["a%d","<u4"]' % number for number in range(90))),
)


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:60].decode() or "empty")
def test_a_file_without_a_header_that_can_be_read_is_counted_once(tmp_path, header):
    folder = written(tmp_path, 3)
    stepfile.steps_path(folder.events_of(0)).write_bytes(header + b"\0" * 200)
    follower = Follower(folder)
    follower.poll()
    follower.poll()
    assert (
        follower.state.broken == 1
        and len(follower.state.ranks[0].steps) == 0
        and follower.state.ranks[0].exit_code == 0
    )


def test_a_step_file_that_is_cut_short_or_missing_is_noticed(tmp_path):
    for number, keep in enumerate((len(stepfile.header(0)) + 2 * RECORD, None)):
        folder = written(tmp_path / str(number), 5)
        file = stepfile.steps_path(folder.events_of(0))
        file.unlink() if keep is None else file.write_bytes(file.read_bytes()[:keep])
        state = opened(folder)
        assert (state.broken, len(state.ranks[0].steps)) == (1, 0 if keep is None else 2)


def test_a_step_file_that_is_no_regular_file_is_not_read(tmp_path):
    folder = written(tmp_path, 3)
    file = stepfile.steps_path(folder.events_of(0))
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(Unreadable, match="symbolic link"):
        opened(folder)
    assert "rank0.steps is a link" in folder.trouble()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(Unreadable):
        opened(folder)


def test_unknown_and_missing_columns_are_allowed(tmp_path):
    path = tmp_path / "rank0.jsonl"
    columns = [["t", "<f8"], ["news", "<i8"], ["step", "<f8"], ["loss", "<f8"]]
    rows = numpy.array([(1.0, 5, 1.0, 0.5), (2.0, 5, 2.0, math.nan)], dtype=[tuple(column) for column in columns])
    stepfile.steps_path(path).write_bytes(
        json.dumps({"kind": "steps", "rank": 0, "columns": columns}).encode() + b"\n" + rows.tobytes()
    )
    path.touch()
    assert [event["loss"] for event in Reader(path).poll()] == [0.5, None]
    state = RunState()
    for event in Reader(path).poll(blocks=True):
        state.apply(event)
    assert (
        list(state.ranks[0].steps.step) == [1, 2]
        and math.isnan(state.ranks[0].steps.samples[0])
        and state.ranks[0].not_finite is None
    )


# ---- folders of older versions, and replay


def test_a_folder_whose_steps_are_json_lines_opens_as_before(tmp_path):
    new = written(tmp_path / "new", 300)
    old = written(tmp_path / "old", 300)
    stepfile.steps_path(old.events_of(0)).unlink()
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
    monkeypatch.setattr("labkit.record.replay.time.monotonic", lambda: now[0])
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
    folder = written(tmp_path, 2 * steps.HELD)
    said: list[float] = []
    follower = Follower(folder, progress=said.append)
    follower.poll()
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
        line
        for path in (Path(stepfile.__file__).parents[1] / "probe").glob("*.py")
        for line in path.read_text().splitlines()
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
    path = stepfile.steps_path(folder.events_of(0))
    whole, head = path.read_bytes(), len(stepfile.header(0))
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
        events = [event for event in Reader(folder.events_of(0)).poll() if event["kind"] == "step"]
        assert (
            [event["step"] for event in events] == list(rank.steps.step) if (rank := state.ranks.get(0)) else not events
        )
