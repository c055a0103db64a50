"""The picture of the machine: what each card holds and does at each moment of a step, and what flows between which."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from folded import applied, apply
from profiled_steps import MIB, memory_event, state_of, step_event, timeline_event

from labkit.figures.colours import OPERATIONS, OTHER_OPERATION, PHASES, ink_on
from labkit.figures.machine import FRAMES, WAITS, as_json, film, key_frames, scene, still, stills
from labkit.record.documents import Plan, SpecFields
from labkit.record.state import RunState
from labkit.runs.handle import settle

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert("1")</script>&\'"'


def at(state: RunState, share: float) -> dict[str, dict[str, str]]:
    """The attributes of all shapes at a share of the step, as the page has them after the frames up to it."""
    shown = film(state)
    shapes = {name: dict(attributes) for name, (_, attributes) in shown.shapes.items()}
    for changes in shown.frames[: int(share * FRAMES) + 1]:
        for name, new in changes.items():
            shapes[name].update(new)
    return shapes


def flowing(state: RunState, share: float) -> dict[str, str]:
    """The links that something flows through, by name, with its colour."""
    shapes = at(state, share)
    return {name: own["stroke"] for name, own in shapes.items() if name.startswith("flow") and own["stroke"] != "none"}


def call(op: str, start: float, end: float, ranks, size=4096, group="default_pg"):
    return [op, start, end, size, group, list(ranks), 7]


def test_a_card_says_what_its_rank_computes_and_a_link_what_flows():
    state = state_of(timeline_event(0), timeline_event(1))
    assert at(state, 0.1)["does0"]["text"] == "forward"
    assert at(state, 0.1)["pill0"]["fill"] == PHASES["forward"]
    assert at(state, 0.4)["does1"]["text"] == "backward"
    assert at(state, 0.9)["does0"]["text"] == "optimizer"
    assert flowing(state, 0.4) == {}
    during = flowing(state, 0.6)
    assert during == {"flow0-1": OPERATIONS["all_reduce"], "flow1-0": OPERATIONS["all_reduce"]}
    assert at(state, 0.6)["says0-1"]["text"] == "all_reduce"
    assert at(state, 0.6)["size0-1"]["text"] == "4.0 KiB"
    assert at(state, 0.9)["says0-1"]["text"] == ""
    assert film(state).what == "step 8, measured"


def test_a_rank_that_is_early_waits_and_nothing_flows_until_the_last_one_comes():
    early = timeline_event(0, comm=[call("all_reduce", 0.02, 0.03, (0, 1))], busy=[[0.002, 0.02], [0.031, 0.04]])
    late = timeline_event(1, comm=[call("all_reduce", 0.028, 0.03, (0, 1))])
    state = state_of(early, late)
    assert at(state, 0.6)["does0"]["text"] == "waits for others"
    assert flowing(state, 0.6) == {}
    assert at(state, 0.73)["does0"]["text"] == "all_reduce"
    assert len(flowing(state, 0.73)) == 2


def test_a_collective_that_is_too_short_to_see_is_shown_for_some_frames():
    short = [call("all_gather", 0.02, 0.02001, (0, 1))]
    state = state_of(timeline_event(0, comm=short), timeline_event(1, comm=short))
    seen = [number for number in range(FRAMES) if flowing(state, number / FRAMES)]
    assert seen == [60, 61, 62]


def test_messages_flow_to_the_next_stage_and_back_and_stages_stand_side_by_side():
    first = [["send", 0.01, 0.012, 4096, None, [2], None], ["recv", 0.02, 0.03, 4096, None, [2], None]]
    second = [["recv", 0.002, 0.012, 4096, None, [0], None], ["send", 0.028, 0.03, 4096, None, [0], None]]
    idle = {"busy": [[0.0, 0.001], [0.031, 0.04]]}
    events = [timeline_event(rank, comm=first, **idle) for rank in (0,)]
    events += [timeline_event(rank, comm=second, **idle) for rank in (2,)]
    shifted = [[[*one[:5], [one[5][0] + 1], None] for one in comm] for comm in (first, second)]
    events += [timeline_event(1, comm=shifted[0], **idle), timeline_event(3, comm=shifted[1], **idle)]
    state = state_of(*events, nproc=4)
    assert set(flowing(state, 0.27)) == {"flow0-2", "flow1-3"}
    assert set(flowing(state, 0.72)) == {"flow2-0", "flow3-1"}
    assert at(state, 0.1)["does2"]["text"] == "waits for rank 0"
    places = scene(state).grid
    assert [places.place(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_in_an_all_to_all_every_rank_sends_to_every_other():
    comm = [call("all_to_all", 0.01, 0.02, range(4))]
    state = state_of(*(timeline_event(rank, comm=comm) for rank in range(4)), nproc=4)
    assert len(flowing(state, 0.3)) == 12


def test_links_between_many_ranks_stay_few():
    comm = [call("all_to_all", 0.01, 0.02, range(64))]
    state = state_of(*(timeline_event(rank, comm=comm) for rank in range(64)), nproc=64)
    assert len(flowing(state, 0.3)) == 128


def test_a_ring_of_two_rows_has_no_line_across_the_picture():
    comm = [call("all_gather", 0.01, 0.02, range(8))]
    state = state_of(*(timeline_event(rank, comm=comm) for rank in range(8)), nproc=8)
    assert set(flowing(state, 0.3)) == {
        f"flow{a}-{b}" for a, b in zip((0, 1, 2, 3, 7, 6, 5, 4), (1, 2, 3, 7, 6, 5, 4, 0))
    }


def test_the_dimensions_of_a_mesh_are_rows_and_columns():
    events = []
    for rank in range(4):
        inner, outer = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        comm = [call("all_reduce", 0.01, 0.012, inner, group="mesh_tp"), call("all_gather", 0.02, 0.022, outer)]
        events.append(timeline_event(rank, comm=comm))
    state = state_of(*events, nproc=4)
    places = scene(state).grid
    assert [places.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert set(flowing(state, 0.26)) == {"flow0-1", "flow1-0", "flow2-3", "flow3-2"}
    assert set(flowing(state, 0.51)) == {"flow0-2", "flow2-0", "flow1-3", "flow3-1"}


def test_the_tank_shows_what_is_held_at_each_moment_and_the_peak():
    owners = {"parameters": [4 * MIB] * 3, "activations": [0, 4 * MIB, 0]}
    memory = memory_event(0, owners, times=(0.0, 0.01, 0.02)) | {
        "phases": [["forward", 0.0, 0.01], ["backward", 0.01, 0.04]]
    }
    state = state_of(timeline_event(0), timeline_event(1), memory)
    tank = float(film(state).shapes["tank0"][1]["height"])
    start, peak = at(state, 0.05), at(state, film(state).peak / FRAMES)
    assert start["bytes0"]["text"] == "4.0 MiB"
    assert peak["bytes0"]["text"] == "8.0 MiB"
    assert float(peak["parameters0"]["height"]) == pytest.approx(tank / 2, abs=1)
    assert float(peak["activations0"]["height"]) == pytest.approx(tank / 2, abs=1)
    assert float(start["activations0"]["height"]) == 0
    assert "up to 8.0 MiB" in film(state).label


HELD = {"parameters": [4 * MIB, 8 * MIB, 4 * MIB]}


def test_a_long_name_of_a_device_is_shortened_to_its_room():
    state = state_of(
        *(timeline_event(rank, comm=[call("all_reduce", 0.02, 0.03, range(8))]) for rank in range(8)), nproc=8
    )
    named = {"kind": "device", "device": "cuda:0", "device_name": "NVIDIA H100 80GB HBM3"}
    apply(state, *({"t": 1.0, "rank": rank} | named for rank in range(8)))
    shapes = film(state).shapes
    assert shapes["status0"][1]["text"] == "H100 80GB"
    error = {"kind": "error", "type": "A" * 40, "message": "bad", "stack": ""}
    apply(state, {"t": 1.0, "rank": 1} | error)
    assert film(state).shapes["status1"][1]["text"].endswith("A…")


def system_event(total: int) -> dict:
    return {"t": 1.0, "kind": "system", "gpus": [{"index": 0, "memory_total": total, "memory_used": 0}]}


def on_gpu(total: int) -> RunState:
    state = state_of(timeline_event(0), memory_event(0, HELD), nproc=1)
    apply(state, {"t": 1.0, "rank": 0, "kind": "device", "device": "cuda:0"}, system_event(total))
    return state


def test_a_tank_is_as_large_as_the_device_if_its_memory_can_be_seen_in_it():
    most = scene(state_of(timeline_event(0), memory_event(0, HELD), nproc=1)).most
    assert scene(on_gpu(int(4 * most))).full == int(4 * most)
    assert "of " in at(on_gpu(int(4 * most)), 0.5)["bytes0"]["text"]
    assert scene(on_gpu(int(400 * most))).full == most


def test_nodes_are_frames_around_their_ranks():
    state = state_of(*(timeline_event(rank) for rank in range(4)), nproc=4)
    apply(state, *({"t": 1.0, "rank": rank, "kind": "start", "host": f"<b>{rank // 2}"} for rank in range(4)))
    shapes, places = film(state).shapes, scene(state).grid
    assert places.columns == 2
    for number in range(2):
        _, box = shapes[f"node{number}"]
        top = float(box["y"])
        inside = [rank for rank in range(4) if top < places.corner(rank)[1] < top + float(box["height"])]
        assert inside == [2 * number, 2 * number + 1]
        assert shapes[f"host{number}"][1]["text"] == f"<b>{number}"
    assert "<b>" not in still(film(state), 0)


def test_ranks_of_nodes_that_do_not_stand_together_have_no_frames():
    state = state_of(*(timeline_event(rank) for rank in range(4)), nproc=4)
    apply(state, *({"t": 1.0, "rank": rank, "kind": "start", "host": f"host{rank in (1, 2)}"} for rank in range(4)))
    assert not [name for name in film(state).shapes if name.startswith("node")]


def test_memory_that_was_measured_in_another_step_follows_the_phases_of_this_one():
    owners = {"activations": [0, MIB, 0]}
    memory = memory_event(0, owners, times=(0.0, 0.1, 0.3)) | {
        "phases": [["data", 0.0, 0.05], ["forward", 0.05, 0.1], ["backward", 0.1, 0.3], ["optimizer", 0.3, 0.4]],
        "seconds": 0.4,
    }
    held = scene(state_of(timeline_event(0), timeline_event(1), memory)).held[0]
    assert held.times == pytest.approx([0.0, 0.01, 0.03])


def test_before_the_first_step_each_card_has_what_the_formula_says():
    state = RunState()
    state.apply(SpecFields.of(settle("ddp", workload="mlp", nproc=2, device="cpu")))
    shown = film(state)
    assert len(shown.frames) == 1
    assert shown.shapes["speed0-0"][1]["text"].startswith("sends ")
    assert float(shown.frames[0]["parameters0"]["height"]) > 0
    assert at(state, 0)["bytes1"]["text"] == "10.2 MiB"


def test_a_step_that_was_predicted_moves_every_rank_of_a_class_within_its_own_groups():
    calls = [["all_reduce", 0.01, 0.02, 4096, None, [0, 2], None], ["send", 0.02, 0.03, 4096, None, [1], None]]
    timeline = {"seconds": 0.04, "phases": [["forward", 0, 0.04]], "comm": calls, "busy": [[0, 0.04]], "exposed": {}}
    step = {"times": [0, 5], "seconds": 10, "phases": [["forward", 0, 10]], "peak": 2 * MIB, "at_peak": {}}
    part = {
        "ranks": [0, 2],
        "step": step | {"owners": {"parameters": [MIB, MIB], "activations": [0, MIB]}},
        "ops": {},
        "calls": [],
        "timeline": timeline,
    }
    plan = {"spec": {"nproc": 4}, "method": "simulated", "ranks": [], "classes": [part]}
    state = RunState()
    state.spec = SpecFields(nproc=4)
    state.apply(decoded(plan))
    assert film(state).what == "a step as predicted (simulated)"
    assert set(flowing(state, 0.3)) == {"flow0-2", "flow2-0"}
    assert set(flowing(state, 0.6)) == {"flow0-1", "flow2-3"}
    assert scene(state).held[0].times == pytest.approx([0, 0.02])
    untimed = replace_timeline(plan)
    state.apply(decoded(untimed))
    assert film(state).what == "a step as predicted (traced)"
    assert not film(state).timed
    assert at(state, 0.6)["bytes0"]["text"] == "2.0 MiB"


def decoded(plan: dict) -> Plan:
    import msgspec

    return msgspec.convert(plan, Plan)


def replace_timeline(plan: dict) -> dict:
    return plan | {"classes": [part | {"timeline": None} for part in plan["classes"]]}


@pytest.mark.parametrize("colour", sorted({*PHASES.values(), *OPERATIONS.values(), OTHER_OPERATION, WAITS}))
def test_what_a_rank_does_can_be_read_on_its_colour(colour):
    lighter, darker = sorted((luminance(colour), luminance(ink_on(colour))), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2, of `#rgb` or `#rrggbb`."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_failure_or_a_wait_stands_beside_the_name():
    waits = {"kind": "waiting", "t": 1003.0, "rank": 0, "since": 1001.0}
    error = {"kind": "error", "t": 1003.0, "rank": 1, "type": "ValueError", "message": "no", "traceback": ""}
    state = state_of(timeline_event(0), timeline_event(1), waits, error)
    state.apply(applied({"kind": "system", "t": 1013.0}))
    assert film(state).shapes["status0"][1]["text"] == "waits 12 s"
    assert film(state).shapes["status1"][1]["text"] == "ValueError"


def test_the_film_stays_the_same_while_steps_go_on_and_only_its_words_change():
    state = state_of(timeline_event(0), timeline_event(1), *(step_event(rank, 3) for rank in range(2)))
    before = film(state)
    for rank in range(2):
        state.apply(applied(step_event(rank, 4)))
    assert film(state).frames is before.frames
    state.apply(applied(timeline_event(0, step=16)))
    state.apply(applied(timeline_event(1, step=16)))
    assert film(state).frames is not before.frames
    assert film(state).what == "step 16, measured"


def test_of_many_ranks_the_first_are_shown_and_the_others_counted():
    state = state_of(*(timeline_event(rank, comm=[]) for rank in range(100)), nproc=100)
    shown = film(state)
    assert sum(name.startswith("card") for name in shown.shapes) == 64
    assert shown.shapes["more"][1]["text"] == "and 36 more ranks"
    assert not any(name.startswith("does") for name in shown.shapes)


def test_a_still_is_one_picture_without_scripts_in_which_every_text_is_escaped():
    events = [timeline_event(rank) | {"phases": [[HOSTILE, 0.0, 0.04]]} for rank in range(2)]
    start = {"kind": "start", "t": 999.0, "rank": 0, "pid": 1, "host": "here", "device": "cpu", "device_name": HOSTILE}
    state = state_of(start, *events)
    root = ElementTree.fromstring(still(film(state), 60))
    assert {element.tag for element in root.iter()} == {f"{SVG}{tag}" for tag in ("svg", "rect", "text", "path")}
    assert HOSTILE in [text.text for text in root.iter(f"{SVG}text")]
    assert "<script" not in stills(state)


def test_key_frames_are_in_order_and_named():
    state = state_of(timeline_event(0), timeline_event(1), memory_event(0, {"activations": [0, MIB, 0]}))
    frames = key_frames(state)
    assert sorted(frames.values()) == list(frames.values())
    assert set(frames) == {"forward", "communication", "peak of memory"}
    assert flowing(state, (frames["communication"] + 0.5) / FRAMES)


@pytest.mark.parametrize(
    "more",
    [
        {"seconds": 0.0, "phases": [], "busy": [], "comm": []},
        {"seconds": 0.0},
        {"phases": [["forward", 0.03, 0.01]]},
        {"comm": [call("all_reduce", 0.01, 0.02, (0, 0))]},
        {"comm": [call("all_reduce", 0.01, 0.02, (5, 900))]},
        {"comm": [["send", 0.01, 0.02, 4096, None, [0], None]]},
        {"comm": [["send", 0.01, 0.02, None, None, None, None], ["recv", 0.02, 0.01, None, None, None, None]]},
        {"comm": [["unheard_of", 9.0, 8.0, 0, "", [1], None]]},
        {"comm": [call("all_reduce", 0.01, 0.02, range(2))] * 5_000, "busy": [[0.0, 0.001]] * 5_000},
    ],
)
def test_a_hostile_step_is_drawn_as_well(more):
    state = state_of(timeline_event(0) | more, timeline_event(1) | more, memory_event(0, {}, times=(0.02, 0.01)))
    shown = film(state)
    ElementTree.fromstring(f"<div>{stills(state)}</div>")
    assert set(as_json(shown)) >= {"shapes", "frames", "label"}
    assert len(shown.shapes) < 1_500
