"""Claims of common guides: what torch does in a process group of one rank, sizes by formula, modelled and documented
evidence."""

from __future__ import annotations

import pytest

from labkit.course.claims import CLAIMS
from labkit.course.claims.measured import BEHAVIOUR, FAILS, HOLDS, OPEN, PARTLY, Ruling, Trials, ask
from labkit.setup.machine import Machine


@pytest.fixture(scope="module")
def tried() -> tuple[dict, str]:
    return ask(BEHAVIOUR)


def judged(name: str, monkeypatch, answer: tuple) -> Ruling:
    monkeypatch.setattr(Trials, "behaviour", lambda trials: answer)
    return CLAIMS[name].judge(Trials(Machine((), 2, 16 << 30)))


@pytest.mark.parametrize(
    ("name", "verdict", "evidence"),
    [
        ("cpu-average", FAILS, "the device of the parameters"),
        ("devices", FAILS, "raises “device_ids can only be None or contain a single element.”"),
        ("sum", PARTLY, "2.00 times as large with SGD and 1.00 times as large with AdamW"),
        ("wrap-1m", FAILS, "min_num_params=1,000,000 makes 1 unit, 100,000 makes 3 units"),
        ("optimizer-order", PARTLY, "DDP keeps the parameters, so the order does not matter; FSDP2 replaces them"),
        ("evaluate-module", PARTLY, "with Linear, a forward pass in evaluation communicates nothing; with BatchNorm"),
    ],
)
def test_torch_decides_what_it_does(name, verdict, evidence, monkeypatch, tried):
    ruling = judged(name, monkeypatch, tried)
    assert ruling.verdict == verdict and ruling.evidence.startswith("Run here: ") and evidence in ruling.evidence


@pytest.mark.parametrize(
    ("name", "changed", "verdict"),
    [
        ("devices", {"two_devices": ""}, HOLDS),
        ("sum", {"update_ratios": {"SGD": 2.0, "AdamW": 2.0}}, HOLDS),
        ("sum", {"update_ratios": {"SGD": 1.0, "AdamW": 1.0}}, FAILS),
        ("wrap-1m", {"units": {"1000000": 5, "100000": 6}}, HOLDS),
        ("optimizer-order", {"parameters_kept": {"DDP": False, "FSDP2": False}}, HOLDS),
        ("evaluate-module", {"broadcasts_in_evaluation": {"Linear": False, "BatchNorm": False}}, FAILS),
    ],
)
def test_another_torch_may_decide_otherwise(name, changed, verdict, monkeypatch, tried):
    seen, error = tried
    assert judged(name, monkeypatch, (seen | changed, error)).verdict == verdict


def test_without_torch_these_claims_are_open(monkeypatch):
    for name in ("cpu-average", "devices", "sum", "wrap-1m", "optimizer-order", "evaluate-module"):
        ruling = judged(name, monkeypatch, (None, "ImportError: no torch"))
        assert ruling.verdict == OPEN and "ImportError: no torch" in ruling.evidence


@pytest.mark.parametrize(
    ("name", "verdict", "figures"),
    [
        ("65b", FAILS, {"states, GB": (1040.0,), "memory, GB": (640.0,)}),
        ("7b", FAILS, {"one rank, GB": (112.0,), "each of two, GB": (56.0,)}),
        ("1b-10b", PARTLY, {"1B, GB": (16.0,), "10B, GB": (160.0,)}),
        ("overhead", PARTLY, {"sent on 2": (1.0,), "sent on 4": (1.5,), "sent on 8": (1.75,)}),
        ("rank-0-accuracy", FAILS, {"samples of rank 0": (7500.0,), "samples": (60_000.0,)}),
    ],
)
def test_formulas_decide_sizes(name, verdict, figures, monkeypatch):
    ruling = judged(name, monkeypatch, (None, ""))
    assert ruling.verdict == verdict and ruling.figures == {key: pytest.approx(each) for key, each in figures.items()}


@pytest.mark.parametrize(("peak", "verdict"), [(40 << 20, FAILS), (2 << 30, HOLDS)])
def test_the_memory_of_a_small_model_is_measured(peak, verdict):
    measured = {"single": [{"run": "a", "ranks": [{"peak_memory_bytes": peak}]}]}
    ruling = CLAIMS["2-gb"].judge(Trials(Machine((), 2, 16 << 30), measured))
    assert ruling.verdict == verdict and "the states of 120,000 parameters take 1.8 MiB" in ruling.evidence


def test_modelled_figures_are_labelled_and_decide_nothing(monkeypatch):
    ruling = judged("fsdp-8", monkeypatch, (None, ""))
    assert ruling.verdict == OPEN and ruling.evidence.startswith("Modelled, not run") and ruling.figures
    assert all(0.9 < ratio < 1.1 for (ratio,) in ruling.figures.values())


def test_documented_verdicts_say_that_they_were_not_run(monkeypatch):
    starts = {"documented": "Documented, not run here: ", "argued": "By argument: "}
    found = [(name, starts[claim.how]) for name, claim in CLAIMS.items() if claim.how in starts]
    assert len(found) == 4
    for name, start in found:
        assert judged(name, monkeypatch, (None, "")).evidence.startswith(start)
