"""The ledger: formulas compared with the traffic of real runs, to the byte, and the reasons for differences."""

from __future__ import annotations

from collections import Counter

import pytest
from ledgers import entries, spec
from recorded_traffic import RECORDED

from labkit.analysis.ledger import CLOSE
from labkit.analysis.theory.formulas import TRAFFIC, theory
from labkit.plan.spec import SpecError
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS


@pytest.mark.parametrize(("strategy", "workload", "nproc", "asked", "sent"), RECORDED)
def test_formula_and_reasons_give_what_was_measured(strategy, workload, nproc, asked, sent):
    asked = dict(asked)
    step = asked.pop("step", 3)
    demanded = Counter()
    for flow in theory(spec(strategy, workload, nproc, **asked), step):
        demanded[flow.op] += flow.theory + sum(size for size, _ in flow.extra)
    assert {op: size for op, size in demanded.items() if size} == pytest.approx(sent, rel=1e-3)
    for entry in entries(spec(strategy, workload, nproc, **asked), sent, step=step).values():
        apart = abs(entry.measured - entry.theory) > CLOSE * max(entry.measured, entry.theory)
        assert bool(entry.reason) == apart, entry
        assert "not explained" not in entry.reason


def test_every_strategy_was_held_against_a_run():
    assert all(row.traffic is not None for row in STRATEGIES.values())
    assert {name for row in STRATEGIES.values() for name in row.traffic} == TRAFFIC.keys()
    assert {row[0] for row in RECORDED} == STRATEGIES.keys() - {"single", "dp"}  # which have no process group


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_workload_has_its_flows_on_gpus_too(strategy, precision):
    for workload in WORKLOADS:
        try:
            asked = spec(
                strategy, workload, STRATEGIES[strategy].default_nproc or 2, device="cuda", precision=precision
            )
        except SpecError:
            continue  # what cannot run sends nothing
        for flow in theory(asked):
            assert flow.theory >= 0
            assert flow.theory or flow.extra
            assert not any("gloo" in why for _, why in flow.extra)
