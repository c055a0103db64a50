"""Predictions against real runs: memory per rank, and every collective, of each strategy."""

from __future__ import annotations

import pytest
from conftest import warm_run

from labkit.analysis.prediction import outcomes
from labkit.plan.spec import Spec
from labkit.prediction import tracer
from labkit.prediction.predict import predict
from labkit.runs.handle import Run
from labkit.training.strategies import STRATEGIES

STEPS = 4  # the third is profiled
WORKLOADS = {"cp": "gpt", "tp": "gpt", "pp": "cnn"}  # of the others: mlp
PARALLEL = 0.02  # largest relative error of a peak
PIPELINED = 0.03


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache for this module, and no process that traces after it."""
    before = pytest.MonkeyPatch()
    before.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    before.undo()
    tracer.TRACER.end()


def spec_of(strategy: str, **fields) -> Spec:
    workload = WORKLOADS.get(strategy, "mlp")
    ranks = STRATEGIES[strategy].default_nproc or 2
    return Spec(strategy, workload, nproc=ranks, device="cpu", **{"batch_size": 16, "steps": STEPS, **fields})


@pytest.fixture(scope="module", params=STRATEGIES)
def ran(request, tmp_path_factory) -> Run:
    """A run of each strategy, which was predicted before it started."""
    spec = spec_of(request.param)
    plan = predict(spec)
    assert plan["method"] == "simulated", plan.get("reason")
    return warm_run(spec, tmp_path_factory.mktemp("predicted"))


def test_peak_memory_is_that_of_the_run(ran):
    state = ran.state
    assert state.prediction, "the cached prediction is in the run folder"
    limit = PIPELINED if state.asked.strategy_row.constants(state.asked.request).get("STAGES") else PARALLEL
    found = outcomes(state)
    assert len(found) == state.world_size
    if state.in_threads:
        return  # the profiler does not record the allocations of the replicas' threads
    assert all(abs(one.error) <= limit for one in found), [(one.peak_predicted, one.peak_measured) for one in found]


def test_collectives_are_those_of_the_run(ran):
    state = ran.state
    for part in state.prediction["classes"]:
        for number in part["ranks"]:
            rank = state.ranks[number]
            assert rank.traffic["ops"] == part["ops"]
