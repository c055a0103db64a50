"""Long runs: the cost of a step on disk and in memory."""

from __future__ import annotations

import json
import math
import sys
import tracemalloc
from collections import Counter

import numpy
import pytest
from folded import apply
from long_runs import RECORD, opened, written

from labkit.analysis import metrics
from labkit.analysis.summary import summarise
from labkit.figures import CHARTS
from labkit.launch.watch import interval
from labkit.probe.journal import Journal
from labkit.record.folder import RunFolder
from labkit.record.state import RunState
from labkit.record.writer import header, steps_path

pytestmark = pytest.mark.thorough

LONG = 1 << 15  # steps, of which the oldest are no longer in memory


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs"), 3 * LONG)


def test_a_step_takes_88_bytes_and_the_rest_of_a_run_does_not_grow(long):
    path = long.events_of(0)
    records = 3 * LONG
    assert steps_path(path).stat().st_size == len(header(0)) + RECORD * records
    assert path.stat().st_size < 1000
    assert RECORD * 8 * 100_000 < 75e6


def test_numpy_reads_the_file_as_the_docstring_says(long):
    with open(steps_path(long.events_of(0)), "rb") as file:
        header = json.loads(file.readline())
        read = numpy.fromfile(file, dtype=[tuple(column) for column in header["columns"]])
    assert len(read) == 3 * LONG and read["step"][-1] == 3 * LONG and read["losses"].all()


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
    assert calls_of(lambda: summarise(opened(long))) < 3 * LONG, "with one call per step there would be more"


def test_drawing_costs_the_points_of_a_line_and_not_the_steps(long, tmp_path):
    states = opened(written(tmp_path, 2 * LONG)), opened(long)
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
            assert len(state.ranks[0].steps) % LONG == 0
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    opened(long)  # what is imported late is not what is counted
    shorter = held(written(tmp_path, 2 * LONG))
    assert held(long) < shorter + LONG * 8, "of further steps not even one column stays"


def test_a_long_run_can_be_read_when_its_folder_is_gone(tmp_path):
    folder = written(tmp_path, 2 * LONG)
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
        slice(LONG - 3, LONG + 3),
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
        apply(state, {"kind": "metric", "t": float(step), "rank": 0, "name": "lr", "value": step, "step": step})
        apply(state, {"kind": "report", "t": float(step), "rank": 0, "values": {f"value {step}": step, "last": step}})
    apply(state, {"kind": "metric", "t": 1.0, "rank": 0, "name": "accuracy", "value": 0.5, "step": 1})
    assert len(state.metrics) == 1000 and (state.metric("lr"), state.metric("accuracy"), state.metric("other")) == (
        4999,
        0.5,
        None,
    )
    assert len(state.reports[0]) == 1000 and state.reports[0]["last"] == 4999
