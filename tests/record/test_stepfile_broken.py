"""Step files that are cut, overwritten or forged are read as far as they are valid."""

from __future__ import annotations

import errno
import json
import math
import os

import numpy
import pytest
from folded import apply, one_by_one
from long_runs import RECORD, measured, opened, written

from labkit.record.documents import Unreadable
from labkit.record.follow import Follower
from labkit.record.reader import Reader
from labkit.record.state import RunState
from labkit.record.writer import COLUMNS, Writer, header, steps_path


def test_a_torn_record_is_waited_for_and_cut_off_when_a_rank_restarts(tmp_path):
    path = tmp_path / "rank0.jsonl"
    writer, reader = Writer(path, 0), Reader(path)
    writer.write("step", **measured(1))
    writer.close()
    file = steps_path(path)
    whole = file.read_bytes()
    file.write_bytes(whole + whole[-RECORD:-40])
    assert [event.step for event in one_by_one(reader.poll())] == [1]
    assert list(reader.poll()) == [] and reader.broken == 0
    writer = Writer(path, 0)
    writer.write("start", attempt=1)
    writer.write("step", **measured(2))
    writer.close()
    assert [getattr(event, "step", None) for event in one_by_one(reader.poll())] == [None, 2] and reader.broken == 0


def test_a_header_of_which_a_part_was_written_is_written_again(tmp_path):
    path = tmp_path / "rank0.jsonl"
    file = steps_path(path)
    file.write_bytes(header(0)[:20])
    assert list(Reader(path).poll()) == []
    writer = Writer(path, 0)
    writer.write("step", **measured(1))
    writer.close()
    assert [event.step for event in one_by_one(Reader(path).poll())] == [1]


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
    assert [event.step for event in one_by_one(reader.poll())] == [1]
    writer.write("step", **measured(4))
    writer.close()
    assert [event.step for event in one_by_one(reader.poll())] == [2, 4] and reader.broken == 0


WRONG = (
    {"step": math.nan}, {"step": 1.5}, {"step": -1.0}, {"step": 2.0**60}, {"step": math.inf},
    {"t": math.nan}, {"t": 1e18}, {"t": -1.0}, {"samples": -1.0}, {"samples": math.inf},
    {"peak": -5.0}, {"peak": 1e300}, {"seconds": math.inf}, {"backward": -1e20},
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_record_that_makes_no_sense_is_counted_and_passed_over(tmp_path, wrong):
    folder = written(tmp_path, 5)
    file = steps_path(folder.events_of(0))
    data = bytearray(file.read_bytes())
    at = len(header(0))
    rows = numpy.frombuffer(data, dtype=list(COLUMNS), offset=at).copy()
    for name, value in wrong.items():
        rows[name][2] = value
    file.write_bytes(bytes(data[:at]) + rows.tobytes())
    state = opened(folder)
    assert list(state.ranks[0].steps.step) == [1, 2, 4, 5] and state.broken == 1


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
    steps_path(folder.events_of(0)).write_bytes(header + b"\0" * 200)
    follower = Follower(folder)
    follower.poll()
    follower.poll()
    assert (
        follower.state.broken == 1
        and len(follower.state.ranks[0].steps) == 0
        and follower.state.ranks[0].exit_code == 0
    )


def test_a_step_file_that_is_cut_short_or_missing_is_noticed(tmp_path):
    for number, keep in enumerate((len(header(0)) + 2 * RECORD, None)):
        folder = written(tmp_path / str(number), 5)
        file = steps_path(folder.events_of(0))
        file.unlink() if keep is None else file.write_bytes(file.read_bytes()[:keep])
        state = opened(folder)
        assert (state.broken, len(state.ranks[0].steps)) == (1, 0 if keep is None else 2)


def test_a_step_file_that_is_no_regular_file_is_not_read(tmp_path):
    folder = written(tmp_path, 3)
    file = steps_path(folder.events_of(0))
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
    steps_path(path).write_bytes(
        json.dumps({"kind": "steps", "rank": 0, "columns": columns}).encode() + b"\n" + rows.tobytes()
    )
    path.touch()
    assert [event.loss for event in one_by_one(Reader(path).poll())] == [0.5, None]
    state = RunState()
    for event in Reader(path).poll():
        apply(state, event)
    assert (
        list(state.ranks[0].steps.step) == [1, 2]
        and math.isnan(state.ranks[0].steps.samples[0])
        and state.ranks[0].not_finite is None
    )
