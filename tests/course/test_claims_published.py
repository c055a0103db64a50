"""Claims that published runs judge: which runs are compared, the verdicts of the data, and that other data decide
otherwise."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import labkit.course.claims.computed as judged
from labkit.course.claims import CLAIMS
from labkit.course.claims.measured import FAILS, HOLDS, OPEN, PARTLY, Ruling, Trials
from labkit.prediction.scale.atlas import Published, common, failed, select, speed
from labkit.prediction.scale.layouts import SHARDINGS
from labkit.setup.machine import Machine

NAMES = [name for name, claim in CLAIMS.items() if claim.how == "published"]


def ruling_on(name: str) -> Ruling:
    return CLAIMS[name].judge(Trials(Machine((), 2, 16 << 30)))


@pytest.fixture
def base() -> Published:
    """A run on 64 GPUs with every degree above 1."""
    return next(run for run in select(model="nanotron Llama 8B", gpus=64, layout="tp=4,pp=2,zero=1") if speed(run))


@pytest.fixture
def given(monkeypatch, base):
    """Replaces the published runs: each is the base with another layout and speed (None: it failed)."""

    def give(*changes: tuple[float | None, dict]) -> None:
        runs = []
        for number, (rate, changed) in enumerate(changes):
            measured = replace(base.measured, tokens_per_second_per_gpu=rate, fits=rate is not None)
            runs.append(replace(base, line=number, layout=replace(base.layout, **changed), measured=measured))
        monkeypatch.setattr(judged, "published", lambda: (tuple(runs), ()))

    return give


# ---- which runs are compared


@pytest.mark.parametrize(
    ("factor", "follow"),
    [
        ("tensor", ("data", "shards", "micro_batches")),
        ("micro_batch", ("micro_batches",)),
        ("micro_batches", ("micro_batch",)),
    ],
)
def test_compared_runs_differ_in_the_factor_and_what_follows_only(factor, follow):
    groups = judged.matched(judged.usable(), lambda run: getattr(run.layout, factor), factor, *follow)
    assert len(groups) > 20
    for group in groups.values():
        runs = [run for several in group.values() for run in several]
        assert len(group) > 1 and len({common(run) for run in runs}) == 1
        assert len({(run.training.devices, run.training.machine.name) for run in runs}) == 1
        for field in fields(runs[0].layout):
            if field.name not in (factor, *follow):
                assert len({repr(getattr(run.layout, field.name)) for run in runs}) == 1, field.name


@pytest.mark.thorough
def test_runs_on_too_many_gpus_are_left_out_and_the_evidence_says_so():
    assert max(run.training.devices for run in judged.usable()) <= judged.MOST_GPUS
    for name in NAMES:
        said = ruling_on(name).evidence
        assert "Without runs on more than 256 GPUs" in said and "repeated layouts differ by" in said


# ---- what the data say


@pytest.mark.thorough
def test_published_runs_decide_three_claims_and_say_what_they_lack_for_the_fourth():
    assert {name: ruling_on(name).verdict for name in NAMES} == {
        "fsdp-16": OPEN,
        "tp-node": HOLDS,
        "micro-batch": PARTLY,
        "pipeline-4x": FAILS,
    }
    fsdp = ruling_on("fsdp-16")
    assert "no two published runs differ in nothing but FSDP and DDP" in fsdp.evidence
    assert "Modelled, not run: " in fsdp.evidence and len(fsdp.figures["ZeRO-1 / DDP"]) > 50
    assert len(ruling_on("tp-node").figures["TP 16 / TP 8"]) > 50


# ---- other data decide otherwise


@pytest.mark.parametrize(("rates", "verdict"), [((100, 50), HOLDS), ((100, 150), FAILS), ((None, 50), OPEN)])
def test_tensor_parallelism_across_nodes_is_judged_by_pairs(given, rates, verdict):
    near, far = rates
    given((near, {"tensor": 8, "data": 4, "shards": 4}), (far, {"tensor": 16, "data": 2, "shards": 2}))
    assert ruling_on("tp-node").verdict == verdict


def test_a_pair_that_differs_in_something_else_decides_nothing(given):
    given((100.0, {"tensor": 8}), (50.0, {"tensor": 16, "pipeline": 4}))
    assert ruling_on("tp-node").verdict == OPEN


@pytest.mark.parametrize(("rates", "verdict"), [((10, 20, 30), HOLDS), ((10, 20, 15), FAILS), ((10, 20, None), HOLDS)])
def test_the_largest_micro_batch_that_ran_counts(given, rates, verdict):
    given(*((rate, {"micro_batch": size, "micro_batches": 16 // size}) for rate, size in zip(rates, (1, 2, 4))))
    assert ruling_on("micro-batch").verdict == verdict


@pytest.mark.parametrize(("rates", "verdict"), [((100, 80), HOLDS), ((80, 100), FAILS), ((80, None), OPEN)])
def test_pipelines_with_many_and_few_micro_batches_are_compared(given, rates, verdict):
    many, few = rates
    given((many, {"micro_batch": 1, "micro_batches": 8}), (few, {"micro_batch": 2, "micro_batches": 4}))
    ruling = ruling_on("pipeline-4x")
    assert ruling.verdict == verdict
    if verdict != OPEN:
        assert ruling.figures == {"many / few": (pytest.approx(many / few),)}


@pytest.mark.thorough
@pytest.mark.parametrize(("rate", "verdict"), [(120.0, HOLDS), (80.0, FAILS)])
def test_a_pair_of_fsdp_and_ddp_would_decide(given, rate, verdict):
    given((rate, {"sharding": SHARDINGS["fsdp"]}), (100.0, {"sharding": SHARDINGS["ddp"]}))
    ruling = ruling_on("fsdp-16")
    assert ruling.verdict == verdict and ruling.figures["FSDP / DDP"] == (pytest.approx(rate / 100),)


def test_runs_that_failed_are_counted_where_the_other_one_ran(given):
    given((100.0, {"sharding": SHARDINGS["zero1"]}), (None, {"sharding": SHARDINGS["ddp"]}))
    assert ruling_on("fsdp-16").verdict == OPEN
    assert any(map(failed, judged.published()[0]))


def test_without_runs_nothing_is_decided(given):
    given()
    assert {ruling_on(name).verdict for name in NAMES} == {OPEN}
