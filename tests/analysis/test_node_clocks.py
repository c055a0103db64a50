"""Clocks of several hosts, set by the collectives that their ranks have in common."""

from __future__ import annotations

import random

import pytest
from folded import apply
from profiled_steps import state_of, timeline_event

from labkit import figures
from labkit.analysis.profiled import clocks, trace


def on_hosts(ahead: dict[str, float], groups: dict[int, list[list[int]]], noise: float = 0.0):
    """One rank per host, whose clock is `ahead`, and five profiled steps with a collective in each group of a rank."""
    random.seed(0)
    state = state_of(nproc=len(ahead))
    for rank, (host, seconds) in enumerate(ahead.items()):
        apply(state, {"kind": "start", "rank": rank, "t": 10_000.0, "host": host})
        for step in range(8, 13):
            ends = {str(ranks): 0.03 + random.uniform(-noise, noise) for ranks in groups[rank]}
            comm = [
                ["all_reduce", end - 0.004 * (rank + 1), end, 8, f"group{ranks}", eval(ranks), step]
                for ranks, end in ends.items()
            ]
            apply(state, timeline_event(rank, step, t0=10_000.0 + step + seconds, comm=comm))
    return state


@pytest.mark.parametrize("apart", [0.0, 0.015, -7200.0])
def test_the_clock_of_each_host_is_found_and_timelines_are_set_by_it(apart):
    state = on_hosts({"a": 0.0, "b": apart}, {0: [[0, 1]], 1: [[0, 1]]}, noise=1e-4)
    found = clocks(state)["b"]
    assert abs(found.seconds - apart) <= found.uncertainty
    assert found.uncertainty == pytest.approx(0.002, abs=1e-4)  # half of the shorter collective
    assert found.collectives == 5
    chart = figures.chart("timeline", state)
    forwards = {lane: start for spans in chart.spans if spans.name == "forward" for lane, start, *_ in spans.stretches}
    assert forwards[0] == pytest.approx(forwards[2], abs=0.5)
    assert f"clock of b corrected by {-1000 * apart:+.2f}"[:26] in chart.note and "± 2.0" in chart.note
    begins = {event["pid"]: event["ts"] for event in trace(state)["traceEvents"] if event.get("name") == "data"}
    assert begins[0] == pytest.approx(begins[1], abs=500)


def test_a_host_without_a_common_collective_is_set_through_another_host():
    groups = {0: [[0, 1]], 1: [[0, 1], [1, 2]], 2: [[1, 2]], 3: []}
    found = clocks(on_hosts({"a": 0.0, "b": 3.0, "c": -2.0, "d": 50.0}, groups))
    assert {host: one.seconds for host, one in found.items()} == pytest.approx({"b": 3.0, "c": -2.0})
    assert found["c"].uncertainty > found["b"].uncertainty


def test_noise_is_part_of_the_uncertainty():
    found = clocks(on_hosts({"a": 0.0, "b": 1.0}, {0: [[0, 1]], 1: [[0, 1]]}, noise=0.02))["b"]
    assert found.uncertainty > 0.003 and abs(found.seconds - 1.0) < 3 * found.uncertainty


def test_one_host_has_one_clock():
    assert clocks(on_hosts({"a": 0.0}, {0: [[0]]})) == {}
