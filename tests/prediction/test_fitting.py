"""Whether the ranks of a plan fit into the memory of their devices, with plans and machines that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from linked import MACHINE

from labkit.analysis.prediction import notes
from labkit.figures.tables import Prediction
from labkit.plan.spec import Spec
from labkit.prediction.devices import device
from labkit.prediction.predict import with_fit
from labkit.record.documents import Plan, PredictedTime, decoded
from labkit.setup.machine import Gpu, Machine

GIB = 1 << 30
STEP = {"times": [0.0], "seconds": 1.0, "phases": [], "owners": {}}


def plan_of(spec: Spec, peak: float | None) -> Plan:
    """Two ranks with this peak; on GPUs 1 to 3 GiB come on top of it."""
    rank = {"like": 0, "peak_memory_bytes": peak, "at_peak": {}, "phase_at_peak": "", "memory_bytes": {}}
    part = {"ranks": [0, 1], "step": {**STEP, "peak": peak, "at_peak": {}}, "ops": {}, "calls": []}
    if spec.device == "cuda":
        part["estimates"] = [{"name": "context", "low": GIB, "high": 3 * GIB, "source": "a book"}]
    ranks = [{**rank, "rank": number, "comm_bytes_per_step": 0} for number in (0, 1)]
    classes = [part] if peak is not None else []
    return decoded({"spec": spec.to_json(), "method": "simulated", "ranks": ranks, "classes": classes}, Plan)


def asked(where: str) -> Spec:
    return Spec(**{"strategy": "ddp", "nproc": 2, "device": where, "precision": "fp32"})


@pytest.mark.parametrize(
    ("peak", "fits", "said"),
    [
        (11 * GIB, True, "The ranks fit: they need 12.0 GiB to 14.0 GiB of 15.0 GiB (NVIDIA T4: 16 GB by the data"),
        (12.5 * GIB, None, "The ranks may fit: they need"),
        (15 * GIB, False, "The ranks do not fit: they need"),
    ],
)
def test_a_rank_needs_its_peak_and_what_is_estimated_on_top_of_it(peak, fits, said):
    spec = asked("cuda")
    plan = with_fit(plan_of(spec, peak), spec, device("t4x2"))
    assert plan.fits is fits
    assert (plan.memory.low_bytes, plan.memory.high_bytes) == (peak + GIB, peak + 3 * GIB)
    assert any(said in note for note in notes(plan))
    assert Prediction(plan).to_json()["fits"] is fits


def test_gpus_of_this_machine_have_the_memory_that_their_driver_reports(monkeypatch):
    spec, gpus = asked("cuda"), [Gpu(number, "a GPU", size * GIB, (8, 0)) for number, size in enumerate((24, 8))]
    monkeypatch.setattr(Machine, "here", lambda: replace(MACHINE, gpus=tuple(gpus)))
    plan = with_fit(plan_of(spec, 6 * GIB), spec)
    assert (plan.memory.limit_bytes, plan.fits) == (8 * GIB, None)
    monkeypatch.setattr(Machine, "here", lambda: replace(MACHINE, gpus=tuple(gpus[:1])))
    plan = with_fit(plan_of(spec, 6 * GIB), spec)
    assert (plan.memory.limit_bytes, plan.fits) == (None, None)
    assert "this machine has 1 GPUs for 2 ranks; name a machine with --machine" in plan.memory.source


@pytest.mark.parametrize(("peak", "fits"), [(7 * GIB, True), (9 * GIB, False), (None, None)])
def test_cpu_ranks_share_the_memory_of_the_machine(peak, fits, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: MACHINE)  # 16 GiB
    spec = asked("cpu")
    plan = with_fit(plan_of(spec, peak), spec)
    assert plan.fits is fits
    if peak is None:
        assert plan.memory.source == "the peak of a rank is known from a trace only"


def test_seconds_per_step_have_the_quartiles_of_simulated_steps():
    spec = asked("cpu")
    plan = plan_of(spec, GIB)
    assert Prediction(plan).to_json()["seconds_per_step"] is None
    plan.time = PredictedTime(0.2, "", low=0.19, high=0.23, samples_per_second=9.0)
    assert Prediction(plan).to_json()["seconds_per_step"] == {
        "seconds": 0.2,
        "low": 0.19,
        "high": 0.23,
    }
