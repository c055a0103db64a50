"""Tokens per second, FLOP/s and MFU: made-up runs and predictions, peaks, and every front end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from folded import apply, fold, spec, status, step
from linked import MACHINE, table
from linked import cache as cache
from msgspec import structs
from places import RECORDED
from rich.console import Console

from labkit.analysis.comparison import HEADS, cells, rows, sentences
from labkit.analysis.metrics import efficiency, predicted_efficiency
from labkit.analysis.prediction import sentences as said
from labkit.analysis.summary import summarise
from labkit.figures.tables import Prediction, ranks_html, speed_html
from labkit.frontends.panel.predict import plan_html
from labkit.frontends.terminal import line, prediction_table
from labkit.plan.spec import Spec
from labkit.prediction import predict
from labkit.prediction.devices import device
from labkit.prediction.links import store
from labkit.prediction.predict import peak_here, peak_of
from labkit.record.documents import Peak, Plan, decoded, plain
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.setup.machine import Gpu, Machine

STEP = 0.5  # seconds of a step of `folded`
PEAK = {"flops": 4e12, "source": "a made-up device"}


def plan_of(state_or_spec, **fields) -> Plan:
    asked = {"spec": state_or_spec, "method": "simulated", "ranks": [], "classes": []}
    return decoded(asked | {"model_flops": 1e12, "peak": PEAK} | fields, Plan)


def run(*more: dict, workload: str = "cnn", **fields):
    """A run of two ranks that is over, with a prediction of these fields."""
    first = spec(workload=workload, precision="fp32")
    steps = [step(rank, number) for number in (1, 2, 3) for rank in (0, 1)]
    plan = {"kind": "prediction", "prediction": plain(plan_of(first["spec"], **fields))}
    return fold(first, plan, *more, *steps, status("finished"))


def test_model_flops_of_a_step_are_divided_by_its_seconds_and_the_devices():
    found = efficiency(run())
    assert found.flops_per_device == 1e12 / STEP / 2
    assert found.mfu == found.flops_per_device / PEAK["flops"] == 0.25
    assert found.mfu_missing == "" and found.tokens_per_second is None
    assert found.words == ["32 samples/s", "1 TFLOP/s, MFU 25.0 % per device"]


def test_samples_that_are_sequences_have_tokens():
    found = efficiency(run(workload="gpt"))
    assert found.tokens_per_second == 128 * found.samples_per_second
    assert "4,096 tokens/s" in found.words


def test_the_slowest_rank_sets_the_step():
    slow = {"step": 1.0, "data": 0.1, "forward": 0.1, "backward": 0.2, "optimizer": 0.05, "other": 0.55}
    asked = spec(precision="fp32")
    state = fold(asked, {"kind": "prediction", "prediction": plain(plan_of(asked["spec"]))})
    for number in (1, 2, 3):
        apply(state, step(0, number))
        apply(state, step(1, number, seconds=slow))
    assert efficiency(state).flops_per_device == 1e12 / 1.0 / 2


@pytest.mark.parametrize(
    ("without", "fields", "why"),
    [
        ("model_flops", {}, "FLOP/s are not known: the prediction is of an earlier version"),
        ("model_flops", {"method": "formula"}, "FLOP/s are not known: the script could not be traced"),
        ("peak", {}, "MFU is not known: the prediction has no peak of the device"),
        ("", {"peak": {"flops": None, "source": "nobody knows"}}, "MFU is not known: nobody knows"),
    ],
)
def test_what_is_not_known_has_its_reason_and_is_never_guessed(without, fields, why):
    state = run(**fields)
    if without:
        setattr(state.prediction, without, None)
    found = efficiency(state)
    assert (found.mfu, found.mfu_missing) == (None, why)
    assert (found.flops_per_device is None) == (without == "model_flops")


def test_recorded_runs_without_a_prediction_say_so():
    known = 0
    for folder in RunFolder.all(RECORDED):
        follower = Follower(folder)
        follower.poll()
        summary = summarise(follower.state)
        assert summary.mfu is None and summary.flops_per_device is None
        has_speed = summary.samples_per_second is not None
        assert ("predict it before it runs" in summary.mfu_missing) == has_speed
        known += has_speed
    assert known


# ---- predicted


def test_a_prediction_with_the_time_of_a_step_has_the_same_figures():
    asked = Spec(**{"strategy": "ddp", "workload": "gpt", "nproc": 2, "device": "cpu", "precision": "fp32"})
    time = {"seconds": STEP, "samples_per_second": 64.0, "links": ""}
    plan = plan_of(asked.to_json(), time=time, six_nd=9e11)
    found = predicted_efficiency(plan, asked)
    assert (found.tokens_per_second, found.mfu) == (64.0 * 128, 0.25)
    assert predicted_efficiency(plan_of(asked.to_json()), asked).words == []
    shown = ["64 samples/s", "8,192 tokens/s", "1 TFLOP/s, MFU 25.0 % per device"]
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(prediction_table(Prediction(plan)))
    for text in (repr(Prediction(plan)), plan_html(asked, plan), console.export_text()):
        assert ", ".join(shown) in text


# ---- in every front end


def test_every_front_end_shows_the_figures_of_the_summary():
    state = run(workload="gpt", time={"seconds": 0.4, "samples_per_second": 40.0, "links": ""})
    summary = summarise(state)
    assert (summary.flops_per_device, summary.mfu, summary.mfu_missing) == (1e12, 0.25, "")
    shown = " · ".join(efficiency(state).words)
    assert all(words in line(state) for words in efficiency(state).words)
    assert shown in ranks_html("a run", state) and shown in speed_html(state)
    sentence = (
        "Per device, 1 TFLOP/s, MFU 25.0 % was measured; 1.25 TFLOP/s, MFU 31.2 % was predicted."
        " Peak: a made-up device."
    )
    assert sentence in said(state) and sentence in ranks_html("a run", state)


def test_the_comparison_has_them_too(tmp_path):
    (row,) = rows([(RunFolder(tmp_path / "a run"), run(workload="gpt"))], {})
    found = dict(zip(HEADS, cells(row), strict=True))
    assert found["samples/s"] == "32 (4,096 tokens/s)"
    assert found["TFLOP/s (MFU)"] == "1 (25.0%)"
    assert json.loads(json.dumps(row.to_json()))["mfu"] == 0.25
    unknown = replace(row, mfu_missing="MFU is not known: nobody measured")
    assert sentences([unknown, unknown], {}).count("MFU is not known: nobody measured.") == 1


# ---- peaks


def asked(nproc: int = 2, **fields) -> Spec:
    return Spec(**{"strategy": "ddp", "nproc": nproc, "device": "cpu", "precision": "fp32"} | fields)


def test_the_peak_of_a_cpu_is_what_was_measured_for_its_share_of_the_cores(cache, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: MACHINE)
    assert peak_here(asked()).flops is None
    assert "labkit doctor --calibrate" in peak_here(asked()).source
    store(structs.replace(table(2, send=((1024, 1e-3),)), peaks={"fp32": 60e9}))
    assert peak_here(asked()).flops == peak_here(asked(4)).flops == 60e9
    assert peak_here(asked(8)).flops == 30e9, "8 ranks on 4 cores"
    assert "measured on 2026-11-22" in peak_here(asked()).source
    assert peak_here(asked(precision="bf16")).flops is None
    store(structs.replace(table(8, send=((1024, 1e-3),)), peaks={"fp32": 25e9}))
    assert peak_here(asked(8)).flops == 25e9


def test_the_peak_of_a_gpu_is_published(monkeypatch):
    def on(*names: str) -> None:
        gpus = tuple(Gpu(number, name, 1 << 34, (8, 0)) for number, name in enumerate(names))
        monkeypatch.setattr(predict.Machine, "here", lambda: replace(MACHINE, gpus=gpus))

    on("NVIDIA A100-SXM4-80GB")
    assert peak_here(asked(device="cuda", precision="bf16")).flops == 312e12
    on("NVIDIA GeForce RTX 3060")
    assert "NVIDIA GeForce RTX 3060" in peak_here(asked(device="cuda")).source
    on()
    assert "this machine has no GPU" in peak_here(asked(device="cuda")).source
    t4 = device("t4x2")
    assert peak_of(asked(device="cuda", precision="fp16"), t4).flops == 65e12
    missing = peak_of(asked(device="cuda", precision="bf16"), t4)
    assert missing == Peak(None, "NVIDIA T4 has no peak for bf16, only for fp32, fp16")
