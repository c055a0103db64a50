"""The trace of profiled steps in Chrome's format."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from profiled_steps import state_of, step_event, timeline_event

from labkit.analysis.profiled import trace, write_trace

HOSTILE = '</text><script>alert("1")</script>&\'"'


def as_rows(state):
    rows = defaultdict(list)
    for event in trace(state)["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return rows


def test_a_trace_has_a_process_for_each_rank_and_microseconds():
    made = trace(
        state_of(timeline_event(0, t0=1000.1), timeline_event(1, t0=1000.105), timeline_event(0, step=50, t0=1003.1))
    )
    names = {event["pid"]: event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert {event["ph"] for event in made["traceEvents"]} == {"M", "X"}
    spans = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert all(isinstance(event[key], int) for event in spans for key in ("pid", "tid", "ts", "dur"))
    forward = {
        (event["pid"], event["args"]["step"]): (event["ts"], event["dur"])
        for event in spans
        if event["name"] == "forward"
    }
    assert forward == {(0, 8): (2000, 8000), (1, 8): (7000, 8000), (0, 50): (3_002_000, 8000)}
    sent = next(event for event in spans if event["name"] == "all_reduce")
    assert sent["args"] == {"step": 8, "bytes": 4096, "group": "default_pg", "ranks": [0, 1], "number": 7}


@pytest.mark.parametrize("t0", [1000.0, 1795263871.1234567, 0.3])
def test_spans_of_one_row_nest(t0):
    comm = [["all_reduce", at / 1000, (at + 7) / 1000, 8, "default_pg", [0, 1], at + 1] for at in range(1, 30, 3)]
    parts = [["forward", number / 1e5, (number + 1) / 1e5] for number in range(4000)]
    marks = [["outer", 0.0, 0.04], ["inner", 0.010001, 0.020003], ["next", 0.020003, 0.04]]
    rows = as_rows(
        state_of(
            *(timeline_event(rank, t0=t0 + rank / 3000, comm=comm, phases=parts, marks=marks) for rank in range(2))
        )
    )
    for spans in rows.values():
        open_: list[int] = []
        for start, end, _ in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1]
            open_.append(end)


def test_a_trace_is_written_as_json(tmp_path):
    state = state_of(timeline_event(0, comm=[[HOSTILE, 0.02, 0.03, None, None, None, None]]))
    write_trace(state, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace(state)


def test_a_run_without_samples_has_an_empty_trace():
    assert all(event["ph"] == "M" for event in trace(state_of(step_event(0, 1)))["traceEvents"])
