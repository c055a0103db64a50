"""Predictions against runs: peak memory, collectives and the time of a step on CPU ranks."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from itertools import combinations
from typing import Any

from labkit.analysis.prediction import Outcome, outcomes
from labkit.benchmarks.figure import Figure
from labkit.plan.spec import Spec
from labkit.prediction.link_table import store
from labkit.prediction.predict import predict
from labkit.prediction.timing import timed
from labkit.runs.calibration import calibrate, plan
from labkit.runs.handle import run
from labkit.runs.settling import with_ranks
from labkit.training.strategies.pipelines import V_SHAPED

_STEPS = 40
_RANKS = (2, 4)
_SECONDS = 10.0  # for which collectives are measured between each number of ranks
_DIFFERENT = 0.05  # two steps that differ by a smaller share have no order
_CASES = (
    *(("single", workload, 1) for workload in ("cnn", "mlp", "gpt")),
    *((strategy, "cnn", 2) for strategy in ("ddp", "zero1", "fsdp", "fsdp2", "tp", "pp")),
    *((strategy, "mlp", 2) for strategy in ("ddp", "zero1", "fsdp", "fsdp2", "tp", "pp")),
    *((strategy, "gpt", 2) for strategy in ("ddp", "fsdp2", "tp", "pp", "cp")),
    *((strategy, "cnn", 4) for strategy in ("ddp", "fsdp2", "fsdp2_tp", "pp_ddp")),
    *(("pp", workload, 2, schedule) for workload in ("cnn", "gpt") for schedule in V_SHAPED),
)


def predictions() -> list[Figure]:
    """Predicted peak memory, collectives and steps vs. runs that follow at once, after collectives were measured."""
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            for ranks in _RANKS:
                store(calibrate(plan(ranks), seconds=_SECONDS))
            found = {case: _outcomes(*case) for case in _CASES}
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
    return _figures(found)


def _outcomes(strategy: str, workload: str, ranks: int, schedule: str = "") -> tuple[Outcome, ...]:
    options = {"schedule": schedule} if schedule else {}
    spec = with_ranks(Spec(strategy, workload, nproc=ranks, steps=_STEPS, device="cpu", options=options))
    timed(spec, predict(spec))
    return outcomes(run(spec).wait().state)


def _figures(found: dict[tuple[Any, ...], tuple[Outcome, ...]]) -> list[Figure]:
    figures = []
    for (strategy, workload, ranks, *schedule), those in found.items():
        errors = [100 * one.step_error for one in those if one.step_error is not None]
        predicted, measured = ([1000 * (value or 0.0) for value in values] for values in zip(*map(_steps, those)))
        note = f"predicted {max(predicted):.1f} ms, measured {max(measured):.1f} ms per step"
        name = f"{' '.join([strategy, *schedule])}, {workload} × {ranks}: error of the predicted step"
        figures.append(Figure(name, statistics.median(errors), "%", "", tuple(errors), note))
    every = [one for those in found.values() for one in those]
    steps = tuple(statistics.median(abs(100 * (one.step_error or 0.0)) for one in those) for those in found.values())
    peaks = tuple(abs(100 * one.error) for one in every if one.error is not None)
    sent = tuple(float(round(one.sent_predicted or 0) == round(one.sent_measured or 0)) for one in every)
    right = tuple(_in_order(found))
    return [
        *figures,
        Figure("error of the predicted step, without sign", statistics.median(steps), "%", "≤ 8", steps),
        Figure("pairs of strategies in the right order", statistics.fmean(right), "", "1", right, "mean"),
        Figure("error of the predicted peak, without sign", statistics.median(peaks), "%", "≤ 2", peaks),
        Figure("ranks with the predicted bytes sent", statistics.fmean(sent), "", "1", sent, "mean"),
    ]


def _steps(one: Outcome) -> tuple[float | None, float | None]:
    return one.step_predicted, one.step_measured


def _in_order(found: dict[tuple[Any, ...], tuple[Outcome, ...]]) -> list[float]:
    """For each pair of strategies on the same workload and ranks whose measured steps differ: 1 if the predicted ones
    are in the same order, otherwise 0."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for (_, workload, ranks, *_), those in found.items():
        predicted, measured = ([value or 0.0 for value in values] for values in zip(*map(_steps, those)))
        groups[workload, ranks].append((max(predicted), max(measured)))
    pairs = [pair for steps in groups.values() for pair in combinations(steps, 2)]
    return [
        float((one[0] < other[0]) == (one[1] < other[1]))
        for one, other in pairs
        if max(one[1], other[1]) > (1 + _DIFFERENT) * min(one[1], other[1])
    ]
