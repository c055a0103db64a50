"""Pictures of sharding: the shards of all ranks are the whole, and the modelled FSDP step gathers before it
computes."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from labkit.course import pictures
from labkit.course.pictures.sharding import FORWARD, GATHER, STAGES, share, turns, whole

OWNERS = ("parameters", "gradients", "optimizer state")


def held(figure):
    """By stage, owner and rank, the filled interval of a column, as fractions of its height."""
    feet = {name: middle - 0.5 for name, middle in zip(STAGES, figure.layout.yaxis.tickvals)}
    found = {}
    for trace in figure.data[1:]:
        owner = trace.name.partition(" (")[0]
        for base, height, words in zip(trace.base, trace.y, trace.text):
            stage, rank = words.partition(":")[0].split(", rank ")
            found[stage, owner, int(rank)] = (base - feet[stage], base - feet[stage] + height)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 20])
def test_shards_of_all_ranks_are_the_whole_and_overlap_nowhere(ranks):
    shards = held(pictures.sharding.who_holds_what(ranks))
    assert len(shards) == 4 * 3 * ranks
    for stage, name in enumerate(STAGES):
        for owner in OWNERS:
            those = sorted(shards[name, owner, rank] for rank in range(ranks))
            if stage < {"optimizer state": 1, "gradients": 2, "parameters": 3}[owner]:
                assert those == [pytest.approx((0, 1))] * ranks
                continue
            assert [start for start, _ in those] == pytest.approx([rank / ranks for rank in range(ranks)])
            assert [end for _, end in those] == pytest.approx([(rank + 1) / ranks for rank in range(ranks)])


def test_columns_are_as_wide_as_their_bytes():
    for bytes_ in ((4, 4, 8), (2, 2, 12)):
        figure = pictures.sharding.who_holds_what(2, bytes_)
        widths = [trace.width[0] for trace in figure.data[1:]]
        assert [width / widths[0] for width in widths] == pytest.approx([size / bytes_[0] for size in bytes_])
        assert [f"({size} bytes per parameter)" in trace.name for size, trace in zip(bytes_, figure.data[1:])] == [
            True
        ] * 3


def test_the_sum_of_a_stage_is_that_of_the_paper():
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB in 16 bits."""
    figure = pictures.sharding.bytes_by_ranks(7.5e9, (64,), (2, 2, 12))
    total = defaultdict(float)
    for trace in figure.data:
        for stage, value in zip(trace.x[0], trace.y):
            total[stage] += value
    assert [round(total[stage], 1) for stage in STAGES] == [120.0, 31.4, 16.6, 1.9]
    assert "7.5B parameters" in figure.layout.title.text and "GB" in figure.layout.yaxis.title.text
    ticks = pictures.sharding.who_holds_what(4).layout.yaxis.ticktext
    assert [tick.rpartition("= ")[2] for tick in ticks] == ["16 P bytes", "10 P bytes", "7 P bytes", "4 P bytes"]


def test_bytes_decrease_with_the_ranks_only_for_sharded_states():
    figure = pictures.sharding.bytes_by_ranks(1e6, (1, 2, 4), limit=8e6)
    by_owner = {trace.name: dict(zip(zip(*trace.x), trace.y)) for trace in figure.data}
    for owner, values in by_owner.items():
        for stage, name in enumerate(STAGES):
            part = share("optimizer" if owner.startswith("optimizer") else owner, stage, 4)
            assert values[name, "4"] == pytest.approx(part * values[name, "1"])
    assert figure.layout.shapes[0].y0 == 8 and "8 MB" in figure.layout.annotations[0].text


@pytest.mark.parametrize("units", [1, 2, 7])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_step_gathers_before_it_computes_and_scatters_after(units, reshard, prefetch):
    step = turns(units, reshard, prefetch)
    assert [turn.unit for turn in step] == [*range(units), *reversed(range(units))]
    assert sum(turn.gather is not None for turn in step) == (2 * units if reshard else units)
    for before, turn in pairwise(step):
        assert before.compute[1] <= turn.compute[0]
    intervals = whole(step, reshard)
    for turn in step:
        if turn.gather:
            assert turn.gather[1] <= turn.compute[0]
        assert (turn.scatter is not None) == (turn.phase == "backward")
        if turn.scatter:
            assert turn.compute[1] <= turn.scatter[0]
        start, end = turn.compute
        assert sum(unit == turn.unit and begin <= start and end <= stop for unit, begin, stop in intervals) == 1
    for unit in range(units):
        own = sorted((start, stop) for which, start, stop in intervals if which == unit)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(own)), "whole twice at the same time"
    moments = [start for _, start, _ in intervals]
    most = max(sum(start <= moment < stop for _, start, stop in intervals) for moment in moments)
    assert most == (min(units, prefetch + 1) if reshard else units)


def test_prefetching_overlaps_the_all_gathers():
    plain, ahead = turns(6, prefetch=0), turns(6, prefetch=1)
    assert plain[1].compute[0] - plain[0].compute[1] == GATHER
    assert ahead[1].compute[0] == ahead[0].compute[1]
    assert ahead[-1].compute[1] < plain[-1].compute[1]
    assert ahead[0].compute == (GATHER, GATHER + FORWARD)


def curves(figure):
    return {trace.name: trace for trace in figure.data if trace.type == "scatter"}


@pytest.mark.parametrize(
    "units, ranks, reshard, prefetch, most",
    [(4, 4, True, 0, 0.5), (4, 4, True, 1, 0.75), (4, 2, False, 1, 1.5), (1, 4, True, 1, 1.25)],
)
def test_the_curve_is_own_shards_plus_gathered_parameters(units, ranks, reshard, prefetch, most):
    figure = pictures.sharding.gather_compute_drop(units, ranks, reshard, prefetch)
    held = curves(figure)
    assert set(held["own shards"].y) == {1 / ranks}
    assert held["gathered"].y[-1] == 0, "at the end all gathered parameters are freed"
    assert max(own + more for own, more in zip(held["own shards"].y, held["gathered"].y)) == pytest.approx(most)
    assert f"at most {most:.0%} of the parameters in memory (modelled)" in figure.layout.title.text
    lanes = figure.layout.yaxis.ticktext
    assert lanes == ("all-gather", "compute", "reduce-scatter", *(f"unit {number + 1}" for number in range(units)))
    own = next(trace for trace in figure.data if trace.name == "own shard")
    assert own.width == pytest.approx(0.8 / ranks)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: pictures.sharding.who_holds_what(0), "ranks must be an integer from 1 to (64|65536), got 0"),
        (
            lambda: pictures.sharding.bytes_by_ranks(ranks=(4, 0)),
            "ranks must be an integer from 1 to (64|65536), got 0",
        ),
        (lambda: pictures.sharding.gather_compute_drop(units=0), "units must be an integer from 1 to 64, got 0"),
        (lambda: pictures.sharding.gather_compute_drop(ranks=-1), "ranks must be an integer from 1 to 64, got -1"),
        (
            lambda: pictures.sharding.gather_compute_drop(prefetch=-1),
            "prefetch must be an integer from 0 to 64, got -1",
        ),
    ],
)
def test_invalid_numbers_are_rejected(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_pictures_have_no_background():
    for figure in (
        pictures.sharding.who_holds_what(),
        pictures.sharding.bytes_by_ranks(),
        pictures.sharding.gather_compute_drop(),
    ):
        assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
