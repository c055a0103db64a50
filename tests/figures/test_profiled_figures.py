"""Charts of profiled steps: ranks on one time axis, missing data is reported, areas and bars add up, names
stay text."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest
from folded import applied, apply
from profiled_steps import MIB, memory_event, state_of, step_event, timeline_event

from labkit import figures
from labkit.analysis import profiled
from labkit.figures.charts import memory_of_step, timeline
from labkit.figures.charts import phases as phases_chart
from labkit.record.events import Timeline
from labkit.record.writer import OWNERS, PHASES

SVG = "{http://www.w3.org/2000/svg}"
EMPTY = ("timeline", "memory_by_owner", "memory_of_step")
HOSTILE = '</text><script>alert("1")</script>&\'"'


def stretches(chart):
    return {(spans.name, lane): (start, end) for spans in chart.spans for lane, start, end, _ in spans.stretches}


# ---- timeline


def timelines(*events: dict) -> dict[int, Timeline]:
    return {event["rank"]: applied(event) for event in events}


def test_ranks_stand_on_one_axis_as_their_clocks_say():
    late = [["all_reduce", 0.015, 0.025, 4096, "default_pg", [0, 1], 7]]
    chart = figures.chart("timeline", state_of(timeline_event(0), timeline_event(1, t0=1000.005, comm=late)))
    assert chart.y.categories == ("rank 0", "comm 0", "rank 1", "comm 1")
    found = stretches(chart)
    assert found["forward", 0] == pytest.approx((2, 10))
    assert found["forward", 2] == pytest.approx((7, 15))
    assert found["all_reduce", 1] == pytest.approx((20, 30))
    assert found["all_reduce", 3] == pytest.approx((20, 30))
    assert chart.x.end == pytest.approx(45)
    assert "disagree" not in chart.note
    assert "60% of communication overlapped" in chart.note
    assert "gloo" in chart.note


@pytest.mark.parametrize("apart", [0.02, 3600.0, -3600.0])
def test_clocks_that_disagree_are_set_by_what_ranks_have_in_common_and_said(apart):
    late = [["all_reduce", 0.015, 0.025, 4096, "default_pg", [0, 1], 7]]
    chart = figures.chart("timeline", state_of(timeline_event(0, t0=1e6), timeline_event(1, t0=1e6 + apart, comm=late)))
    found = stretches(chart)
    assert found["all_reduce", 1] == pytest.approx(found["all_reduce", 3], abs=1e-3)
    assert found["forward", 2][0] - found["forward", 0][0] == pytest.approx(5, abs=1e-3)
    assert "clocks disagree" in chart.note


def test_a_collective_of_other_ranks_under_the_same_name_sets_no_clock():
    ours, theirs = (
        [["all_reduce", start, start + 0.002, 8, "mesh_tp", ranks, 7]]
        for start, ranks in ((0.005, [0, 1]), (0.03, [2, 3]))
    )
    shifts, how = profiled.aligned(timelines(timeline_event(0, comm=ours), timeline_event(2, t0=1000.01, comm=theirs)))
    assert not how
    assert shifts == pytest.approx({0: 0.0, 2: 0.01})


def test_ranks_far_apart_without_a_common_collective_begin_together_and_it_is_said():
    assert profiled.aligned(timelines(timeline_event(0, comm=[]), timeline_event(1, t0=1600.0, comm=[]))) == (
        {0: 0.0, 1: 0.0},
        "not in step, and without a common collective: each rank from its own start",
    )


def test_a_broadcast_may_end_at_its_root_before_others_begin_it():
    early, late = ([["broadcast", start, start + 0.001, 8, "default_pg", [0, 1], 7]] for start in (0.005, 0.02))
    assert profiled.aligned(timelines(timeline_event(0, comm=early), timeline_event(1, comm=late))) == (
        {0: 0.0, 1: 0.0},
        "",
    )


def test_the_newest_step_of_all_ranks_is_shown_and_any_that_is_asked_for():
    state = state_of(timeline_event(0), timeline_event(1), timeline_event(0, step=50))
    assert figures.chart("timeline", state).title == "Step 8"
    assert timeline(state, 50).title == "Step 50"
    assert profiled.profiled_steps(state) == [8, 50]


def test_ranks_without_a_timeline_are_counted():
    assert "no timeline of 1 rank" in figures.chart("timeline", state_of(timeline_event(0))).note
    assert "no timeline of 3 ranks" in figures.chart("timeline", state_of(timeline_event(2), nproc=4)).note
    assert "no timeline" not in figures.chart("timeline", state_of(timeline_event(0), timeline_event(1))).note


def test_what_reaches_beyond_the_step_is_drawn_within_it():
    chart = figures.chart(
        "timeline", state_of(timeline_event(0, comm=[["all_reduce", -0.01, 0.06, 8, None, None, None]]), nproc=1)
    )
    assert stretches(chart)["all_reduce", 1] == pytest.approx((0, 40))
    assert profiled.overlap(applied(timeline_event(0, comm=[["all_reduce", -0.01, 0.06, 8]]))) == pytest.approx(
        (0.04, 0.004)
    )


def test_stretches_say_what_they_are():
    chart = figures.chart(
        "timeline", state_of(timeline_event(0, comm=[["send", 0.0025, 0.0028, 2048, "pipe", [0, 1], 3]]), nproc=1)
    )
    words = next(words for spans in chart.spans if spans.name == "send" for *_, words in spans.stretches)
    assert words == "rank 0: send 3 of pipe, ranks 0, 1 FSDP::pre_forward (0), 2.0 KiB, 0.30 ms"


def test_micro_batches_are_numbered():
    parts = [["forward", 0.0, 0.01], ["forward", 0.01, 0.02], ["backward", 0.02, 0.04]]
    chart = figures.chart("timeline", state_of(timeline_event(0, phases=parts, busy=[[0.0, 0.04]]), nproc=1))
    words = [words for spans in chart.spans if spans.name == "forward" for *_, words in spans.stretches]
    assert [one.split(",")[0] for one in words] == ["rank 0: forward 1 of 2", "rank 0: forward 2 of 2"]


@pytest.mark.thorough
def test_eight_ranks_of_many_stretches_make_a_bounded_picture():
    spread = [number / 600 * 0.04 for number in range(600)]
    comm = [
        ["all_reduce", at, at + 0.00005, 1024, "default_pg", list(range(8)), number + 1]
        for number, at in enumerate(spread)
    ]
    much = {
        "comm": comm,
        "busy": [[at + 0.00002, at + 0.00006] for at in spread],
        "marks": [[f"FSDP::pre_forward ({at})", at, at] for at in spread],
    }
    state = state_of(*(timeline_event(rank, step, **much) for rank in range(8) for step in range(8, 28)), nproc=8)
    assert len(figures.figure("timeline", state).to_json()) < 2_000_000
    assert len(figures.svg("timeline", state)) < 4_000_000


# ---- memory


def test_areas_lie_on_each_other_up_to_the_peak():
    owners = {"parameters": [4 * MIB] * 3, "activations": [0, 6 * MIB, 2 * MIB], "other": [MIB, 0, MIB]}
    state = state_of(memory_event(0, {"parameters": [MIB] * 3}), memory_event(1, owners))
    chart = figures.chart("memory_of_step", state)
    assert [line.name for line in chart.lines] == ["parameters", "activations", "other"]
    assert "rank 1, step 2" in chart.note
    drawn = chart.drawn()
    assert chart.stack_height(drawn.points) == pytest.approx(10)
    assert all(xs == pytest.approx([0, 10, 20, 40]) for xs, _ in drawn.points)
    assert [sum(row) for row in zip(*(ys for _, ys in drawn.points))] == pytest.approx([5, 10, 7, 7])
    assert chart.bands[-1][:3] == ("backward", pytest.approx(10), pytest.approx(40))
    assert "rank 0" in memory_of_step(state, 0).note


def test_the_predicted_sum_is_a_line_whose_phases_last_as_long_as_the_measured_ones():
    owners = {"parameters": [4 * MIB] * 3, "activations": [0, 6 * MIB, 2 * MIB]}
    state = state_of(memory_event(0, owners))
    step = {"times": [0.0, 2.0, 6.0], "seconds": 8.0, "phases": [("forward", 0.0, 4.0), ("backward", 4.0, 8.0)]}
    step |= {
        "owners": {"parameters": [MIB] * 3, "activations": [0, 3 * MIB, 11 * MIB]},
        "peak": 12 * MIB,
        "at_peak": {},
    }
    plan = {
        "spec": {},
        "method": "simulated",
        "ranks": [],
        "classes": [{"ranks": [0, 1], "step": step, "ops": {}, "calls": []}],
    }
    apply(state, {"kind": "prediction", "prediction": plan})
    chart = figures.chart("memory_of_step", state)
    assert [line.name for line in chart.lines] == ["parameters", "activations", "predicted"]
    xs, ys = chart.drawn().points[-1]
    assert xs == pytest.approx([0, 5, 5, 25, 25, 40]) and ys == pytest.approx([1, 1, 4, 4, 12, 12])
    assert not chart.lines[-1].stacked and "predicted" in figures.svg("memory_of_step", state)
    assert chart.stack_height(chart.drawn().points) == pytest.approx(10), "it is no part of the stack"


def test_the_polygons_touch_and_end_at_the_peak():
    owners = {"parameters": [4 * MIB] * 3, "activations": [0, 6 * MIB, 2 * MIB]}
    picture = ElementTree.fromstring(figures.svg("memory_of_step", state_of(memory_event(0, owners), nproc=1)))
    lower, upper = (
        [tuple(map(float, point.split(","))) for point in one.get("points").split()]
        for one in picture.iter(f"{SVG}polygon")
    )
    half = len(lower) // 2
    assert set(lower[:half]) == set(upper[len(upper) // 2 :])
    foot, top = max(y for _, y in lower), min(y for _, y in upper)
    middle = lower[0][1]
    assert (foot - top) / (foot - middle) == pytest.approx(10 / 4, rel=0.01)


def test_a_long_curve_keeps_its_peak_in_every_picture():
    times = [number * 0.04 / 600 for number in range(600)]
    column = [(100 if number == 301 else 1) * MIB for number in range(600)]
    state = state_of(memory_event(0, {"activations": column}, times), nproc=1)
    chart = figures.chart("memory_of_step", state)
    assert all(chart.drawn(points).y.high == pytest.approx(100) for points in (50, 400, 1000))


def test_the_bars_of_owners_are_the_peak():
    owners = {"parameters": [4 * MIB] * 3, "activations": [0, 6 * MIB, 2 * MIB]}
    chart = figures.chart(
        "memory_by_owner", state_of(memory_event(0, owners), memory_event(1, {"optimizer": [3 * MIB] * 3}))
    )
    assert chart.x.categories == ("rank 0", "rank 1")
    assert [sum(layer) for layer in zip(*(bars.values for bars in chart.bars))] == pytest.approx([10, 3])
    assert tuple(bars.name for bars in chart.bars) == OWNERS


# ---- phases


def test_bars_with_communication_are_as_high_as_without():
    steps = [step_event(rank, step) for rank in range(2) for step in range(1, 20)]
    plain = phases_chart(state_of(*steps))
    told = phases_chart(
        state_of(*steps, timeline_event(0), timeline_event(1, exposed={"backward": 0.01, "forward": 0.002}))
    )
    assert "communication" not in {bars.name for bars in plain.bars}
    layers = {bars.name: bars.values for bars in told.bars}
    assert layers["communication"] == pytest.approx((4, 12))
    assert layers["backward"] == pytest.approx((16, 10))
    heights = [[sum(layer) for layer in zip(*(bars.values for bars in chart.bars))] for chart in (plain, told)]
    assert heights[0] == pytest.approx(heights[1])
    assert set(layers) <= {*PHASES, "communication"}


def test_what_is_exposed_is_the_median_of_usual_steps_and_never_more_than_the_phase():
    early = timeline_event(0, step=3, exposed={"backward": 0.02})
    usual = [
        timeline_event(0, step=8 + number, exposed={"backward": value})
        for number, value in enumerate((0.002, 0.004, 0.5))
    ]
    assert profiled.exposed(state_of(early, *usual).ranks[0])["backward"] == pytest.approx(0.2)
    assert profiled.exposed(state_of(usual[2]).ranks[0])["backward"] == 1.0
    assert profiled.exposed(state_of(early).ranks[0])["backward"] == pytest.approx(1.0)


# ---- missing and malicious data


@pytest.mark.parametrize("name", EMPTY)
def test_before_the_first_sample_a_picture_says_so(name):
    state = state_of(step_event(0, 1))
    assert "no profiled step yet" in "".join(ElementTree.fromstring(figures.svg(name, state)).itertext())
    assert "no profiled step yet" in figures.figure(name, state).layout.title.text


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_sample_is_drawn(name):
    nothing = timeline_event(0, comm=[], busy=[], marks=[], phases=[["other", 0.0, 0.0]], exposed={}, seconds=0.0)
    state = state_of(nothing, memory_event(0, {}, times=(0.0,)), nproc=1)
    ElementTree.fromstring(figures.svg(name, state))
    json.loads(figures.figure(name, state).to_json())


@pytest.mark.parametrize("name", ("timeline", "memory_of_step"))
def test_hostile_names_stay_text(name):
    comm = [[HOSTILE, 0.02, 0.03, 4096, HOSTILE, [0, 1], 7]]
    parts = [[HOSTILE, 0.0, 0.04]]
    event = timeline_event(0, comm=comm, phases=parts, marks=[[f"{HOSTILE} (0)", 0.01, 0.03]], exposed={HOSTILE: 0.01})
    state = state_of(event, memory_event(0, {"parameters": [MIB] * 3}) | {"phases": parts}, nproc=1)
    picture = figures.svg(name, state)
    assert "<script" not in picture
    tags = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(picture).iter()}
    assert tags <= {"svg", "text", "tspan", "rect", "title", "line", "polygon", "polyline"}
    assert HOSTILE in "".join(ElementTree.fromstring(picture).itertext())


@pytest.mark.parametrize("name", EMPTY)
def test_everything_is_within_the_picture(name):
    ranks = [timeline_event(rank, comm=[["all_reduce", -0.01, 0.06, 8, None, None, None]]) for rank in range(8)]
    held = [memory_event(rank, {"parameters": [(rank + 1) * MIB] * 3}) for rank in range(8)]
    picture = ElementTree.fromstring(figures.svg(name, state_of(*ranks, *held, nproc=8), width=560, height=220))
    for element in picture.iter(f"{SVG}rect"):
        x, y, width, height = (float(element.get(which)) for which in ("x", "y", "width", "height"))
        assert min(x, y, width, height) >= 0
        assert x + width <= 560
        assert math.isfinite(height)
