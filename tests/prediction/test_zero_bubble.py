"""Pipelines that split backward, on two CPU ranks: memory and messages are those predicted, reported losses and
gradients are those of one device, and the passes of a step are in the order of the schedule."""

from __future__ import annotations

import math

import pytest
from conftest import warm_run

from labkit.analysis.comparison import badge
from labkit.analysis.diagnose import findings
from labkit.analysis.prediction import outcomes
from labkit.course.pictures import pipeline
from labkit.plan.spec import Spec
from labkit.prediction import predict as planning
from labkit.prediction.predict import predict
from labkit.prediction.tracer import TRACER

MOST = 0.005  # error of a predicted peak, as a share of the measured one
CASES = (
    *(("ZBVZeroBubble", "gpt"), ("DualPipeV", "cnn"), ("InterleavedZeroBubble", "cnn")),
    *(pytest.param(case, marks=pytest.mark.slow) for case in (("ZBVZeroBubble", "cnn"), ("DualPipeV", "gpt"))),
)


def spec_of(strategy: str, workload: str, nproc: int, **options) -> Spec:
    fields = {"batch_size": 16, "steps": 4, "samples": 64, "device": "cpu", "precision": "fp32", "sample_every": 2}
    return Spec(strategy, workload, nproc=nproc, options=options, tensors=True, **fields)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def trained(request, tmp_path_factory):
    """A pipeline that was predicted, and then run: its Spec, its plan and its run."""
    schedule, workload = request.param
    spec = spec_of("pp", workload, 2, schedule=schedule, micro_batches=4)
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("cache")
        patch.setattr(planning, "user_cache", lambda: place)
        patch.setattr(TRACER, "forked", lambda environment, errors: None)
        plan = predict(spec)
        run = warm_run(spec, tmp_path_factory.mktemp("runs"))
    TRACER.end()
    assert run.words == "finished", run.logs(0, "stderr")
    return spec, plan, run


def test_memory_and_messages_of_both_ranks_are_those_predicted(trained):
    _, plan, run = trained
    assert plan.method == "simulated", plan.reason
    found = outcomes(run.state)
    assert [abs(one.error) <= MOST for one in found] == [True, True], found
    assert [part.ranks for part in plan.classes] == [[0], [1]]
    for rank, part in enumerate(plan.classes):
        assert part.ops["send"].calls > 0
        assert run.state.ranks[rank].traffic.ops == part.ops


def test_reported_losses_and_gradients_are_those_of_one_device(trained, shared_run):
    spec, _, run = trained
    single = shared_run(spec_of("single", spec.workload, 1))
    alone = single.state.ranks[0].steps.loss
    last = spec.strategy_row.constants(spec)["LOSS_RANK"]
    assert list(run.state.ranks[last].steps.loss) == pytest.approx(list(alone), rel=1e-5)
    assert all(map(math.isnan, run.state.ranks[1 - last].steps.loss)), "the rank without the last stage has none"
    assert run.summary()["loss"] == pytest.approx(float(alone[-1]), rel=1e-5)
    assert not findings(run.state)
    found = badge(run.folder, run.state, single.folder, single.state)
    assert found.verdict == "equal", found.sentence


def test_every_pass_is_measured_in_the_order_of_the_schedule(trained):
    spec, _, run = trained
    measured = pipeline.measured(run)
    for rank in (0, 1):
        order = pipeline.order(spec.options["schedule"], rank, 2, 4)
        seen = sorted((slot for slot in measured.slots if slot.rank == rank), key=lambda slot: slot.start)
        assert [(slot.kind, slot.stage, slot.number) for slot in seen] == [
            each
            for each in order
            if each[:2] != ("B", 0)  # the first stage has no gradient of its inputs
        ]
