"""Pipeline schedules: dependencies, bubble by formula, memory, the order as in torch; and the measured timeline of a
run."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as of_torch

from labkit.course.pictures import pipeline
from labkit.course.pictures.pipeline import SCHEDULES, PipelineStep, Slot, least, needs, order, planned, simulate
from labkit.plan.spec import Spec
from labkit.record.documents import SpecFields
from labkit.record.events import Timeline
from labkit.record.state import RunState
from labkit.training.strategies.rules import V_SHAPED, holder

SIZES = [(2, 2), (2, 4), (2, 8), (3, 6), (4, 4), (4, 8), (4, 16), (8, 8)]
CASES = [(one, ranks, parts) for one in SCHEDULES for ranks, parts in SIZES if parts >= least(one, ranks)]
FEW = [(one, 4, 2) for one in SCHEDULES if least(one, 4) <= 2]


@pytest.mark.parametrize(("schedule", "ranks", "parts"), [*CASES, *FEW])
def test_a_simulated_step_does_everything_once_in_a_possible_order(schedule, ranks, parts):
    plan, rule = simulate(schedule, ranks, parts), SCHEDULES[schedule]
    stages = ranks * rule.stages
    halves = [(half, slot) for slot in plan.slots for half in slot.kind]
    ends = {(half, slot.stage, slot.number): slot.end for half, slot in halves}
    kinds = "FBW" if rule.halved else "FB"
    assert set(ends) == {(kind, stage, number) for kind in kinds for stage in range(stages) for number in range(parts)}
    assert len(ends) == len(halves)
    for slot in plan.slots:
        assert holder(slot.stage, ranks, schedule) == slot.rank
        assert all(ends[need] <= slot.start + 1e-9 for need in needs(slot.kind[0], slot.stage, slot.number, stages))
        if slot.kind != "F":
            assert ends["F", slot.stage, slot.number] <= slot.start + 1e-9
    for rank in plan.ranks:
        mine = sorted((slot.start, slot.end) for slot in plan.slots if slot.rank == rank)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(mine)), (
            "no rank computes two passes at once"
        )


@pytest.mark.parametrize(("schedule", "ranks", "parts"), CASES)
def test_idle_time_is_that_of_the_formula(schedule, ranks, parts):
    assert simulate(schedule, ranks, parts).bubble == pytest.approx(SCHEDULES[schedule].formula(ranks, parts))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("backward", [1.0, 3.5])
def test_the_bubble_is_the_same_however_long_a_backward_takes(schedule, backward):
    assert simulate(schedule, 4, 8, backward=backward).bubble == pytest.approx(3 / 11)
    assert simulate(schedule, 4, 1, backward=backward).bubble == pytest.approx(3 / 4)


def test_activations_are_those_of_the_papers():
    assert simulate("GPipe", 4, 8).kept == {0: 8, 1: 8, 2: 8, 3: 8}
    assert simulate("1F1B", 4, 8).kept == {0: 4, 1: 3, 2: 2, 3: 1}
    assert simulate("ZB-H1", 4, 8).kept == {0: 4, 1: 4, 2: 4, 3: 4}
    assert max(simulate("Interleaved1F1B", 4, 8).kept.values()) == 5.5
    assert simulate("ZBVZeroBubble", 4, 8).kept == {0: 4, 1: 4, 2: 4, 3: 4}, "those of 1F1B on its first rank"
    assert simulate("DualPipeV", 4, 8).kept == {0: 4.5, 1: 4.5, 2: 4.5, 3: 4.5}, "of p + 1/2 micro-batches"


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize(("ranks", "parts"), SIZES)
def test_the_orders_are_those_of_torch(schedule, ranks, parts):
    """Compares with torch's class, whose constructor needs stages, but whose order does not."""
    theirs = object.__new__(getattr(of_torch, f"Schedule{schedule}"))
    rounds = max(1, parts // ranks)
    theirs.__dict__.update(
        n_local_stages=2, pp_group_size=ranks, _n_microbatches=parts, microbatches_per_round=parts // rounds
    )
    letters = {"F": "F", "B": "B", "I": "B", "W": "W"}
    for rank in range(ranks):
        theirs.rank = rank
        passes = [each for each in theirs._calculate_single_rank_operations(rank) if each is not None]
        assert order(schedule, rank, ranks, parts) == [
            (letters[str(kind.value)], stage, number) for stage, kind, number, *_ in passes
        ]


@pytest.mark.parametrize(
    ("schedule", "ranks", "parts"),
    [each for each in CASES if each[0] in V_SHAPED]
    + [(one, ranks, parts) for one in V_SHAPED for ranks, parts in ((2, 5), (3, 7), (4, 9))]
    + [("ZBVZeroBubble", 2, 1), ("ZBVZeroBubble", 4, 3)],
)
def test_the_orders_of_v_shaped_schedules_are_those_of_torch(schedule, ranks, parts):
    theirs = object.__new__(getattr(of_torch, f"Schedule{schedule}"))
    theirs.__dict__.update(n_local_stages=2, pp_group_size=ranks, _n_microbatches=parts, num_stages=2 * ranks)
    letters = {"F": "F", "B": "BW", "I": "B", "W": "W"}
    for rank in range(ranks):
        actions = [each for each in theirs._calculate_single_rank_operations(rank) if each is not None]
        passes = [part for each in actions for part in each.sub_actions or (each,)]
        assert order(schedule, rank, ranks, parts) == [
            (letters[str(each.computation_type.value)], each.stage_index, each.microbatch_index) for each in passes
        ]


def test_unequal_stages_wait_more():
    even, uneven = simulate("1F1B", 2, 8), simulate("1F1B", 2, 8, costs=(3, 1))
    busy = {rank: sum(slot.end - slot.start for slot in uneven.slots if slot.rank == rank) for rank in (0, 1)}
    assert busy[0] == pytest.approx(3 * busy[1]) and busy[0] + busy[1] == pytest.approx(2 * 3 * 8)
    assert uneven.bubble > even.bubble + 0.2


def test_a_spec_is_planned_with_its_stages():
    spec = Spec("pp", "gpt", nproc=2, options={"schedule": "GPipe", "micro_batches": 4})
    plan = planned(spec)
    costs = spec.workload_row.costs(spec.options)
    first, border, last = spec.strategy_row.constants(spec)["STAGES"]
    lasts = {slot.stage: slot.end - slot.start for slot in plan.slots if slot.kind == "F"}
    assert lasts[0] / lasts[1] == pytest.approx(sum(costs[first:border]) / sum(costs[border:last]))
    assert plan.title.startswith("GPipe, 2 ranks, 4 micro-batches") and plan.modelled


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1F2B", 2, 2), "schedule must be one of .*, got '1F2B'"),
        (("1F1B", 1, 2), "at least 2 ranks and 1 micro-batch, got 1 and 2"),
        (("Interleaved1F1B", 4, 10), ""),
        (("Interleaved1F1B", 4, 13), "use 12"),
        (("GPipe", 2, 4, (1, 2, 3)), "each of the 2 stages"),
        (("DualPipeV", 4, 7), "at least 8 micro-batches on 4 ranks, got 7"),
    ],
)
def test_an_impossible_schedule_is_rejected(arguments, words):
    if not words:
        assert simulate(*arguments).slots
        return
    with pytest.raises(ValueError, match=words):
        simulate(*arguments)


# ---- the pictures


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_gantt_has_every_pass_in_its_lane(schedule):
    plan = simulate(schedule, 3, 6)
    figure = pipeline.gantt(plan)
    drawn = [
        (lane, base, wide, text)
        for bar in figure.data
        if bar.base is not None
        for lane, base, wide, text in zip(bar.y, bar.base, bar.x, bar.text)
    ]
    for slot in plan.slots:
        wide = pytest.approx(slot.end - slot.start, abs=1e-3)
        assert drawn.count((f"rank {slot.rank}", pytest.approx(slot.start, abs=1e-3), wide, str(slot.number))) == 1
    assert len(drawn) == len(plan.slots)
    assert f"idle {plan.bubble:.0%}" in figure.layout.title.text and "modelled" in figure.layout.title.text
    named = [bar.name for bar in figure.data if bar.showlegend is not False]
    assert {*named} == {bar.name for bar in figure.data} and len({*named}) == len(named), "each colour is named once"
    assert ("second stage of a rank" in named) == any(slot.stage >= 3 for slot in plan.slots), "and so is the hatching"


def test_the_charts_are_those_of_the_simulation():
    lines = {line.name: dict(zip(line.x, line.y)) for line in pipeline.bubbles(4).data}
    assert list(lines) == list(SCHEDULES)
    assert lines["1F1B"][8] == pytest.approx(100 * 3 / 11, abs=0.01)
    assert len({(line.marker.symbol) for line in pipeline.bubbles(4).data}) == len(SCHEDULES)
    bars = {bar.name: list(bar.y) for bar in pipeline.activations(4, 8, ["GPipe", "1F1B"]).data}
    assert bars == {"GPipe": [8, 8, 8, 8], "1F1B": [4, 3, 2, 1]}


# ---- the measured timeline of a run


def a_run(schedule: str, parts: int, steps: dict[int, dict[int, dict]], strategy: str = "pp") -> SimpleNamespace:
    """A run of two ranks whose timelines are, by step and rank, `steps`."""
    state = RunState()
    state.spec = SpecFields(strategy=strategy, options={"schedule": schedule, "micro_batches": parts})
    for rank in (0, 1):
        own = {step: by_rank[rank] for step, by_rank in steps.items() if rank in by_rank}
        state.ranks[rank] = SimpleNamespace(timelines=own, host="")
    return SimpleNamespace(name="a-run", state=state)


def a_timeline(phases, busy=(), t0=100.0, seconds=1.0):
    return Timeline(
        t=0.0, rank=0, step=0, t0=t0, seconds=seconds, phases=phases, busy=[*busy], comm=[], marks=[], exposed={}
    )


def test_passes_of_a_run_get_their_names_by_the_rule():
    first = [("forward", 0.0, 0.1), ("other", 0.1, 0.3), ("backward", 0.3, 0.5), ("optimizer", 0.5, 0.6)]
    second = [("forward", 0.0, 0.1), ("backward", 0.1, 0.25)]
    run = a_run("1F1B", 1, {3: {0: a_timeline(first), 1: a_timeline(second, t0=100.1)}})
    plan = pipeline.measured(run)
    assert not plan.modelled and plan.unit == "ms" and "step 3" in plan.title
    assert [(slot.rank, slot.kind, slot.stage, slot.number) for slot in plan.slots] == [
        (0, "F", 0, 0),
        (0, "B", 0, 0),
        (1, "F", 1, 0),
        (1, "B", 1, 0),
    ]
    assert [round(slot.start) for slot in plan.slots] == [0, 300, 100, 200]
    assert plan.bubble == pytest.approx(1 - (0.3 + 0.25) / (2 * 0.5))
    assert "measured" in pipeline.gantt(plan).layout.title.text


def test_the_fastest_usual_step_is_used():
    def both(long):
        return {rank: a_timeline([("forward", 0.0, 0.1), ("backward", long - 0.1, long)]) for rank in (0, 1)}

    run = a_run("GPipe", 1, {3: both(0.2), 8: both(0.9), 12: both(0.5), 16: {0: both(0.3)[0]}})
    assert "step 12" in pipeline.measured(run).title


def in_halves(ranks: int, measured: bool) -> dict[int, dict]:
    """A timeline of InterleavedZeroBubble with two micro-batches, in which every pass takes 50 ms."""
    found = {}
    for rank in range(ranks):
        kinds = [kind for kind, stage, _ in order("InterleavedZeroBubble", rank, ranks, 2) if (kind, stage) != ("B", 0)]
        names = ["forward" if kind == "F" else "backward" if measured else "other" for kind in kinds]
        found[rank] = a_timeline([(name, number / 20, (number + 1) / 20) for number, name in enumerate(names)])
    return found


def test_halves_of_a_backward_are_named_by_the_rule():
    run = a_run("InterleavedZeroBubble", 2, {8: in_halves(2, measured=True)})
    mine = [(slot.kind, slot.stage, slot.number) for slot in pipeline.measured(run).slots if slot.rank == 0]
    assert [each for each in mine if each[0] != "F"] == [
        *[("B", 2, 0), ("W", 2, 0), ("B", 2, 1), ("W", 2, 1)],
        *[("W", 0, 0), ("W", 0, 1)],  # the first stage has no gradient of its inputs
    ]
    other = [slot.kind for slot in pipeline.measured(run).slots if slot.rank == 1]
    assert (other.count("F"), other.count("B"), other.count("W")) == (4, 4, 4)


def test_a_run_that_does_not_tell_the_halves_apart_is_refused():
    run = a_run("InterleavedZeroBubble", 2, {8: in_halves(2, measured=False)})
    with pytest.raises(ValueError, match="run a-run does not tell the halves of a backward apart; run it again"):
        pipeline.measured(run)


def test_a_run_without_a_pipeline_or_a_profiled_step_is_rejected():
    with pytest.raises(ValueError, match="the strategy of run a-run must be pp, got ddp"):
        pipeline.measured(a_run("GPipe", 1, {}, strategy="ddp"))
    with pytest.raises(ValueError, match="no step that all ranks profiled"):
        pipeline.measured(a_run("GPipe", 1, {3: {0: a_timeline([])}}))


def test_a_plan_of_one_slot_has_its_span():
    plan = PipelineStep("one", (Slot(0, "F", 0, 0, 2.0, 3.0),), "forwards", modelled=True)
    assert plan.span == (2.0, 3.0) and plan.bubble == 0
