"""What runs on GPUs measure: every strategy's traffic, memory and phases against what the stand-in and the plan know.

A kernel takes `KERNEL` seconds and a product of matrices four times as long, so that the seconds of a phase are known.
A busy machine makes phases longer, and never shorter: of all steps the shortest counts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import warm_run

from cuda_stand_in.machines import settings
from labkit.analysis.ledger import ledger
from labkit.analysis.prediction import outcomes
from labkit.plan.spec import Spec
from labkit.prediction.predict import predict
from labkit.training.strategies import STRATEGIES

KERNEL = 300e-6
OVERLAP = Path(__file__).parent / "scripts" / "overlap.py"
PRODUCTS, COPY, REDUCED = 20 * 4 * KERNEL, (64 << 20) / 12e9, 64 * 64 * 4  # seconds, seconds, bytes
CLOSE = 0.05  # of a phase that is known
WORKLOADS = {"ep": "moe", "cp": "gpt"}  # of the others: mlp
RANKS = {"single": 1, "fsdp2_tp": 4, "pp_ddp": 4, "pp_fsdp2_tp": 8}  # of the others: 2
OPTIONS = {"diloco": {"sync_every": 3}, "cp": {"method": "ring"}}  # the step that is predicted and measured
# Kernels of the MLP on one GPU: three products and two ReLUs; their gradients, those of three biases, of the loss and
# of its start, and two fills; the eight operations of AdamW on all parameters at once.
UNITS = {"forward": 3 * 4 + 2, "backward": 5 * 4 + 2 + 3 + 2 + 2, "optimizer": 8}
PEAK = 0.02  # of the allocator's
COUNTED = 0.001  # of the allocator's bytes between two steps: losses that were not read yet come and go
# DDP replaces its first buckets in the second step. NCCL's own thread holds them until its next look, which raises the
# peak, and frees them, which no profile shows: both are a matter of timing.
END = 0.01  # of what is allocated at the end of a profiled step
# DiLoCo's peak is in later synchronizations, when the outer optimizer has state; the plan has the first one.
# FSDP1 gives back what it gathered when the other stream has used it: a matter of timing, of up to one block.
PEAK_OF = {"diloco": 0.1, "fsdp": 0.035}


@pytest.fixture
def trained(shared_run, monkeypatch):
    """A finished run of a strategy, and its plan."""
    machine = settings("t4x2", Path(os.environ["CUDA_STAND_IN_FOLDER"]), kernel_us=KERNEL * 1e6, devices=8)
    for name, value in machine.items():
        monkeypatch.setenv(name, value)

    def run(strategy: str):
        workload, nproc = WORKLOADS.get(strategy, "mlp"), RANKS.get(strategy, 2)
        asked = {"nproc": nproc, "batch_size": 16, "steps": 8, "samples": 16 * nproc * 8, "precision": "fp32"}
        asked |= {"options": OPTIONS[strategy]} if strategy in OPTIONS else {}
        spec = Spec(strategy, workload=workload, device="cuda", **asked)
        plan = predict(spec)
        handle = shared_run(spec)
        assert handle.state.status.state == "finished", handle.logs(0)
        return handle.state, plan

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_and_memory_are_those_of_the_plan_and_of_the_allocator(strategy, trained):
    state, plan = trained(strategy)
    for part in plan.classes:
        for rank in part.ranks:
            assert state.ranks[rank].traffic.ops == part.ops
    assert all(entry.reason or entry.measured == pytest.approx(entry.theory, rel=0.01) for entry in ledger(state))
    assert len(outcomes(state)) == len(plan.ranks)
    for one in outcomes(state):
        limit = PEAK_OF.get(strategy, PEAK) * one.peak_predicted
        replaced = state.ranks[one.rank].owners["communication"]  # the size of DDP's first buckets
        assert -limit <= one.peak_measured - one.peak_predicted <= limit + replaced
    for rank in state.ranks.values():
        owners = {owner: size for owner, size in rank.owners.items() if owner != "activations"}
        profiled = rank.memory_step
        allocated = rank.steps.memory["allocated"][profiled.step - 1]  # the step in which owners are counted last
        assert sum(owners.values()) == pytest.approx(allocated, rel=COUNTED), owners
        within = {owner: sizes[-1] for owner, sizes in profiled.owners.items()}
        replaced = rank.owners["communication"]
        assert -END * allocated <= sum(within.values()) - allocated <= END * allocated + replaced, within
        assert profiled.peak <= rank.peak_memory * (1 + PEAK)


def test_phases_are_the_time_of_their_kernels(trained):
    state, _ = trained("single")
    steps = state.ranks[0].steps
    for phase, units in UNITS.items():
        assert min(steps.phases[phase]) == pytest.approx(units * KERNEL, rel=CLOSE), phase


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp", "pp"])
def test_the_update_takes_as_long_with_every_strategy(strategy, trained):
    state, _ = trained(strategy)
    for rank in state.ranks.values():
        assert min(rank.steps.phases["optimizer"]) == pytest.approx(UNITS["optimizer"] * KERNEL, rel=CLOSE)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "ep"])
def test_collectives_on_the_timeline_have_their_bytes_and_exposed_is_what_no_kernel_covers(strategy, trained):
    state, plan = trained(strategy)
    for rank in state.ranks.values():
        timeline = rank.timeline
        done = [(call.op, call.bytes, len(call.ranks)) for call in timeline.comm]
        assert sorted(done) == sorted(tuple(call) for call in plan.classes[0].calls)
        sent = sum(call.end - call.start for call in timeline.comm)
        rounding = 1e-6 * len(timeline.comm)  # times are stored in microseconds
        assert 0 <= sum(timeline.exposed.values()) <= sent + rounding
        computing = sum(end - start for start, end in timeline.busy)
        assert computing <= timeline.seconds


def test_a_timeline_shows_what_a_script_overlaps(on_machine):
    """Products of matrices and a copy that begin together, within an all-reduce; then both one after the other."""
    on_machine("t4x2", kernel_us=KERNEL * 1e6)
    run = warm_run(OVERLAP, nproc=2, device="cuda")
    assert run.state.status.state == "finished", run.logs(0, "stderr")
    timeline = run.state.ranks[0].timeline
    around = next(call for call in timeline.comm if call.bytes == REDUCED)
    (covered,) = ((start, end) for start, end in timeline.busy if around.start < start and end < around.end)
    assert covered[1] - covered[0] == pytest.approx(PRODUCTS, rel=CLOSE)
    after = [end - start for start, end in timeline.busy if start >= around.end]
    assert max(after) == pytest.approx(PRODUCTS + COPY, rel=CLOSE)
    alone = around.end - around.start - PRODUCTS
    of_gloo = max(call.end for call in timeline.comm) - around.end  # with which the ranks meet; nearly nothing
    assert -CLOSE * PRODUCTS < sum(timeline.exposed.values()) - alone < CLOSE * PRODUCTS + of_gloo
