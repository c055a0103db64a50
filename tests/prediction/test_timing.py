"""The time of a step: simulated programs against formulas, and a prediction against a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from folded import apply
from linked import cache, table  # noqa: F401 a fixture
from msgspec import structs
from test_prediction import spec_of

import labkit
from labkit import figures
from labkit.analysis.metrics import step_seconds
from labkit.analysis.prediction import outcomes, sentences, time_made
from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.prediction.links import CommunicationModel, Duration, store
from labkit.prediction.predict import predict
from labkit.prediction.timing import Compute, Start, Wait, moved, simulate, timed
from labkit.prediction.tracer import computed
from labkit.record.state import RunState
from labkit.record.writer import PHASES
from labkit.setup.machine import Machine

EVERY = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"}


class Links(CommunicationModel):
    """A byte takes a second."""

    title = "made-up links"

    def _time(self, operation: str, size: int, ranks: int, nodes: int) -> Duration:
        return Duration(float(size), "modelled")


def seconds(programs, cores=None, like=None):
    found = simulate(programs, like or {rank: rank for rank in programs}, Links(), cores)
    return {rank: round(one.seconds, 6) for rank, one in found.items()}


def compute(phase: str, seconds: float) -> Compute:
    return Compute(phase, (seconds,))


def replica(backward: float = 5.0, size: int = 8) -> list:
    """One bucket is reduced while the second half of backward runs."""
    return [
        compute("forward", 10.0),
        compute("backward", backward),
        Start(0, "all_reduce", size, (0, 1)),
        compute("backward", 5.0),
        Wait(0),
        compute("optimizer", 1.0),
    ]


def test_communication_is_exposed_where_computation_does_not_cover_it():
    found = simulate(dict.fromkeys((0, 1), replica()), {0: 0, 1: 1}, Links(), None)[0]
    assert found.seconds == pytest.approx(10 + 5 + 8 + 1)
    assert found.exposed == pytest.approx({"backward": 3.0})
    [call] = found.comm
    assert (call.op, call.start, call.end, call.bytes) == ("all_reduce", pytest.approx(15), pytest.approx(23), 8)
    assert sum(end - start for start, end in found.busy) == pytest.approx(21)
    assert [name for name, *_ in found.phases] == ["forward", "backward", "optimizer"]
    assert seconds(dict.fromkeys((0, 1), replica(size=4))) == {0: 21.0, 1: 21.0}


def test_the_slowest_rank_sets_the_pace_of_all():
    assert seconds({0: replica(), 1: replica(backward=9.0)}) == {0: 28.0, 1: 28.0}


def test_a_rank_that_is_late_by_chance_is_waited_for():
    """A third of the steps of a rank take longer, on each rank others."""
    late = [Compute("forward", (1.0, 1.0, 1.0, 1.0, 2.0, 2.0)), Start(0, "barrier", 0, (0, 1, 2)), Wait(0)]
    assert seconds({0: late}, like=dict.fromkeys(range(3), 0))[0] == 1.0
    alone = simulate({0: late[:1]}, {0: 0}, None, None)[0]
    assert (alone.low, alone.seconds, alone.high) == pytest.approx((1.0, 1.0, 2.0))
    assert seconds(dict.fromkeys(range(3), late)) == dict.fromkeys(range(3), 2.0)


def test_ranks_share_the_cores_and_communication_takes_part_in_it():
    whole = [compute("forward", 3.0)]
    assert seconds(dict.fromkeys(range(4), whole), cores=2)[0] == 6.0
    assert seconds({0: whole}, cores=2, like=dict.fromkeys(range(4), 0))[0] == 6.0
    # on two cores, an all-reduce takes as long next to computation as after it
    assert seconds(dict.fromkeys((0, 1), replica()), cores=2)[0] == 10 + 5 + 8 + 5 + 1


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 8)])
def test_a_pipeline_takes_the_time_of_the_bubble_formula(stages, micro_batches):
    """Forward passes, then backward passes (GPipe): (m + p − 1) × (forward + backward), Huang et al. 2019."""
    programs = {}
    for rank in range(stages):
        items, number = [], 0
        for phase, step, cost in (("forward", 1, 1.0), ("backward", -1, 2.0)):
            source, target = rank - step, rank + step
            for _ in range(micro_batches):
                if 0 <= source < stages:
                    items += [Start(number, "recv", 0, (source,)), Wait(number)]
                    number += 1
                items.append(compute(phase, cost))
                if 0 <= target < stages:
                    items.append(Start(number, "send", 0, (target,)))
                    number += 1
        programs[rank] = [*items, Start(number, "barrier", 0, tuple(range(stages))), Wait(number)]
    assert seconds(programs) == dict.fromkeys(range(stages), (micro_batches + stages - 1) * 3.0)


@pytest.mark.parametrize("early", [0, 1])
def test_a_message_is_sent_by_one_rank_and_received_by_the_other(early):
    """Whichever starts first."""
    programs = {
        rank: [compute("forward", float(rank != early)), Start(0, op, 3, (1 - rank,)), Wait(0)]
        for rank, op in enumerate(("send", "recv"))
    }
    found = simulate(programs, {0: 0, 1: 1}, Links(), None)
    assert [found[rank].comm[0].op for rank in (0, 1)] == ["send", "recv"]
    assert [found[rank].comm[0].ranks for rank in (0, 1)] == [[1], [0]]
    late = found[1 - early].comm[0]
    assert (late.start, late.end, late.bytes) == (1.0, 4.0, 3)


def test_collectives_of_a_group_follow_each_other_and_groups_do_not_wait_for_each_other():
    both = [Start(0, "all_gather", 4, (0, 1)), Start(1, "all_gather", 4, (0, 1)), Wait(1)]
    assert seconds(dict.fromkeys((0, 1), both)) == {0: 8.0, 1: 8.0}
    other = [Start(0, "all_gather", 4, (0, 1)), Start(1, "all_gather", 4, (0, 1, 2)), Wait(0), Wait(1)]
    assert seconds({0: other, 1: other, 2: [Start(0, "all_gather", 4, (0, 1, 2)), Wait(0)]})[0] == 4.0


def test_gloo_executes_two_operations_of_a_group_at_a_time_and_they_share_the_cores():
    three = [*(Start(number, "all_gather", 4, (0, 1)) for number in range(3)), *map(Wait, range(3))]
    assert seconds(dict.fromkeys((0, 1), three), cores=2)[0] == 12.0
    found = simulate(dict.fromkeys((0, 1), three), {0: 0, 1: 1}, Links(), 2)[0]
    assert [call.end for call in found.comm] == [8.0, 8.0, 12.0]


def test_an_operation_that_a_class_of_ranks_never_starts_does_not_block_the_others():
    assert seconds({0: [Start(0, "recv", 3, (1,)), Wait(0)], 1: [compute("forward", 1.0)]}) == {0: 3.0, 1: 1.0}


def test_an_operation_takes_longer_by_one_of_its_delays():
    class Delayed(Links):
        def _time(self, operation, size, ranks, nodes):
            return replace(super()._time(operation, size, ranks, nodes), delays={0.0: (*[0.0] * 7, 8.0)})

    one = [Start(0, "all_reduce", 1, (0, 1)), Wait(0)]
    found = simulate({0: one, 1: one}, {0: 0, 1: 1}, Delayed(), None)[0]
    assert (found.low, found.seconds, found.high) == (1.0, 1.0, 1.0)
    both = [Start(0, "all_reduce", 1, (0, 1)), Start(1, "all_reduce", 1, (0, 1)), Wait(0), Wait(1)]
    at_once = simulate({0: both, 1: both}, {0: 0, 1: 1}, Delayed(), 2, steps=101)[0]
    assert at_once.seconds == 2.0 and at_once.high in (2.0, 10.0), "their delays pass at the same time"
    twenty = simulate({0: one * 20, 1: one * 20}, {0: 0, 1: 1}, Delayed(), None, steps=101)[0]
    assert twenty.seconds == pytest.approx(20 * (1 + 8 / 8), rel=0.15)


def test_delays_are_those_after_about_as_much_computation():
    class Delayed(Links):
        def _time(self, operation, size, ranks, nodes):
            return replace(super()._time(operation, size, ranks, nodes), delays={0.0: (0.0,), 3.0: (8.0,)})

    def step(*items):
        return simulate(dict.fromkeys((0, 1), items), {0: 0, 1: 1}, Delayed(), None)[0].seconds

    one, two = ([Start(number, "all_reduce", 1, (0, 1)), Wait(number)] for number in (0, 1))
    assert step(compute("forward", 1.0), *one) == 1 + 1
    assert step(compute("forward", 1.0), compute("backward", 1.0), *one) == 2 + 8 + 1
    assert step(compute("forward", 2.0), *one, *two) == 2 + 8 + 1 + 1


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 3), (3, 2)])
def test_another_rank_of_a_class_does_the_same_in_its_part_of_the_mesh(rows, columns):
    """The ranks of a row hold the same stage, a column is a pipeline; both are groups of collectives, too."""
    ranks = rows * columns

    def program(rank: int) -> list:
        row, column = divmod(rank, columns)
        same_row, same_column = range(row * columns, (row + 1) * columns), range(column, ranks, columns)
        target = (rank + columns) % ranks
        groups = [tuple(same_row), tuple(same_column), tuple(range(ranks)), (rank,)]
        return [Start(0, "send", 1, (target,)), *(Start(1, "all_reduce", 1, group) for group in groups), Wait(1)]

    for rank in range(ranks):
        assert moved(program(0), 0, rank, ranks) == program(rank)
    assert moved(program(ranks - 1), ranks - 1, 0, ranks) == program(0)


def test_a_rank_of_its_own_class_keeps_groups_of_any_shape():
    own = [Start(0, "all_reduce", 1, (0, 1, 3)), Wait(0)]
    assert moved(own, 1, 1, 4) == own


# ---- measured


@pytest.fixture
def measured(cache, monkeypatch):  # noqa: F811
    """What a step computes is measured briefly; the links of 2 ranks are known."""
    monkeypatch.setattr("labkit.prediction.tracer.MEASURED", 0.05)
    here = Machine.here()
    points = dict.fromkeys(EVERY, ((1024, 0.0001), (1 << 26, 0.1)))
    known = structs.replace(table(2, **points), machine=here.hardware, torch=here.torch_version)
    store(known)
    return known


@pytest.mark.parametrize(
    ("strategy", "nproc", "operations"),
    [
        ("single", 1, set()),
        ("ddp", 2, {"all_reduce"}),
        ("fsdp2", 2, {"all_gather", "reduce_scatter"}),
        ("tp", 2, {"all_reduce"}),
        ("pp", 2, {"send", "recv"}),
    ],
)
def test_a_program_has_what_the_script_computes_and_sends(strategy, nproc, operations, measured):
    found = computed(replace(spec_of(strategy, nproc=nproc), steps=40), range(nproc))
    assert sorted(found) == [*range(nproc)]
    for items in found.values():
        phases = {item[1] for item in items if item[0] == "compute"}
        assert {"data", "forward", "backward", "optimizer"} <= phases <= {*PHASES}
        assert all(seconds >= 0 for item in items if item[0] == "compute" for seconds in item[2])
        started = [item for item in items if item[0] == "start"]
        assert [item[1] for item in started] == [*range(len(started))]
        assert {item[1] for item in items if item[0] == "wait"} <= {item[1] for item in started}
    assert {item[2] for items in found.values() for item in items if item[0] == "start"} >= operations


def test_predicted_and_measured_steps_stand_side_by_side(measured):
    spec = spec_of("ddp")
    prediction = labkit.predict(spec, machine="here")
    plan = prediction.plan
    assert plan.time.seconds == plan.classes[0].timeline.seconds > 0
    assert plan.time.samples_per_second == pytest.approx(32 / plan.time.seconds)
    assert "measured on 2026-11-22" in plan.time.links
    assert "a step takes" in repr(prediction) and "simulated" in repr(prediction)
    run = labkit.run(spec).wait()
    found = outcomes(run.state)
    assert [one.step_predicted for one in found] == [plan.time.seconds] * 2
    assert [one.step_measured for one in found] == [step_seconds(run.state, rank) for rank in (0, 1)]
    assert found[0].step_error == pytest.approx(found[0].step_predicted / found[0].step_measured - 1)
    assert any(said.startswith("A step was predicted to take") for said in sentences(run.state))
    lanes = figures.chart("timeline", run.state).y.categories
    assert lanes[:4] == ("rank 0 predicted", "comm 0 predicted", "rank 0", "comm 0")
    assert "rank 1 simulated" in figures.chart("phases", run.state).x.categories
    assert run.summary()["prediction"][0]["step_predicted"] == plan.time.seconds


def test_a_step_that_differs_names_the_phases(measured):
    spec = spec_of("ddp")
    plan = timed(spec, predict(spec))
    state = RunState()
    apply(state, {"kind": "spec", "spec": plan.spec})
    apply(state, {"kind": "prediction", "prediction": plan})
    lasts = plan.time.seconds
    took = {"data": 0.0, "copy": 0.0, "forward": 0.0, "backward": 9 * lasts, "optimizer": 0.0, "other": 0.0}
    for step in range(1, 9):
        event = {"v": 1, "t": float(step), "rank": 0, "kind": "step", "step": step, "loss": 1.0, "samples": 16}
        apply(state, {**event, "seconds": {"step": 9 * lasts, **took}, "memory": {}})
    assert "per step: " in outcomes(state)[0].step_reason
    assert "backward +" in outcomes(state)[0].step_reason


@pytest.mark.parametrize(("workers", "waits"), [(0, False), (1, True)])
def test_waiting_counts_only_for_a_rank_that_other_processes_work_for(workers, waits, measured, monkeypatch):
    """A rank that computes alone never waits, except for a core."""
    spec = replace(spec_of("single", nproc=1, options={"workers": workers}), steps=40)
    source = write_script(spec).replace("optimizer.zero_grad()", "__import__('time').sleep(0.1)")
    monkeypatch.setattr("labkit.prediction.tracer.write_script", lambda *_, **__: source)
    program = computed(spec, [0])[0]
    steps = [sum(each) for each in zip(*(item[2] for item in program if item[0] == "compute"))]
    assert all((step >= 0.1) == waits for step in steps)


def test_what_is_measured_saves_nothing_and_does_not_fail_on_purpose(measured, monkeypatch):
    asked = []
    program = [["compute", "forward", [0.1]], ["busy", 0.01]]
    monkeypatch.setattr(
        "labkit.prediction.timing.computed", lambda spec, ranks, cancelled: asked.append(spec) or {0: program}
    )
    rising = {"warmup_steps": 400}  # longer than what is measured
    spec = spec_of("ddp", fault="killed_rank", save_every=2, max_restarts=1, steps=500, options=rising)
    assert timed(spec, predict(spec)).time.seconds == pytest.approx(0.1)
    assert (asked[0].fault, asked[0].save_every, asked[0].resume) == (None, None, None)
    assert (spec.fault, spec.save_every, spec.options["warmup_steps"]) == ("killed_rank", 2, 400)


def test_a_measurement_beside_other_work_widens_the_range_and_is_repeated(measured, monkeypatch):
    shares = [0.3, 0.01]
    monkeypatch.setattr(
        "labkit.prediction.timing.computed",
        lambda spec, ranks, cancelled: {0: [["compute", "forward", [0.1]], ["busy", shares.pop(0)]]},
    )
    spec = spec_of("ddp")
    disturbed = timed(spec, predict(spec))
    assert disturbed.time.busy == 0.3 and "for 30% of that measurement" in time_made(disturbed)
    assert disturbed.time.high - disturbed.time.seconds > 0.3 * disturbed.time.seconds
    alone = timed(spec, predict(spec))
    assert alone.time.busy == 0 and alone.time.high < disturbed.time.high
    assert timed(spec, predict(spec)).time == alone.time, "it is known now"


def test_what_is_not_known_is_said(cache, capsys):  # noqa: F811
    with pytest.raises(LookupError, match="has not been measured on this machine; measure it with labkit doctor"):
        labkit.predict("ddp", workload="mlp", nproc=2, batch_size=16, device="cpu", machine="here")
    with pytest.raises(LookupError, match="for CPU ranks only"):
        timed(Spec("single", workload="mlp", nproc=1, batch_size=16, device="cuda"), predict(spec_of("single")))
