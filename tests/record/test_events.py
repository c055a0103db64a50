"""The protocol: complete lines are read once, incomplete ones later, and broken ones are counted."""

from __future__ import annotations

import json
import math
import time

import pytest
from folded import one_by_one

from labkit.record.reader import Reader
from labkit.record.state import RunState
from labkit.record.writer import Writer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank0.jsonl"


def line(**fields) -> bytes:
    return json.dumps({"v": 1, "t": 1.0, "rank": 0, "kind": "step"} | fields).encode() + b"\n"


def test_what_was_written_is_read_once(path):
    writer, reader = Writer(path, rank=3), Reader(path)
    writer.write("step", step=1, loss=0.5)
    (event,) = one_by_one(reader.poll())
    assert event.rank == 3 and event.kind == "step" and event.step == 1
    assert event.t == pytest.approx(time.time(), abs=60)
    assert list(reader.poll()) == []
    writer.write("end", t=7.0)
    assert [event.t for event in one_by_one(reader.poll())] == [7.0]
    writer.close()


def test_a_second_writer_appends_as_a_restarted_rank_does(path):
    for attempt in range(2):
        writer = Writer(path, rank=0)
        writer.write("start", attempt=attempt)
        writer.close()
    assert [event.attempt for event in one_by_one(Reader(path).poll())] == [0, 1]


def test_values_that_json_has_not(path):
    writer = Writer(path)
    writer.write("metric", value=math.nan, name=path)
    writer.close()
    (event,) = one_by_one(Reader(path).poll())
    assert math.isnan(event.value) and event.name == str(path) and event.rank is None


def test_a_file_that_is_not_there_yet(path):
    reader = Reader(path)
    assert list(reader.poll()) == []
    path.write_bytes(line(step=1))
    assert [event.step for event in one_by_one(reader.poll())] == [1]


def test_a_half_written_line_is_waited_for(path):
    whole = line(step=2)
    path.write_bytes(line(step=1) + whole[:20])
    reader = Reader(path)
    assert [event.step for event in one_by_one(reader.poll())] == [1]
    assert list(reader.poll()) == [] and reader.broken == 0
    with path.open("ab") as file:
        file.write(whole[20:])
    assert [event.step for event in one_by_one(reader.poll())] == [2] and reader.broken == 0


def test_a_line_longer_than_the_limit_comes_in_parts(path):
    path.write_bytes(line(step=1, text="x" * 500) + line(step=2))
    reader = Reader(path)
    found = []
    for _ in range(20):
        found += [event.step for event in one_by_one(reader.poll(limit=100))]
    assert found == [1, 2] and reader.broken == 0


@pytest.mark.parametrize(
    "bad",
    [
        b"{broken\n",
        b"[1, 2]\n",
        b'"text"\n',
        b"\xff\xfe\n",
        b'{"kind": "step"}\n',
        b'{"t": 1.0}\n',
        b'{"t": "now", "kind": "step"}\n',
        b'{"t": 1.0, "kind": 5}\n',
    ],
)
def test_a_broken_line_is_counted_and_passed_over(path, bad):
    path.write_bytes(line(step=1) + bad + line(step=2))
    reader = Reader(path)
    assert [event.step for event in one_by_one(reader.poll())] == [1, 2]
    assert reader.broken == 1


def test_empty_lines_and_unknown_kinds_pass(path):
    path.write_bytes(b"\n" + line(kind="of another time", more=[1]) + b"  \n")
    reader = Reader(path)
    assert [event.kind for event in one_by_one(reader.poll())] == ["of another time"]
    assert reader.broken == 0


def test_kinds_that_only_readers_create_are_unknown_in_a_file(path):
    path.write_bytes(b"".join(line(kind=kind) for kind in ("steps", "spec", "status", "heard")))
    reader = Reader(path)
    state = RunState()
    for event in reader.poll():
        state.apply(event)
    assert [*state.ranks] == [0] and reader.broken == 0


def test_a_hole_in_a_file_of_events_is_skipped(tmp_path):
    """A sparse file may claim terabytes; what comes after the hole is read."""
    path = tmp_path / "rank0.jsonl"
    event = b'{"v": 1, "t": 1.0, "rank": 0, "kind": "log", "text": "x"}\n'
    path.write_bytes(event)
    with path.open("r+b") as file:
        file.seek(1 << 43)
        file.write(b"\n" + event)
    reader, read = Reader(path), []
    for _ in range(20):
        read += reader.poll()
    assert len(read) == 2 and reader.broken == 1
