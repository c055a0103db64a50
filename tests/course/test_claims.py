"""Claims on trial: computed claims, verdicts from figures, claims that this machine cannot decide, and how they are
displayed."""

from __future__ import annotations

import sys

import pytest

import labkit.course.claims.computed
from labkit.course.claims import CLAIMS
from labkit.course.claims.measured import FAILS, HOLDS, JOBS, OPEN, PARTLY, Ruling, Trials, ask
from labkit.setup.machine import Gpu, Machine

MIB = 1 << 20
SPEED = {
    "single": 1.0,
    "dp": 1.3,
    "ddp": 1.85,
    "fsdp2": 1.6,
    "dp of an mlp": 2.0,
    "ddp of an mlp": 1.0,
    "ddp on 4": 3.5,
    "ddp on 8": 6.0,
    "fsdp2 on 4": 3.7,
    "fsdp2 on 8": 7.5,
}


def machine(gpus: int = 0, cores: int = 2) -> Machine:
    return Machine(tuple(Gpu(index, "a GPU", 24 << 30, (8, 0)) for index in range(gpus)), cores, 16 << 30)


def measured(job: str, speed: float, run: str = "a-run", **owners: int) -> dict:
    """A summary of a run with `speed` thousand samples per second at its median step."""
    memory = {"parameters": 2 * MIB, "gradients": 2 * MIB, "optimizer": 4 * MIB, "activations": 8 * MIB} | owners
    seconds = JOBS[job].global_batch / speed / 1000
    ranks = [{"step_seconds_median": seconds, "memory_bytes": memory} for _ in range(JOBS[job].processes)]
    return {"run": run, "state": "finished", "ranks": ranks, "ledger": []}


def ruling_on(name: str, on: Machine, **speeds) -> Ruling:
    """The ruling on a claim if the jobs have these speeds, by round, relative to one device."""
    runs = {
        job: [measured(job, speed) for speed in speeds.get(job.replace(" ", "_"), [SPEED[job]] * 3)] for job in SPEED
    }
    return CLAIMS[name].judge(Trials(on, runs))


# ---- computed claims


def test_the_parameters_of_the_cnn_are_counted_in_the_model():
    ruling = CLAIMS["cnn-parameters"].judge(Trials(machine()))
    assert ruling.verdict == FAILS
    assert ruling.figures == {"parameters": (405_898.0,)}
    assert "832 + 51,264 + 204,928 + 147,584 + 1,290 = 405,898" in ruling.evidence


@pytest.mark.parametrize("blocks, verdict", [([100_000, 20_100], HOLDS), ([100_000, 26_000], FAILS)])
def test_a_model_with_about_120_thousand_parameters_would_make_the_claim_hold(monkeypatch, blocks, verdict):
    monkeypatch.setattr(labkit.course.claims.computed, "ask", lambda code: (blocks, ""))
    assert CLAIMS["cnn-parameters"].judge(Trials(machine())).verdict == verdict


def test_each_of_two_ranks_takes_the_whole_batch_size():
    ruling = CLAIMS["batch"].judge(Trials(machine()))
    assert ruling.verdict == FAILS
    assert ruling.figures == {"samples of a rank": (128.0,), "steps of an epoch": (235.0,)}
    assert "469 steps" in ruling.evidence and "nn.DataParallel" in ruling.evidence


def test_fsdp_reduce_scatters_gradients_and_the_ledger_of_a_run_is_quoted():
    alone = CLAIMS["fsdp-all-reduce"].judge(Trials(machine()))
    assert alone.verdict == FAILS
    assert set(alone.figures) == {"reduce_scatter", "all_gather"}
    assert alone.figures["all_gather"][0] == 2 * alone.figures["reduce_scatter"][0]
    assert "gloo implements a reduce-scatter as an all-reduce" in alone.evidence
    summary = measured("fsdp2", 1.0, run="one-x2")
    summary["ledger"] = [{"op": "reduce_scatter", "measured": 3.0 * MIB, "reason": "for a reason"}]
    with_run = CLAIMS["fsdp-all-reduce"].judge(Trials(machine(), {"fsdp2": [summary]}))
    assert "the run one-x2 sent: reduce_scatter 3.0 MiB (for a reason)" in with_run.evidence


def test_nccl_on_macos_says_what_is_documented_and_what_is_run():
    ruling = CLAIMS["nccl-macos"].judge(Trials(machine()))
    assert ruling.verdict == FAILS
    assert ruling.evidence.startswith("Run here" if sys.platform == "darwin" else "Documented, not run")
    assert "is_nccl_available() is " in ruling.evidence


def test_on_macos_torch_itself_decides(monkeypatch):
    for there in (True, False):
        here = {"system": "Darwin", "torch": "2.9", "cuda": None, "nccl": there, "message": ""}
        monkeypatch.setattr(labkit.course.claims.computed, "ask", lambda code, here=here: (here, ""))
        ruling = CLAIMS["nccl-macos"].judge(Trials(machine()))
        assert ruling.verdict == (HOLDS if there else FAILS) and "on macOS (torch 2.9 without CUDA)" in ruling.evidence


@pytest.mark.parametrize("name", ["cnn-parameters", "nccl-macos"])
def test_a_claim_cannot_be_decided_if_torch_fails(monkeypatch, name):
    for module in (labkit.course.claims.computed, labkit.course.claims.computed):
        monkeypatch.setattr(module, "ask", lambda code: (None, "ImportError: no torch"))
    ruling = CLAIMS[name].judge(Trials(machine()))
    assert ruling.verdict == OPEN and "ImportError: no torch" in ruling.evidence


def test_code_in_another_process_returns_its_result_or_its_error():
    assert ask("print('noise'); print('[1, 2]')") == ([1, 2], "")
    assert ask("raise ValueError('so it is')") == (None, "ValueError: so it is")


# ---- from figures to a verdict


@pytest.mark.parametrize(
    "name, speeds, verdict",
    [
        ("two-gpus", {}, HOLDS),
        ("two-gpus", {"ddp": [1.85, 1.85, 1.95]}, PARTLY),
        ("two-gpus", {"ddp": [1.5, 1.6, 1.7]}, FAILS),
        ("ddp-dp", {}, HOLDS),
        ("ddp-dp", {"dp": [0.5, 0.5, 0.5]}, FAILS),
        ("dp-small", {}, HOLDS),
        ("dp-small", {"dp_of_an_mlp": [0.5, 0.6, 0.7]}, FAILS),
        ("fsdp-small", {}, HOLDS),
        ("fsdp-small", {"fsdp2": [1.85, 1.9, 1.9]}, FAILS),
        ("fsdp-scaling", {"fsdp2": [1.8] * 3}, HOLDS),
        ("fsdp-scaling", {}, PARTLY),
        ("ddp-overhead", {}, HOLDS),
        ("ddp-overhead", {"ddp": [1.5] * 3}, FAILS),
        ("speedup-129", {"ddp": [1.3] * 3}, HOLDS),
        ("speedup-129", {}, FAILS),
        ("scaling", {}, HOLDS),
        ("scaling", {"ddp_on_8": [4.0, 4.0, 4.0]}, PARTLY),
        ("scaling", {"ddp": [1.2] * 3, "ddp_on_4": [2.0] * 3, "ddp_on_8": [3.0] * 3}, FAILS),
    ],
)
def test_gpus_decide(name, speeds, verdict):
    ruling = ruling_on(name, machine(gpus=8), **speeds)
    assert ruling.verdict == verdict
    assert ruling.evidence.startswith("GPUs: ")


@pytest.mark.parametrize(
    "name", ["two-gpus", "speedup-129", "ddp-overhead", "ddp-dp", "dp-small", "fsdp-small", "scaling", "fsdp-scaling"]
)
def test_cpu_ranks_show_their_figures_and_do_not_decide(name):
    ruling = ruling_on(name, machine())
    assert ruling.verdict == OPEN
    assert ruling.evidence.startswith("CPU ranks: ") and "GPUs" in ruling.evidence
    assert all(figures for figures in ruling.figures.values())
    assert ("Emulated on CPU" in ruling.evidence) == name.startswith(("ddp-dp", "dp"))


def test_the_median_is_shown_with_spread_and_count():
    ruling = ruling_on("two-gpus", machine(), ddp=[1.0, 2.0, 4.0])
    assert ruling.figures == {"ddp / single": pytest.approx((1.0, 2.0, 4.0))}
    assert (
        "2.00 times as many samples per second as Single on 1 (cnn) (median of 3 pairs of runs, from 1.00 to 4.00)"
        in ruling.evidence
    )


def test_two_gpus_do_not_decide_scaling_to_eight():
    runs = {job: [measured(job, SPEED[job])] for job in ("single", "ddp")}
    ruling = CLAIMS["scaling"].judge(Trials(machine(gpus=2), runs))
    assert ruling.verdict == OPEN
    assert "on 2: 1.85 times one device (one pair of runs), claimed 1.9" in ruling.evidence
    assert "on 8: not measured, 8 ranks would have to share 2 GPUs" in ruling.evidence


@pytest.mark.parametrize(
    "sharded, verdict",
    [
        ({"parameters": MIB, "gradients": MIB, "optimizer": 2 * MIB}, PARTLY),
        ({"parameters": MIB, "gradients": MIB, "optimizer": 2 * MIB, "activations": 4 * MIB}, HOLDS),
        ({}, FAILS),
    ],
)
def test_memory_is_decided_by_owner_on_cpu_ranks_too(sharded, verdict):
    runs = {"ddp": [measured("ddp", 1.0)], "fsdp2": [measured("fsdp2", 1.0, **sharded)]}
    ruling = CLAIMS["fsdp-memory"].judge(Trials(machine(), runs))
    assert ruling.verdict == verdict
    assert set(ruling.figures) == {"parameters", "gradients", "optimizer", "activations", "together"}


def test_pinned_memory_needs_a_gpu_and_is_decided_by_one():
    assert "this machine has no GPU" in CLAIMS["pin-memory"].judge(Trials(machine())).evidence
    for faster, verdict in ((1.17, HOLDS), (1.02, FAILS)):
        runs = {"pinned": [measured("pinned", faster)] * 2, "pageable": [measured("pageable", 1.0)] * 2}
        assert CLAIMS["pin-memory"].judge(Trials(machine(gpus=1), runs)).verdict == verdict


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.needs])
def test_without_a_run_nothing_is_decided(name):
    ruling = CLAIMS[name].judge(Trials(machine()))
    assert ruling.verdict == OPEN and not any(ruling.figures.values())


# ---- what DTensor sends


def test_an_all_to_all_on_cpu_ranks_is_an_all_gather():
    ruling = CLAIMS["dtensor-all-to-all"].judge(Trials(machine()))
    assert ruling.verdict == PARTLY and "calls all_gather_into_tensor on a mesh of 4 CPU ranks" in ruling.evidence


@pytest.mark.parametrize(
    ("answer", "verdict"), [((["9.9", ["shard_dim_alltoall"]], ""), HOLDS), ((None, "ImportError: no torch"), OPEN)]
)
def test_another_torch_may_send_an_all_to_all(monkeypatch, answer, verdict):
    monkeypatch.setattr(labkit.course.claims.computed, "ask", lambda code: answer)
    assert CLAIMS["dtensor-all-to-all"].judge(Trials(machine())).verdict == verdict


def test_modelled_thresholds_decide_nothing_and_have_figures():
    ruling = CLAIMS["tp-batch"].judge(Trials(machine()))
    assert ruling.verdict == OPEN and ruling.evidence.startswith("Modelled, not run")
    assert ruling.figures["FSDP × TP 8 on h100x8"][0] > ruling.figures["FSDP on h100x8"][0] > 1000
