"""Predictions: against real runs of every strategy, against formulas, and what happens if a trace fails."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from commands import called
from conftest import warm_run
from folded import apply
from generated import ONLY
from msgspec import structs
from traced import apart as apart

import labkit
from labkit.analysis.prediction import outcomes, ranges, sentences
from labkit.analysis.theory.formulas import states, theory
from labkit.figures import chart
from labkit.figures.tables import PREDICTION_HEADS, Prediction
from labkit.plan.spec import Spec, SpecError
from labkit.prediction import predict as planning
from labkit.prediction.devices import DEVICES
from labkit.prediction.predict import cached, on, predict
from labkit.prediction.tracer import TRACER, TraceFailed, classes, traced
from labkit.record.documents import SpecFields, decoded, plain
from labkit.record.state import RunState
from labkit.training.strategies import STRATEGIES

WORKLOADS = ONLY | {"tp": "gpt", "pp": "cnn"}  # of the others: mlp
LONG_EVALUATIONS = {"gpt", "moe"}
OPTIONS = {"diloco": {"sync_every": 3}}  # the step that is predicted and measured
RANKS = {"single": 1, "fsdp2_tp": 4, "pp_ddp": 4, "pp_fsdp2_tp": 8}  # of the others: 2
MOST_BELOW_AND_ABOVE = 0.02  # of a measured peak
OF_A_PIPELINE = 0.03
STEP_COUNTS = 8  # bytes of the optimizer's step count per tensor, rounded up; no formula counts them


def spec_of(strategy: str, **fields) -> Spec:
    asked = {"workload": WORKLOADS.get(strategy, "mlp"), "nproc": RANKS.get(strategy, 2), "batch_size": 16, "steps": 4}
    asked |= {"options": OPTIONS[strategy]} if strategy in OPTIONS else {}
    asked |= {"samples": 64} if asked["workload"] in LONG_EVALUATIONS else {}
    return Spec(strategy, **({"device": "cpu", "precision": "fp32"} | asked | fields))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prediction_is_what_the_run_then_measures(strategy):
    spec = spec_of(strategy)
    plan = predict(spec)
    assert plan.method == "simulated", plan.reason
    state = warm_run(spec).state
    assert state.prediction == plan, "the run has the cached prediction"
    found = outcomes(state)
    assert len(found) == spec.processes
    assert all((one.error is None) == bool(state.in_threads) for one in found)
    if not state.in_threads:
        limit = OF_A_PIPELINE if spec.strategy_row.constants(spec).get("STAGES") else MOST_BELOW_AND_ABOVE
        assert all(abs(one.error) <= limit for one in found), [(one.peak_predicted, one.peak_measured) for one in found]
    for part in plan.classes:
        for rank in part.ranks:
            assert state.ranks[rank].traffic.ops == part.ops
    held = states(spec)
    for rank, one in enumerate(plan.ranks) if held else ():
        tensors = sum(len(block.parameters) for block in spec.workload_row.blocks(spec.options))
        assert one.memory_bytes["parameters"] == held[rank].parameters
        assert one.memory_bytes["gradients"] == held[rank].gradients
        assert 0 <= one.memory_bytes["optimizer"] - held[rank].optimizer <= STEP_COUNTS * tensors


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("deepspeed", {"stage": 3}),
        ("tp", {"sequence_parallel": True, "loss_parallel": True}),
        ("fsdp", {"sharding": "SHARD_GRAD_OP"}),
    ],
)
def test_prediction_holds_with_options_that_compare_ranks_split_the_loss_or_keep_parameters_gathered(strategy, options):
    spec = spec_of(strategy, options=options)
    plan = predict(spec)
    assert plan.method == "simulated", plan.reason
    state = warm_run(spec).state
    assert all(abs(one.error) <= MOST_BELOW_AND_ABOVE for one in outcomes(state))
    for rank in range(2):
        assert state.ranks[rank].traffic.ops == plan.classes[0].ops


def test_every_collective_of_a_step_is_predicted_in_order():
    spec = spec_of("fsdp2")
    plan, state = predict(spec), warm_run(spec).state
    done = [(call.op, call.bytes, len(call.ranks)) for call in state.ranks[0].timeline.comm]
    assert [tuple(call) for call in plan.classes[0].calls] == done


def test_traffic_is_that_of_the_formula_at_a_thousand_ranks():
    spec = spec_of("ddp", nproc=1024)
    plan = predict(spec)
    assert [part.ranks for part in plan.classes] == [[*range(1024)]]
    by_formula = sum(flow.theory for flow in theory(spec)) / 1024
    assert plan.ranks[1023].comm_bytes_per_step == pytest.approx(by_formula)


def test_shards_of_unequal_size_are_classes():
    spec = spec_of("fsdp2", nproc=3)
    held = states(spec)
    for ranks in classes(spec):
        assert len({held[rank] for rank in ranks}) == 1
    assert len(classes(spec)) == len(set(held))


def test_stages_of_a_pipeline_are_classes_and_many_classes_are_joined_below_the_largest(monkeypatch):
    assert classes(spec_of("pp", workload="mlp", nproc=3)) == [[0], [1], [2]]
    assert classes(spec_of("pp_ddp")) == [[0, 1], [2, 3]]
    spec = spec_of("zero1", workload="gpt", nproc=64)
    held = states(spec)
    monkeypatch.setattr("labkit.prediction.tracer.MOST", 3)
    groups = classes(spec)
    assert len(set(held)) > 3 == len(groups)
    assert sorted(rank for ranks in groups for rank in ranks) == [*range(64)]
    assert all(held[ranks[0]].total >= held[rank].total for ranks in groups for rank in ranks)


def test_a_prediction_is_found_again_whatever_the_length_of_the_run(monkeypatch):
    spec = spec_of("single")
    plan = predict(spec)
    monkeypatch.setattr(planning, "traced", None)  # whatever traces now fails
    assert predict(replace(spec, steps=7, seed=3)) == plan
    assert cached(replace(spec, batch_size=32)) is None


def test_a_damaged_plan_is_predicted_again():
    spec = spec_of("single", batch_size=8)
    plan = predict(spec)
    (file,) = [path for path in planning.user_cache().rglob("plan.json") if '"batch_size": 8' in path.read_text()]
    file.write_text('{"ranks": 3}')
    assert cached(spec) is None
    assert predict(spec) == plan


# ---- failures


def test_an_error_of_the_trace_names_the_line_and_formulas_take_its_place(monkeypatch):
    spec = spec_of("ddp", batch_size=24)
    script = "BATCH_PER_RANK = 4\n"
    monkeypatch.setattr("labkit.prediction.tracer.write_script", lambda *_, **__: script)
    with pytest.raises(TraceFailed, match=r"rank 0 ended with .*parallelize"):
        traced(spec, [0])
    script += "def build_blocks():\n    return 1 / 0\ndef parallelize(blocks, device):\n    return blocks\n"
    plan = predict(spec)
    assert (plan.method, plan.classes) == ("formula", [])
    assert "ZeroDivisionError: division by zero (train.py:3)" in plan.reason
    assert plan.ranks[1].memory_bytes["optimizer"] == states(spec)[1].optimizer
    assert cached(spec) is None
    assert "by formulas, because the trace of rank 0" in repr(Prediction(plan))


def test_a_process_that_is_killed_is_one_sentence_and_the_next_trace_works(monkeypatch):
    spec = spec_of("single", batch_size=40)
    script = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    with (
        monkeypatch.context() as patch,
        pytest.raises(TraceFailed, match="the process that traces was ended by SIGKILL"),
    ):
        patch.setattr("labkit.prediction.tracer.write_script", lambda *_, **__: script)
        traced(spec, [0])
    with monkeypatch.context() as patch, pytest.raises(TraceFailed, match="exit code -9, without a result"):
        patch.setattr("labkit.prediction.tracer.write_script", lambda *_, **__: script.replace("getppid", "getpid"))
        traced(spec, [0])
    assert traced(spec, [0])[0]["step"]["peak"] > 0


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    spec = spec_of("single", batch_size=40)
    traced(spec, [0])
    process = TRACER._process
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr("labkit.prediction.tracer.PATIENCE", 0.1)
    with pytest.raises(TraceFailed, match="took longer than 0 seconds; use a smaller model"):
        traced(spec, [0])
    assert process.poll() == -signal.SIGKILL


# ---- front ends


def test_command_prints_a_table_and_one_json_object(monkeypatch, capsys):
    asked = ["predict", "single", "--workload", "mlp", "--batch-size", "16", "--device", "cpu"]
    monkeypatch.setenv("COLUMNS", "200")
    plan = predict(spec_of("single"))
    assert called(*asked) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*PREDICTION_HEADS, "simulated"))
    assert called(*asked, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == plain(plan)["ranks"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "has no script 'nothing.py'; give the path of a Python file"),
        ([], "nothing to predict was given; name a strategy, the path of a script, or -m MODULE"),
        (["ddp", "--nproc", "2", "--machine", "a100"], "device must be one of here, t4x2, a100x8, h100x8, "),
        (["pp", "--workload", "mlp", "--nproc", "4"], "too few for the 4 stages"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_sentence(arguments, said, capsys):
    assert called("predict", *arguments) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_python_returns_a_table_that_escapes_and_a_figure():
    plan = predict(spec_of("ddp"))
    found = labkit.predict("ddp", workload="mlp", nproc=2, batch_size=16, device="cpu", machine="a100x8")
    assert found.plan.ranks == plan.ranks
    assert found.heads == (*PREDICTION_HEADS, "step", "exposed")
    assert found.rows[0][0] == "0–1"
    assert "modelled for nodes of 8 × A100" in found.title and "MFU" in found.title
    time = found.to_json()["seconds_per_step"]
    assert 0 < time["low"] < time["seconds"] < time["high"]
    assert found.rows[0][-2] == f"{1000 * time['seconds']:.3g} ms"
    assert found.plan.time.modelled and cached(spec_of("ddp")).time is None
    assert chart("timeline", found.state).y.categories[:2] == ("rank 0 predicted", "comm 0 predicted")
    assert "<table>" in found._repr_html_()
    assert [one.name for one in found.figure().data]
    with pytest.raises(SpecError, match=r"has no script 'nothing\.py'"):
        labkit.predict("nothing.py")


def test_outcomes_name_the_owners_of_a_miss_and_the_chart_has_both():
    plan = predict(spec_of("ddp"))
    state = Prediction(plan).state
    assert chart("memory_by_owner", state).x.categories == ("rank 0 predicted", "rank 1 predicted")
    peak = plan.ranks[0].at_peak
    measured = peak | {"activations": peak["activations"] + 5_000_000}
    curve = {"t0": 0.0, "seconds": 1.0, "phases": [], "times": [0.0], "owners": {o: [s] for o, s in measured.items()}}
    curve |= {"peak": sum(measured.values()), "at_peak": measured, "step": 3}
    apply(state, {"kind": "memory_step", "rank": 0, "t": 1.0, **curve})
    apply(state, {"kind": "traffic", "rank": 0, "t": 1.0, "step": 3, "ops": {}})
    first, second = outcomes(state)
    assert first.reason == "measured minus predicted, at the peak: activations +4.77 MiB"
    assert second.peak_measured is None
    said = sentences(state)
    assert "Rank 0 was predicted to send" in said[-1]
    assert len(said) == 3
    assert chart("memory_by_owner", state).x.categories[:2] == ("rank 0 predicted", "rank 0 measured")
    assert sentences(RunState()) == []


def test_what_threads_allocate_is_not_compared():
    state = Prediction(predict(spec_of("ddp"))).state
    curve = {"t0": 0.0, "seconds": 1.0, "phases": [], "times": [0.0], "owners": {}, "peak": 5, "at_peak": {}, "step": 3}
    apply(state, {"kind": "memory_step", "rank": 0, "t": 1.0, **curve})
    assert outcomes(state)[0].peak_measured == 5
    replica = {"replica": 0, "device": "cpu", "forward": 0.1, "cpu": 0.1, "samples": 4, "memory": 8}
    extra = {"outputs": 0, "gradients": 0}
    apply(state, {"kind": "replica", "rank": 0, "t": 2.0, "step": 3, "replicas": [replica], "extra": extra})
    assert outcomes(state)[0].peak_measured is None
    assert "not compared: the threads of the replicas allocate memory" in sentences(state)[1]


def test_what_gloos_threads_allocate_is_not_compared():
    for method, compared in (("fp16", True), ("powersgd", False)):
        own = spec_of("ddp", options={"compression": method}).to_json()
        plan = structs.replace(predict(spec_of("ddp")), spec=decoded(own, SpecFields))
        state = Prediction(plan).state
        curve = {"t0": 0.0, "seconds": 1.0, "phases": [], "times": [0.0], "owners": {}, "peak": 5, "at_peak": {}}
        apply(state, {"kind": "memory_step", "rank": 0, "t": 1.0, "step": 3, **curve})
        assert (outcomes(state)[0].peak_measured == 5) == compared
        assert ("not compared: PowerSGD's callbacks" in " ".join(sentences(state))) == (not compared)


def test_ranges_are_short():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"


# ---- GPUs

# The most that torch's allocator handed out in four steps on two T4s of the CUDA stand-in (tests/cuda_stand_in).
ALLOCATED = {
    ("single", "gpt"): 122_575_360,
    ("dp", "mlp"): 33_887_744,
    ("ddp", "mlp"): 33_839_104,
    ("fsdp2", "gpt"): 117_152_768,
}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="measured with torch 2.13")
@pytest.mark.parametrize(("strategy", "workload"), ALLOCATED)
def test_peak_on_gpus_is_that_of_the_allocator_without_a_gpu(strategy, workload):
    spec = spec_of(strategy, workload=workload, device="cuda")
    plan = on(predict(spec), spec, DEVICES["t4x2"])
    assert plan.method == "simulated", plan.reason
    (part,) = plan.classes
    assert part.step.peak == pytest.approx(ALLOCATED[strategy, workload], rel=MOST_BELOW_AND_ABOVE)
    assert all(one.peak_memory_bytes == sum(one.at_peak.values()) == part.step.peak for one in plan.ranks)


def test_a_number_of_an_optimizer_is_not_in_the_memory_of_a_gpu():
    spec = spec_of("single", device="cuda")
    (rank,) = predict(spec).ranks
    assert rank.memory_bytes["optimizer"] == states(spec)[0].optimizer


def test_gpus_of_one_process_share_its_work():
    (alone,), (both,) = (predict(spec_of(name, device="cuda")).ranks for name in ("single", "dp"))
    assert both.flops == pytest.approx(2 * alone.flops)
    assert both.at_peak["parameters"] == alone.at_peak["parameters"]
