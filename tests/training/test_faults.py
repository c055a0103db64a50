"""Every fault in a real run, with the right finding first, and no finding of kind "wrong" in healthy runs."""

from __future__ import annotations

import pytest
from conftest import wait_until
from generated import ONLY

from labkit import SpecError, run
from labkit.analysis.diagnose import findings
from labkit.plan.script import diff_scripts
from labkit.runs.settling import settle
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES

SMALL = {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 16, "samples": 512, "hang_after": 3}
LENGTH = {"no_set_epoch": {"epochs": 2}}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_diagnosis_names_the_fault(fault):
    job = run("ddp", fault=fault, **SMALL, **LENGTH.get(fault, {"steps": 12}))
    try:
        wait_until(lambda: job.state.over or any(found.name == "hang" for found in findings(job.state)), 120)
        while_it_lasted = findings(job.state)
    finally:
        job.stop()
    found = findings(job.state) if job.state.status["state"] != "stopped" else while_it_lasted
    assert found, f"no findings; the run {job.words}"
    assert found[0].name == FAULTS[fault].finding, [(one.name, one.title) for one in found]
    assert found[0].evidence and found[0].cause and found[0].fix


def test_a_hang_is_told_while_it_lasts_and_ends_with_stop():
    job = run("ddp", fault="skipped_collective", **SMALL, steps=12)
    try:
        hang = wait_until(lambda: next((found for found in findings(job.state) if found.name == "hang"), None), 120)
        assert not job.state.over
        wait_until(lambda: all(rank.waiting for rank in job.state.ranks.values()), 30)
        hang = next(found for found in findings(job.state) if found.name == "hang")
    finally:
        job.stop()
    assert "waited for" in hang.title and "never reached it" in hang.title
    for rank, op, where in ((0, "barrier #", "in fault_step"), (1, "all_reduce #", "in train_step")):
        told = next(part for part in hang.evidence.split("; ") if part.startswith(f"rank {rank}:"))
        assert op in told and where in told and "4 steps done" in told
    assert job.state.status["state"] == "stopped"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_healthy_run_has_no_wrong_finding(strategy):
    row = STRATEGIES[strategy]
    nproc = row.default_nproc or 2
    workload = ONLY.get(strategy, "mlp")
    size = {"nproc": nproc, "batch_size": 4 * nproc, "scaling": "strong", "steps": 9, "samples": 512}
    job = run(strategy, workload=workload, device="cpu", **size).wait(400)
    state = job.state
    assert state.status["state"] == "finished", job.words
    assert [found for found in findings(state) if found.kind in ("wrong", "unseen")] == []
    steps = {rank.rank: sorted(rank.timelines) for rank in state.ranks.values()}
    assert all(those == [3, 8] for those in steps.values()), steps
    assert all(
        rank.memory_step["peak"] == sum(rank.memory_step["at_peak"].values()) > 0 for rank in state.ranks.values()
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_the_script_shows_the_fault(fault):
    healthy = settle("ddp", **SMALL, **LENGTH.get(fault, {"steps": 12}))
    ill = settle("ddp", fault=fault, **SMALL, **LENGTH.get(fault, {"steps": 12}))
    changes = [
        line for line in diff_scripts(healthy, ill).splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert any("(injected)" in line for line in changes)
    assert 2 <= len(changes) <= 40
    assert not any("INJECT_" in line or "labkit" in line for line in changes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fault": "meteor"}, "fault must be one of slow_rank, "),
        (
            {"strategy": "single", "fault": "killed_rank"},
            "needs several processes, and single with --nproc 1 runs in one; use ddp with --nproc 2",
        ),
        (
            {"strategy": "tp", "fault": "no_sampler"},
            "with tp and --nproc 2 all train on the same; use ddp or fsdp2 with --nproc 2",
        ),
        ({"strategy": "fsdp2", "fault": "unused_parameters"}, "affects only DDP, and the strategy is fsdp2"),
        (
            {"strategy": "fsdp2", "fault": "nan_gradient"},
            "needs unsharded gradients, and fsdp2 shards them; use ddp or tp",
        ),
        (
            {"fault": "no_set_epoch", "steps": 5},
            "appears in the second epoch, and the run has only one; use --epochs 2",
        ),
    ],
)
def test_a_fault_that_cannot_be_is_refused_in_one_sentence(fields, words):
    with pytest.raises(SpecError) as refused:
        settle(
            **{"what": fields.get("strategy", "ddp"), "device": "cpu"}
            | {k: v for k, v in fields.items() if k != "strategy"}
        )
    assert words in str(refused.value) and refused.value.field == "fault"
