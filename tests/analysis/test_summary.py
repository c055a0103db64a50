"""The summary of a run: its throughput, its shape, and what it says about failures and missing data."""

from __future__ import annotations

import pytest
from folded import apply, error, fold, spec, start, status, step

from labkit.analysis.metrics import seconds_left, throughput
from labkit.analysis.summary import summarise
from labkit.plan.spec import Spec
from labkit.record.documents import Durations, plain
from labkit.record.state import RunState
from labkit.record.writer import OWNERS, PHASES


def test_throughput_leaves_out_the_first_step_and_adds_the_ranks():
    slow = {"step": 100.0}
    state = fold(spec(), start(0), start(1))
    for rank in (0, 1):
        apply(state, step(rank, 1, seconds=slow))
        for number in (2, 3, 4):
            apply(state, step(rank, number))
    assert throughput(state) == throughput(state, now=True) == pytest.approx(2 * 8 / 0.5)
    for rank in (0, 1):
        apply(state, start(rank, attempt=1))
        apply(state, step(rank, 1, seconds=slow))
        apply(state, step(rank, 2))
    assert throughput(state) == pytest.approx(2 * 8 / 0.5)  # the first step of the new attempt is left out as well


def test_ranks_that_see_the_same_samples_count_them_once(monkeypatch):
    events = spec(), start(0), start(1), *(step(rank, number) for rank in (0, 1) for number in (1, 2, 3))
    assert fold(*events).replicas == 1
    monkeypatch.setattr(Spec, "data_ranks", 1)
    assert fold(*events).replicas == 2
    assert throughput(fold(*events)) == pytest.approx(8 / 0.5)


def test_nothing_is_known_of_a_run_without_steps():
    state = fold(spec())
    assert throughput(state) is None and seconds_left(state) is None and state.step == 0 and state.total_steps == 10


def test_the_shape_of_the_summary():
    state = fold(
        spec(),
        status("finished", started=0.5, ended=10.5, restarts=1),
        *(start(rank) for rank in (0, 1)),
        *(step(rank, number) for rank in (0, 1) for number in (1, 2, 3)),
        {"kind": "memory", "t": 1.0, "rank": 0, "owners": dict.fromkeys(OWNERS, 4) | {"of another time": 1}},
        {"kind": "metric", "t": 1.0, "rank": 0, "name": "accuracy", "value": 0.9, "step": 3},
        {"kind": "end", "t": 9.0, "rank": 0, "exit_code": 0},
    )
    summary = summarise(state, "a-run")
    expected = {
        "run": "a-run",
        "state": "finished",
        "strategy": "ddp",
        "workload": "cnn",
        "world_size": 2,
        "device": "cpu",
        "steps": 3,
    }
    assert (
        plain(summary).items()
        >= (expected | {"restarts": 1, "accuracy": 0.9, "failure": None, "broken_lines": 0, "findings": []}).items()
    )
    assert summary.seconds == Durations(total=10.0, to_first_step=0.5)
    assert summary.samples_per_second == 32.0 and summary.loss == pytest.approx(1 / 3, abs=1e-6)
    first, second = summary.ranks
    assert (first.rank, first.exit_code, first.peak_memory_bytes) == (0, 0, 153)
    assert second.exit_code is None and second.memory_bytes == {}
    assert set(first.memory_bytes) == set(OWNERS)
    assert first.step_seconds_median == 0.5 and set(first.phase_seconds) == set(PHASES)
    assert first.phase_seconds["backward"] == 0.2 and first.comm_bytes_per_step is None


def test_a_summary_of_nothing_has_the_same_shape():
    empty, full = summarise(RunState()), summarise(fold(spec(), start(0), start(1), step(0, 1), step(1, 1)))
    first, second = plain(empty), plain(full)
    assert first.keys() == second.keys() and first["ranks"][0].keys() == second["ranks"][0].keys()
    assert empty.state == "ready" and empty.loss is None and empty.samples_per_second is None


def test_a_failed_run_has_its_finding():
    summary = summarise(fold(spec(), status("failed"), start(0), start(1), error(1, 2.0)))
    (finding,) = summary.findings
    assert finding.name == "first_failure" and finding.ranks[0] == 1
    assert summary.failure.rank == 1 and summary.ranks[1].exit_code == 1


def test_what_was_not_measured_is_said():
    lost = {
        "kind": "probe_error",
        "t": 3.0,
        "rank": 1,
        "part": "memory",
        "type": "KeyError",
        "message": "x",
        "traceback": "",
    }
    state = fold(spec(), start(0), start(1), lost)
    state.broken = 1  # as whoever reads the events has counted
    names = {finding.name: finding for finding in summarise(state).findings}
    assert set(names) == {"not_watched", "not_readable"}
    assert names["not_watched"].ranks == [1] and "memory" in names["not_watched"].title
    assert names["not_readable"].title.startswith("1 line of")
    assert summarise(fold(spec(), start(0), start(1))).findings == []
