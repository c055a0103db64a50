"""Exercises that published runs answer: the learner picks a layout for a model and a cluster, and the atlas says what
it did there and which layout won."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.common.units import counted, size
from labkit.course.exercises import Exercise, Wrong
from labkit.figures.advice import PARTS
from labkit.prediction.scale.atlas import EXAMPLE, Case, Published, case, degrees_of, evidence, modelled

_ENOUGH = 0.85  # of the fastest layout: repeated runs differ by as much
_DEGREES = ("tp", "pp", "cp")


def pick_a_layout(title: str, model: str, gpus: int, why: str) -> Exercise:
    """The exercise to pick a layout for a model of the atlas on a number of GPUs; `why` explains the solution."""
    return Exercise(title, lambda answer: _picked(case(model, gpus), answer), why)


def _picked(there: Case, answer: Any) -> str:
    degrees = _complete(there, answer)
    runs = there.of(degrees)
    if not runs:
        raise Wrong(_not_published(there, degrees))
    best, winner = there.ranked[0]
    reached = there.speed(runs)
    if reached is None:
        raise Wrong(_failure(runs[0]))
    share = f"{reached:,.0f} tokens/s per GPU, {reached / best:.0%} of the fastest"
    if reached < _ENOUGH * best:
        raise Wrong(f"on real GPUs this layout reached {share}; {_cost(runs[0])}")
    return (
        f"on real GPUs this layout reached {share} of {counted(len(there.ranked), 'layout')} that ran, with"
        f" {size(runs[0].measured.memory or 0)} per GPU; {counted(len(there.failures), 'run')} failed. The fastest is"
        f" {_name(winner)} with {best:,.0f}"
    )


def _complete(there: Case, answer: Any) -> Mapping[str, int]:
    """The degrees of the answer, with those that follow, or are 1 if they are not named; `Wrong` if they are not
    possible on this cluster."""
    try:
        given = degrees_of(answer)
    except (TypeError, ValueError) as error:
        raise Wrong(str(error)) from None
    lacking = [name for name in ("zero", "micro_batch") if name not in given]
    if lacking:
        raise Wrong(f"the layout needs {' and '.join(lacking)} as well, such as {EXAMPLE}")
    if not 0 <= given["zero"] <= 3:
        raise Wrong(f"zero must be 0 to 3, got {given['zero']}")
    degrees = dict.fromkeys(_DEGREES, 1) | given
    gpus, batch = there.training.devices, there.training.batch
    model = degrees["tp"] * degrees["pp"] * degrees["cp"]
    degrees.setdefault("dp", gpus // max(1, model))
    used = degrees["dp"] * model
    if used != gpus:
        raise Wrong(f"dp × tp × pp × cp must be the number of GPUs, {gpus}, got {used}")
    samples = degrees["dp"] * degrees["micro_batch"]
    if not samples or batch % samples:
        raise Wrong(f"dp × micro_batch must divide the global batch of {batch} samples, got {samples}")
    if degrees["dp"] == 1:
        del degrees["zero"]  # with one data-parallel rank there is nothing to shard
    return degrees


def _name(run: Published) -> str:
    return f"{run.layout.title} with micro-batches of {counted(run.layout.micro_batch, 'sample')}"


def _not_published(there: Case, degrees: Mapping[str, int]) -> str:
    [nearest] = evidence(there.training, there.layout(degrees), 1, there.runs)
    found = there.speed(there.same(nearest.run))
    did = "failed" if found is None else f"reached {found / there.ranked[0][0]:.0%} of the fastest"
    return f"no run with exactly this layout was published; the nearest, {_name(nearest.run)}, {did}"


def _failure(run: Published) -> str:
    """Why a run may have failed, by the formulas."""
    estimate, words = modelled(run), "on real GPUs this layout ran out of memory or crashed"
    if estimate.fits:
        return f"{words}; by the formulas it needs {size(estimate.memory_bytes)} per GPU, so look for another cause too"
    owner, most = max(estimate.memory.owners.items(), key=lambda owned: owned[1])
    return f"{words}; by the formulas it needs {size(estimate.memory_bytes)} per GPU, most of it {owner} ({size(most)})"


def _cost(run: Published) -> str:
    """What a slow layout spends its time on besides computation, by the formulas."""
    estimate = modelled(run)
    shares = {name: seconds / estimate.seconds for name, seconds in estimate.parts.items()}
    computation = shares.pop("computation")
    largest = sorted(shares, key=lambda name: -shares[name])[:2]
    words = " and ".join(f"{PARTS[name][1]} {shares[name]:.0%}" for name in largest)
    return f"by the formulas, {words} of a step, and the computation {computation:.0%}"
