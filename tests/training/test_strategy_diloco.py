"""DiLoCo: replicas that are synchronized only now and then, and are expected to train something else."""

from __future__ import annotations

import pytest
from weaving import record

from labkit.analysis.theory.formulas import theory
from labkit.plan.spec import Spec
from labkit.training.strategies.rules import departures

ASKED = {"workload": "mlp", "batch_size": 48, "scaling": "strong", "steps": 4, "samples": 110, "device": "cpu"}


def test_replicas_that_are_not_synchronized_differ_from_one_process_and_the_row_says_so(tmp_path):
    spec = Spec("diloco", nproc=2, options={"sync_every": 2}, **ASKED)
    ranks, (single,) = record(spec, tmp_path / "run"), record(Spec("single", nproc=1, **ASKED), tmp_path / "one")
    means = [sum(losses) / len(losses) for losses in zip(*(rank["losses"] for rank in ranks))]
    assert means[0] == pytest.approx(single["losses"][0], rel=1e-5), "the first step starts from the same weights"
    assert all(abs(mean - loss) > 1e-4 * loss for mean, loss in zip(means[1:], single["losses"][1:]))
    assert "sync_every=2: each replica trains on its own" in departures(spec)[0]
    assert "not those of one process" in spec.strategy_row.note("cpu")


def test_the_formula_is_the_mean_and_the_reason_says_when_all_is_sent():
    spec = Spec("diloco", nproc=2, options={"sync_every": 10}, **ASKED)
    (mean,), (ddp, *_) = theory(spec, 3), theory(Spec("ddp", nproc=2, **ASKED))
    assert mean.theory == ddp.theory / 10
    assert (
        mean.extra == ((-mean.theory, mean.extra[0][1]),) and "every step that is a multiple of 10" in mean.extra[0][1]
    )
    assert theory(spec, 20)[0].extra[0][0] == 9 * mean.theory
