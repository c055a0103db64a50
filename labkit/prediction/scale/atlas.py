"""The atlas: published runs on real GPUs that ship with the lab, and which of them are near a layout.

`published.csv.gz` has training runs that others measured and published, failures included, one row each with its
source. Its columns are those of `published.py`, so `labkit advise --check` reads the same file.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from labkit.analysis.metrics import median
from labkit.common.arguments import Number, check_type, shown
from labkit.prediction.scale.layouts import SHARDINGS, Layout
from labkit.prediction.scale.model import parameters_in_words
from labkit.prediction.scale.published import Published, Refused, read
from labkit.prediction.scale.step import Estimate, estimate
from labkit.prediction.scale.training import Training

RUNS = Path(__file__).with_name("published.csv.gz")


@cache
def published() -> tuple[tuple[Published, ...], tuple[Refused, ...]]:
    """The published runs, and the rows that cannot be computed, with the reason."""
    found, refused = read(RUNS)
    return tuple(found), tuple(refused)


@cache
def modelled(run: Published) -> Estimate:
    """What the closed formulas say about the training and layout of a run."""
    return estimate(run.training, run.layout)


def speed(run: Published) -> float | None:
    """Measured tokens per second and GPU; None if the run failed, or if its source has no speed."""
    return run.measured.tokens_per_second_per_gpu


def failed(run: Published) -> bool:
    """Whether the run ran out of memory or crashed."""
    return run.measured.fits is False


# ---- the degrees of a layout, by the names that a learner types

_STAGES = {  # of ZeRO, by what is sharded
    (): 0,
    ("optimizer",): 1,
    ("gradients", "optimizer"): 2,
    ("parameters", "gradients", "optimizer"): 3,
}
DEGREES: Mapping[str, Callable[[Layout], int]] = {
    "dp": lambda layout: layout.data,
    "tp": lambda layout: layout.tensor,
    "pp": lambda layout: layout.pipeline,
    "cp": lambda layout: layout.context,
    "zero": lambda layout: _STAGES[layout.sharding.owners],
    "micro_batch": lambda layout: layout.micro_batch,
}
EXAMPLE = "dp=8,tp=4,pp=2,zero=1,micro_batch=2"
_DEGREE = Number(int, 0, 1 << 20)


def degrees_of(value: Any) -> dict[str, int]:
    """The degrees in a text such as `dp=8,tp=4`, or in a mapping. Raises `ValueError` or `TypeError`, one sentence."""
    if isinstance(value, str):
        pairs = [part.partition("=")[::2] for part in re.split(r"[,\s]+", value.strip()) if part]
    else:
        pairs = list(check_type("layout", value, Mapping, f"a text such as {EXAMPLE!r} or a dict").items())
    found: dict[str, int] = {}
    for name, degree in pairs:
        if name not in DEGREES:
            raise ValueError(f"layout has {', '.join(DEGREES)}, such as {EXAMPLE}; got {shown(name)} in {shown(value)}")
        found[name] = _DEGREE.check(f"{name} of the layout", _DEGREE.from_text(degree))
    if not found:
        raise ValueError(
            f"layout must have at least one of {', '.join(DEGREES)}, such as {EXAMPLE}, got {shown(value)}"
        )
    return found


def matches(layout: Layout, degrees: Mapping[str, int]) -> bool:
    """Whether a layout has these degrees; what they do not name may be anything."""
    return all(DEGREES[name](layout) == degree for name, degree in degrees.items())


# ---- some of the runs

_GPUS = Number(int, 1, 1 << 20)


def select(
    *, model: Any = None, gpus: Any = None, gpu_type: Any = None, layout: Any = None, source: Any = None
) -> tuple[Published, ...]:
    """The published runs of models, GPU types and sources whose names contain a text (`8B`, `H100`, `Playbook`), on
    some number of GPUs or several, with some degrees of the layout. Raises `LookupError` with the values that exist if
    there is none, `ValueError` or `TypeError` for a value that is not possible."""
    found, _ = published()
    for name, text, words in (
        ("model", model, lambda run: run.title),
        ("GPU type", gpu_type, lambda run: f"{run.training.accelerator.name} {run.training.machine.name}"),
        ("source", source, lambda run: run.source),
    ):
        if text is not None:
            if not check_type(name, text, str, "a part of a name"):
                raise ValueError(f"{name} must be a part of a name, got ''")
            found = _narrowed(found, name, text, words, _containing(text, words))
    if gpus is not None:
        several = gpus if isinstance(gpus, (list, tuple, set)) else [gpus]
        numbers = {_GPUS.check("gpus", number) for number in several}
        wanted = ", ".join(map(str, sorted(numbers)))
        found = _narrowed(found, "number of GPUs", wanted, _gpus, lambda run: _gpus(run) in numbers)
    if layout is not None:
        degrees = degrees_of(layout)
        wanted = ",".join(f"{name}={degree}" for name, degree in degrees.items())
        found = _narrowed(
            found, "layout", wanted, lambda run: run.layout.title, lambda run: matches(run.layout, degrees)
        )
    return found


def _gpus(run: Published) -> int:
    return run.training.devices


def _containing(text: str, words: Callable[[Published], str]) -> Callable[[Published], bool]:
    """Whether a name contains the text, in capital letters or not; `3B` is not part of `13B`."""
    pattern = re.compile(r"(?<![0-9.])" * text[:1].isdigit() + re.escape(text), re.IGNORECASE)
    return lambda run: bool(pattern.search(words(run)))


_LISTED = 12  # names in a message


def _narrowed(
    runs: Sequence[Published],
    name: str,
    wanted: str,
    value: Callable[[Published], Any],
    condition: Callable[[Published], bool],
) -> tuple[Published, ...]:
    found = tuple(filter(condition, runs))
    if not found:
        there = sorted({value(run) for run in runs})
        more = f" and {len(there) - _LISTED} more" * (len(there) > _LISTED)
        listed = ", ".join(map(str, there[:_LISTED]))
        raise LookupError(f"no published run has the {name} {shown(wanted)}; there are {listed}{more}")
    return found


# ---- the runs of one model on some GPUs

Key = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Published runs of one source that differ in their layout only: the same model, GPUs, batch and sequence.

    A layout that was measured several times counts with the median of its speeds.
    """

    runs: tuple[Published, ...]

    @property
    def training(self) -> Training:
        """The training that all runs have in common."""
        return self.runs[0].training

    @property
    def title(self) -> str:
        """The model, as its source calls it."""
        return self.runs[0].title

    def speed(self, runs: Iterable[Published]) -> float | None:
        """The median of the speeds of runs with the same layout, in tokens per second and GPU; None if none ran."""
        speeds = [reached for reached in map(speed, runs) if reached is not None]
        return median(speeds) if speeds else None

    @property
    def ranked(self) -> tuple[tuple[float, Published], ...]:
        """The layouts that ran, the fastest first, each with its speed and one of its runs."""
        by_layout: dict[Key, list[Published]] = {}
        for run in self.runs:
            by_layout.setdefault(key_of(run.layout), []).append(run)
        known = [(self.speed(runs), runs[0]) for runs in by_layout.values()]
        ran = [(distance, run) for distance, run in known if distance is not None]
        return tuple(sorted(ran, key=lambda ranked: -ranked[0]))

    @property
    def failures(self) -> tuple[Published, ...]:
        """The runs that ran out of memory or crashed."""
        return tuple(filter(failed, self.runs))

    def of(self, degrees: Mapping[str, int]) -> tuple[Published, ...]:
        """The runs with these degrees."""
        return tuple(run for run in self.runs if matches(run.layout, degrees))

    def same(self, run: Published) -> tuple[Published, ...]:
        """All runs with the layout of a run."""
        return tuple(other for other in self.runs if key_of(other.layout) == key_of(run.layout))

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        """A layout with all of `DEGREES`, and otherwise as in the runs; `dp` × `micro_batch` must divide the batch."""
        sharding = next(row for row in SHARDINGS.values() if _STAGES[row.owners] == degrees.get("zero", 0))
        return replace(
            self.runs[0].layout,
            sharding=sharding,
            data=degrees["dp"],
            shards=degrees["dp"] * degrees["cp"],
            tensor=degrees["tp"],
            pipeline=degrees["pp"],
            context=degrees["cp"],
            micro_batch=degrees["micro_batch"],
            micro_batches=self.training.batch // (degrees["dp"] * degrees["micro_batch"]),
        )


def key_of(layout: Layout) -> Key:
    """The degrees of a layout: equal for two runs of a case if they have the same layout."""
    return tuple(degree(layout) for degree in DEGREES.values())


def case(model: str, gpus: int, source: str | None = None) -> Case:
    """The runs of a model on a number of GPUs, as `select`; `LookupError` if they are not of one model and batch."""
    runs = select(model=model, gpus=gpus, source=source)
    first = runs[0]
    for run in runs:
        if common(run) != common(first):
            raise LookupError(
                f"model {shown(model)} on {gpus} GPUs is more than one training: {first.title} of {first.source} and"
                f" {run.title} of {run.source}; name the model or the source more precisely"
            )
    return Case(runs)


def common(run: Published) -> Hashable:
    """What the runs of a case have in common, apart from the number of GPUs."""
    return run.source, run.title, run.training.batch, run.training.sequence, run.training.precision


# ---- evidence

NEAR = 3.0  # the distance up to which a run is evidence for a layout
_SCALED: Mapping[str, tuple[float, Callable[[Training, Layout], float]]] = {  # the distance of a factor of two
    "parameters": (1.0, lambda training, layout: training.model.parameters),
    "GPUs": (1.0, lambda training, layout: training.devices),
    "tokens per sample": (1.0, lambda training, layout: training.sequence),
    "TP": (1.0, lambda training, layout: layout.tensor),
    "PP": (1.0, lambda training, layout: layout.pipeline),
    "CP": (1.0, lambda training, layout: layout.context),
    "samples per micro-batch": (1.0, lambda training, layout: layout.micro_batch),
    "micro-batches": (0.5, lambda training, layout: layout.micro_batches),
}
_NAMED: Mapping[str, tuple[float, Callable[[Training, Layout], Any]]] = {  # the distance of two different values
    "accelerator": (2.0, lambda training, layout: training.accelerator.name),
    "network": (0.5, lambda training, layout: _network(training)),
    "precision": (1.0, lambda training, layout: training.precision),
    "attention": (1.0, lambda training, layout: training.attention),
    "recomputation": (1.0, lambda training, layout: layout.recompute),
}


def _network(training: Training) -> str | None:
    """The link between the nodes of a training; None on one node."""
    link = training.machine.between
    return link.name if link and training.devices > training.machine.per_node else None


_SAME = 0.15  # of a distance: a difference that is not mentioned
_ROUNDED = 0.005  # distances have two decimals


@dataclass(frozen=True)
class Evidence:
    """A published run near a layout.

    `distance` adds 1 for every factor of two in parameters, GPUs, tokens per sample, degrees and samples per
    micro-batch, and a half for that of the number of micro-batches; 1 for each of parameters, gradients and optimizer
    state that is sharded in only one of the two; 1 for another precision, attention or recomputation, a half for
    another network, and 2 for another accelerator. `differences` says what contributes to it, the largest first: `TP 4
    instead of 2`.
    """

    run: Published
    distance: float
    differences: tuple[str, ...]

    @property
    def near(self) -> bool:
        """Whether the run is close enough to support or contradict an estimate: at most `NEAR`."""
        return self.distance <= NEAR


def evidence(
    training: Training, layout: Layout, count: int = 3, runs: tuple[Published, ...] | None = None
) -> tuple[Evidence, ...]:
    """The `count` published runs (of `runs`, or of all) that are nearest to a layout of a training, the nearest first;
    of equally near ones first those that have a speed."""
    runs = published()[0] if runs is None else runs
    scaled = numpy.abs(_coordinates(runs) - numpy.array(_coordinate(training, layout))).sum(axis=1)
    nearest: list[tuple[float, bool, int]] = []
    for number in numpy.argsort(scaled, kind="stable").tolist():
        if len(nearest) >= count and scaled[number] > nearest[count - 1][0] + _ROUNDED:
            break  # what has no scale only adds to the distance
        far = sum(distance for distance, _ in _differences(training, layout, runs[number]))
        insort(nearest, (round(far, 2), speed(runs[number]) is None, number))
    return tuple(
        Evidence(runs[number], far, _in_words(_differences(training, layout, runs[number])))
        for far, _, number in nearest[:count]
    )


@cache
def _coordinates(runs: tuple[Published, ...]) -> numpy.ndarray:
    """The place of each run, in distances."""
    return numpy.array([_coordinate(run.training, run.layout) for run in runs])


def _coordinate(training: Training, layout: Layout) -> list[float]:
    return [weight * math.log2(figure(training, layout)) for weight, figure in _SCALED.values()]


Difference = tuple[float, tuple[str, Any, Any]]  # a distance; what differs, its value there, its value here


def _differences(training: Training, layout: Layout, run: Published) -> list[Difference]:
    """What distinguishes a run from a layout of a training."""
    found: list[Difference] = []
    for name, (weight, figure) in _SCALED.items():
        there, here = figure(run.training, run.layout), figure(training, layout)
        if there != here:
            found.append((weight * abs(math.log2(there / here)), (name, there, here)))
    for name, (cost, value) in _NAMED.items():
        other, own = value(run.training, run.layout), value(training, layout)
        if other != own and other is not None and own is not None:
            found.append((cost, (name, other, own)))
    there_sharded, here_sharded = _sharded(run.layout), _sharded(layout)
    if there_sharded != here_sharded:
        titles = run.layout.sharding.title, layout.sharding.title
        found.append((float(len(there_sharded ^ here_sharded)), ("sharding", *titles)))
    return found


def _sharded(layout: Layout) -> frozenset[str]:
    """The states that data-parallel ranks share."""
    return frozenset(layout.sharding.owners if layout.shards > 1 else ())


def _in_words(differences: Sequence[Difference]) -> tuple[str, ...]:
    large = sorted(
        (difference for difference in differences if difference[0] > _SAME), key=lambda difference: -difference[0]
    )
    return tuple(_words(*what) for _, what in large)


def _words(name: str, there: Any, here: Any) -> str:
    """`TP 4 instead of 2`, `128 instead of 64 GPUs`, `ZeRO-1 instead of DDP`."""
    if isinstance(there, str):
        return f"{there} instead of {here}" + f" {name}" * (name in ("attention", "recomputation"))
    if name.isupper():
        return f"{name} {there} instead of {here}"
    shown_as = parameters_in_words if name == "parameters" else "{:,}".format
    return f"{shown_as(there)} instead of {shown_as(here)} {name}"
