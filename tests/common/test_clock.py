"""Durations are those of the monotonic clock: a system clock that is set while a run lasts changes none of them."""

from __future__ import annotations

import time

import pytest
from diagnosed import fold, spec, start, status, steps
from folded import apply

from labkit.analysis.metrics import pace, seconds_left
from labkit.analysis.summary import summarise
from labkit.figures.charts import memory
from labkit.frontends.terminal import _figures_of_run
from labkit.launch import watch
from labkit.probe.traffic import since_then
from labkit.record import clock
from labkit.record.documents import Durations
from labkit.record.folder import RunFolder
from labkit.record.reader import Reader
from labkit.record.state import RunState, elapsed
from labkit.record.writer import Writer

HOUR = 3600


@pytest.fixture
def system_clock(monkeypatch):
    """A function that sets the system clock, as this process sees it, by so many seconds."""
    shift, seconds, nanoseconds = [0.0], time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + shift[0])
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + round(shift[0] * 1e9))
    monkeypatch.setenv(clock.VARIABLE, clock.reference())
    clock._offset.cache_clear()
    yield lambda by: shift.__setitem__(0, shift[0] + by)
    clock._offset.cache_clear()


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_no_duration_of_a_run_changes_when_the_clock_is_set(tmp_path, system_clock, by):
    """Two ranks of four steps; the clock is set after the second."""
    started = clock.now()
    writers = [Writer(tmp_path / f"rank{rank}.jsonl", rank) for rank in (0, 1)]
    state = fold(spec(), {"kind": "status", "status": {"state": "running", "started": started}})
    for writer in writers:
        writer.write("start", pid=1, host="here", device="cpu", attempt=0)
    for step in range(1, 5):
        for writer in writers:
            writer.write(
                "step", step=step, loss=1.0, samples=8, seconds={"step": 0.01}, memory={"allocated": 1, "peak": 2}
            )
        if step == 2:
            system_clock(by)
    for rank in (0, 1):
        for event in Reader(tmp_path / f"rank{rank}.jsonl").poll():
            apply(state, event)
    apply(state, {"kind": "status", "status": {"state": "finished", "started": started, "ended": clock.now()}})
    seconds = summarise(state).seconds
    assert 0 <= seconds.to_first_step <= seconds.total < 60
    for rank in state.ranks.values():
        assert all(0 <= later - earlier < 60 for earlier, later in zip(rank.steps.t, rank.steps.t[1:]))
    assert 0 <= pace(state) < 60 and 0 <= seconds_left(state) < HOUR
    assert any(text.endswith("s in total") and not text.startswith("-") for text in _figures_of_run(state))
    assert all(0 <= x < 60 for line in memory(state).lines for x in (t - line.x_zero for t in line.x))


def test_a_failure_that_torchrun_stamped_is_put_on_the_same_clock(tmp_path, system_clock):
    """Its report has the system clock's time: after the clock was set, the first failure is still the first."""
    folder = RunFolder.create("two", tmp_path)
    began = clock.now()
    system_clock(-HOUR)
    stamped = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(time.time()))
    folder.launcher_log.write_text(
        f"  time      : {stamped}\n  host      : here\n  rank      : 1 (local_rank: 1)\n  exitcode  : 3 (pid: 7)\n"
    )
    assert abs(watch.failures(folder)[1].t - began) < 60


def test_every_process_of_a_run_has_one_clock_and_other_machines_their_own(monkeypatch):
    offset = time.time() - time.monotonic()
    for value, expected in (
        (f"{offset - HOUR}@{clock._machine()}", -HOUR),
        (f"{offset - HOUR}@another-boot", 0),
        (f"much@{clock._machine()}", 0),
        ("", 0),
    ):
        monkeypatch.setenv(clock.VARIABLE, value)
        clock._offset.cache_clear()
        assert clock.shift() == pytest.approx(expected, abs=5)
        assert clock.now(value) - time.time() == pytest.approx(expected, abs=5)
    clock._offset.cache_clear()


def entry(record: int, created: float) -> dict:
    return {
        "record_id": record,
        "time_created_ns": round(created * 1e9),
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "process_group": ["0", "default_pg"],
    }


@pytest.mark.parametrize(
    ("times", "since", "found"),
    [
        ([1000, 1001, 1002, 1003], 1002, [2, 3]),
        ([9000, 9001, 5400, 5401], 5400, [2, 3]),  # set back by an hour before the step
        ([1000, 1001, 4602, 4603], 4602, [2, 3]),  # set forward
        ([9000, 9001, 5400, 5401], 5401, [3]),
        ([9000, 9001], 5400, []),  # nothing since the clock was set
    ],
)
def test_the_collectives_of_a_step_are_counted_whatever_the_clock_was_set_to(times, since, found):
    entries = [entry(number, created) for number, created in enumerate(times)]
    told = since_then(entries[::-1], since * 10**9, now=5402 * 10**9)
    assert [one["record_id"] for one in told] == found


def test_a_recorder_that_has_dropped_the_beginning_of_a_step_is_not_read():
    entries = [entry(number, 1000 + number) for number in range(7, 10)]
    assert since_then(entries, 1000 * 10**9) is None
    assert [one["record_id"] for one in since_then(entries, 1008 * 10**9)] == [8, 9]


def test_a_step_in_which_the_clock_was_set_is_noticed(system_clock):
    moment = clock.SystemMoment.now()
    assert not moment.clock_was_set() and moment.seconds(moment.ns) == pytest.approx(clock.now(), abs=5)
    system_clock(-HOUR)
    assert moment.clock_was_set()
    assert moment.seconds(moment.ns + 10**9) == pytest.approx(clock.now() + 1, abs=5)


def test_a_recording_of_an_older_version_has_no_negative_duration():
    """Its times are the system clock's, which was set back: what cannot be known is not shown."""
    backwards = [event | {"t": event["t"] + HOUR * (event["step"] <= 3)} for event in steps(0, 8)]
    state = fold(
        spec("single", 1),
        start(0),
        backwards,
        {"kind": "status", "status": {"state": "finished", "started": 5.0, "ended": 1.0}},
    )
    assert state.seconds is None and summarise(state).seconds.total is None
    assert pace(state) is None and seconds_left(state) is None
    assert elapsed(5.0, None) is None and elapsed(None, 5.0) is None and elapsed(5.0, 6.0) == 1.0
    assert summarise(RunState()).seconds == Durations(total=None, to_first_step=None)
    assert fold(status("finished")).seconds is None
