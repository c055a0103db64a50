"""Failures of a cluster: goodput against a simulation, the best interval, and the pictures."""

from __future__ import annotations

import random

import pytest

from labkit.analysis.theory.failures import (
    PUBLISHED,
    best_interval,
    first_order_cost,
    first_order_interval,
    goodput,
)
from labkit.course.pictures.launching import intervals, recovery


def simulated(interval, saving, restart, between, intervals=20_000):
    """The goodput of a job that is simulated second by second of its failures."""
    drawn, spent = random.Random(0), 0.0
    until = drawn.expovariate(1 / between)  # time to the next failure
    for _ in range(intervals):
        needs = interval + saving
        while until < needs:
            spent += until
            needs = restart + interval + saving
            until = drawn.expovariate(1 / between)
        spent += needs
        until -= needs
    return interval * intervals / spent


@pytest.mark.parametrize("case", [(600, 30, 300, 10_000), (60, 10, 60, 300), (1000, 5, 0, 1000)])
def test_goodput_is_that_of_a_simulation(case):
    assert goodput(*case) == pytest.approx(simulated(*case), rel=0.02)


@pytest.mark.parametrize(("saving", "between"), [(30, 10_000), (5, 3600), (60, 600)])
def test_no_interval_is_better_than_the_best_one(saving, between):
    best = best_interval(saving, between)
    most = goodput(best, saving, 100, between)
    assert all(goodput(best * factor, saving, 100, between) <= most * 1.001 for factor in (0.5, 0.8, 1.25, 2))
    young = first_order_interval(saving, between)
    assert all(
        first_order_cost(young * factor, saving, between) > first_order_cost(young, saving, between)
        for factor in (0.9, 1.1)
    )


def test_a_job_that_never_gets_through_has_no_goodput():
    assert goodput(1e9, 30, 300, 1000) == 0.0 and best_interval(100, 10) == 10


def test_published_interruptions_per_day():
    llama = PUBLISHED["llama3"]
    assert 86_400 / llama.between(16_384) == pytest.approx(466 / 54)
    assert llama.between(1024) == pytest.approx(16 * llama.between(16_384))


def test_the_picture_marks_the_top_of_each_curve():
    figure = intervals(30.0, 300.0, [1024, 16_384])
    assert len(figure.data) == 4 and "modelled" in figure.layout.title.text
    for line, peak in zip(figure.data[::2], figure.data[1::2]):
        assert max(line.y) == pytest.approx(peak.y[0], rel=0.01)


def test_only_the_killed_replica_starts_again_without_a_restart():
    words = recovery(3).data[0].text
    assert words.count("start") == 3 + 1 and words.count("computed again") == 3 and words.count("heal: receives") == 1
    with pytest.raises(ValueError, match="replicas must be 2 to 6"):
        recovery(1)
