"""Predictions against runs: peak memory, collectives and the time of a step on CPU ranks."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from bench.results import Result
from labkit.analysis.prediction import Outcome, outcomes
from labkit.plan.spec import Spec
from labkit.prediction.links import store
from labkit.prediction.predict import predict
from labkit.prediction.timing import timed
from labkit.record.documents import PredictedTime
from labkit.runs.calibration import calibrate, plan
from labkit.runs.handle import run, with_ranks
from labkit.training.strategies.rules import V_SHAPED

_STEPS = 40
_ROUNDS = 3  # in each of which every case runs once
_RANKS = (2, 4)
_SECONDS = 20.0  # for which collectives are measured between each number of ranks
_DIFFERENT = 0.05  # two steps that differ by a smaller share have no order
_CASES = (
    *(("single", workload, 1) for workload in ("cnn", "mlp", "gpt")),
    *((strategy, "cnn", 2) for strategy in ("ddp", "zero1", "fsdp", "fsdp2", "tp", "pp")),
    *((strategy, "mlp", 2) for strategy in ("ddp", "zero1", "fsdp", "fsdp2", "tp", "pp")),
    *((strategy, "gpt", 2) for strategy in ("ddp", "fsdp2", "tp", "pp", "cp")),
    *((strategy, "cnn", 4) for strategy in ("ddp", "fsdp2", "fsdp2_tp", "pp_ddp")),
    *(("pp", workload, 2, schedule) for workload in ("cnn", "gpt") for schedule in V_SHAPED),
)
# Cases of other sizes, options and batches. The first ones shape only the width of the ranges (`ERROR` of
# labkit/prediction/timing.py); nothing at all was chosen on the last ones, on which the ranges are measured.
_CALIBRATION: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp", "workload": "gpt", "options": {"size": "10M"}, "batch_size": 4},
    {"strategy": "fsdp2", "workload": "gpt", "options": {"context": 256}, "batch_size": 6},
    {"strategy": "zero1", "workload": "cnn", "options": {"accumulate": 2}, "batch_size": 48},
    {"strategy": "ddp", "workload": "moe", "batch_size": 7},
    {"strategy": "ep", "workload": "moe", "batch_size": 12},
    {"strategy": "cp", "workload": "gpt", "options": {"context": 512}, "batch_size": 3},
    {"strategy": "tp", "workload": "gpt", "batch_size": 10},
    {"strategy": "pp", "workload": "mlp", "batch_size": 96},
    {"strategy": "fsdp", "workload": "cnn", "batch_size": 20},
    {"strategy": "dp", "workload": "cnn", "batch_size": 40},
)
_UNSEEN: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp", "workload": "mlp", "options": {"accumulate": 2}, "batch_size": 80},
    {"strategy": "zero1", "workload": "gpt", "batch_size": 5},
    {"strategy": "fsdp2", "workload": "mlp", "batch_size": 72},
    {"strategy": "fsdp", "workload": "gpt", "options": {"context": 256}, "batch_size": 4},
    {"strategy": "zero1", "workload": "moe", "batch_size": 6},
    {"strategy": "tp", "workload": "mlp", "batch_size": 56},
    {"strategy": "pp", "workload": "cnn", "batch_size": 24},
    {"strategy": "cp", "workload": "gpt", "options": {"context": 128}, "batch_size": 8},
    {"strategy": "ep", "workload": "moe", "options": {"context": 128}, "batch_size": 6},
    {"strategy": "ddp", "workload": "cnn", "batch_size": 12},
)
_Case = tuple[Any, ...]
_Found = dict[_Case, list[tuple[Outcome, ...]]]  # the outcome of each rank, in each round


def predictions() -> list[Result]:
    """Predicted peak memory, collectives and steps vs. runs that follow at once; in each round, collectives and
    computation are measured anew, because the speed of a machine changes within minutes."""
    found: _Found = defaultdict(list)
    for _ in range(_ROUNDS):
        with _empty_cache():
            for ranks in _RANKS:
                store(calibrate(plan(ranks), seconds=_SECONDS))
            for case in _CASES:
                found[case].append(_outcomes(*case))
    return _figures(found)


def ranges() -> list[Result]:
    """Steps of cases on which nothing was chosen vs. the ranges stated before: how many are in them, and the errors;
    and the error that 80 % of the other cases have at most, which is the width of the ranges."""
    within, errors, known = list[float](), list[float](), list[float]()
    for _ in range(_ROUNDS):
        with _empty_cache():
            store(calibrate(plan(2), seconds=_SECONDS))
            for case in _UNSEEN:
                time, measured = _timed(case)
                within.append(float(time.low <= measured <= time.high))
                errors.append(abs(100 * (time.seconds / measured - 1)))
            for case in _CALIBRATION:
                time, measured = _timed(case)
                known.append(abs(100 * (time.seconds / measured - 1)))
    width = statistics.quantiles(known, n=5)[-1]
    return [
        Result("steps in their range, of which 80 % should be", statistics.fmean(within), "", "0.8", tuple(within)),
        Result("error of an unseen step, without sign", statistics.median(errors), "%", "", tuple(errors)),
        Result("error that 80 % of the cases have for which the range is chosen", width, "%", "", tuple(known)),
    ]


def _timed(case: dict[str, Any]) -> tuple[PredictedTime, float]:
    """The predicted time of a step, and the seconds measured then."""
    spec = with_ranks(Spec(nproc=2, steps=_STEPS, device="cpu", **case))
    time = timed(spec, predict(spec)).time
    assert time
    return time, max(outcome.step_measured or 0.0 for outcome in _measured(spec))


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Nothing that was predicted or measured before is known."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            yield
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def _outcomes(strategy: str, workload: str, ranks: int, schedule: str = "") -> tuple[Outcome, ...]:
    options = {"schedule": schedule} if schedule else {}
    spec = with_ranks(Spec(strategy, workload, nproc=ranks, steps=_STEPS, device="cpu", options=options))
    timed(spec, predict(spec))
    return _measured(spec)


def _measured(spec: Spec) -> tuple[Outcome, ...]:
    """The outcomes of a run. Raises `RuntimeError` if no step was measured."""
    ended = run(spec).wait()
    found = outcomes(ended.state)
    if not found or any(one.step_measured is None for one in found):
        raise RuntimeError(f"no step of {spec.strategy} on {spec.workload} was measured: the run is {ended.words}")
    return found


def _figures(found: _Found) -> list[Result]:
    steps = {case: _Steps.of(rounds) for case, rounds in found.items()}
    figures = []
    for (strategy, workload, ranks, *schedule), one in steps.items():
        predicted, measured = one.typical
        note = f"predicted {1000 * predicted:.1f} ms, measured {1000 * measured:.1f} ms per step"
        name = f"{' '.join([strategy, *schedule])}, {workload} × {ranks}: error of the predicted step"
        figures.append(Result(name, statistics.median(one.errors), "%", "", one.errors, note))
    every = [one for rounds in found.values() for outcomes in rounds for one in outcomes]
    errors = tuple(abs(statistics.median(one.errors)) for one in steps.values())
    peaks = tuple(abs(100 * one.error) for one in every if one.error is not None)
    sent = tuple(float(round(one.sent_predicted or 0) == round(one.sent_measured or 0)) for one in every)
    right = tuple(_in_order(steps))
    return [
        *figures,
        Result("error of the predicted step, without sign", statistics.median(errors), "%", "≤ 8", errors),
        Result("pairs of strategies in the right order", statistics.fmean(right), "", "1", right, "mean"),
        Result("error of the predicted peak, without sign", statistics.median(peaks), "%", "≤ 2", peaks),
        Result("ranks with the predicted bytes sent", statistics.fmean(sent), "", "1", sent, "mean"),
    ]


@dataclass(frozen=True)
class _Steps:
    """Seconds of a step of the slowest rank in each round."""

    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @classmethod
    def of(cls, rounds: list[tuple[Outcome, ...]]) -> _Steps:
        return cls(
            tuple(max(one.step_predicted or 0.0 for one in outcomes) for outcomes in rounds),
            tuple(max(one.step_measured or 0.0 for one in outcomes) for outcomes in rounds),
        )

    @property
    def errors(self) -> tuple[float, ...]:
        """In percent of the measured step."""
        return tuple(100 * (predicted / measured - 1) for predicted, measured in zip(self.predicted, self.measured))

    @property
    def typical(self) -> tuple[float, float]:
        """The median of what was predicted, and of what was measured."""
        return statistics.median(self.predicted), statistics.median(self.measured)


def _in_order(steps: dict[_Case, _Steps]) -> list[float]:
    """For each pair of strategies on the same workload and ranks of which one has a shorter typical step: 1 if that is
    predicted, otherwise 0."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for (_, workload, ranks, *_), one in steps.items():
        groups[workload, ranks].append(one.typical)
    pairs = [pair for group in groups.values() for pair in permutations(group, 2)]
    return [
        float(predicted < other_predicted)
        for (predicted, measured), (other_predicted, other_measured) in pairs
        if (1 + _DIFFERENT) * measured < other_measured
    ]
