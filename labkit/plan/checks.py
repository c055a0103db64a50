"""The checks of a Spec's fields together, and the values that a strategy and a workload complete it with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import shown
from labkit.plan import checkpoints, fields
from labkit.plan.fields import SpecError
from labkit.training import strategies, workloads
from labkit.training.faults import FAULTS
from labkit.training.options import Option
from labkit.training.rows import Strategy, Workload
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import DATA, WORKLOADS

if TYPE_CHECKING:
    from labkit.plan.spec import Spec


def without_effect(declared: Iterable[Field[Any]], values: Mapping[str, Any]) -> dict[str, str]:
    """The fields whose value has no effect on a run, by name, each with one sentence: the value and the fix."""
    found, folder = fields.without_effect(declared, values), values.get("data_dir")
    if values.get("script") is None and folder is not None:
        possible = WORKLOADS[values.get("workload") or workloads.DEFAULT.name].data
        data = values.get("data") or possible[0]
        if DATA[data].needs.files is None:
            others = [name for name in possible if DATA[name].needs.files]
            fix = f", or use --data {' or '.join(others)}" if others else ""
            found["data_dir"] = (
                f"data-dir {shown(folder)} has no effect, because the data set {data} is not read from files; leave it"
                f" out{fix}"
            )
    return found


def completed(spec: Spec) -> dict[str, Any]:
    """The fields that depend on strategy and workload, with their defaults; `SpecError` if they contradict each
    other."""
    strategy = STRATEGIES[spec.strategy or strategies.DEFAULT.name]
    workload = WORKLOADS[spec.workload or workloads.DEFAULT.name]
    data = spec.data or workload.data[0]
    if data not in workload.data:
        raise SpecError("data", f"{workload.name} cannot train on {data!r}; use --data {' or '.join(workload.data)}")
    if spec.epochs is not None and spec.steps is not None:
        raise SpecError(
            "steps", f"epochs ({spec.epochs}) and steps ({spec.steps}) exclude each other; give one of them"
        )
    return {
        "strategy": strategy.name,
        "workload": workload.name,
        "data": data,
        "nproc": spec.nproc or strategy.default_nproc,
        "batch_size": spec.batch_size or workload.batch_size,
        "epochs": spec.epochs if spec.epochs or spec.steps else 1,
        "options": _options(spec, strategy, workload),
    }


def check_training(spec: Spec) -> None:
    """Raises `SpecError` if a completed Spec of a strategy cannot run on any machine."""
    most = spec.data_row.most
    if most is not None and spec.train_samples > most:
        raise SpecError(
            "samples",
            f"--samples {spec.samples} exceeds the {most} training samples of {spec.data}; use --samples {most}",
        )
    limit = spec.strategy_row.limit(spec)
    if limit:
        raise SpecError("strategy", limit)
    refusal = FAULTS[spec.fault].limit(spec) if spec.fault is not None else None
    if refusal:
        raise SpecError("fault", refusal)
    refusal = checkpoints.asynchronous_limit(spec)
    if refusal:
        raise SpecError("checkpoint_async", refusal)
    if spec.nproc is not None:
        _check_batch(spec)
        _check_warmup(spec)


def _options(spec: Spec, strategy: Strategy, workload: Workload) -> dict[str, Any]:
    """All options of the strategy and the workload, as given or by default."""
    for name, reason in strategy.lacks.items():
        if name in spec.options:
            raise SpecError("options", f"{strategy.name} has no option {name}: {reason}")
    for name in ("save_every", "resume"):
        if name in strategy.lacks and getattr(spec, name) is not None:
            raise SpecError(name, f"{strategy.name} does not support checkpoints: {strategy.lacks[name]}")
    if spec.precision in strategy.lacks:
        raise SpecError(
            "precision", f"{strategy.name} does not support {spec.precision}: {strategy.lacks[spec.precision]}"
        )
    known: dict[str, Option] = {option.name: option for option in strategy.all_options + workload.options}
    settled = {name: option.default for name, option in known.items()}
    for name, value in spec.options.items():
        if name not in known:
            names = ", ".join(known) or "there are none"
            raise SpecError("options", f"{strategy.name} with {workload.name} has no option {name!r}; options: {names}")
        try:
            settled[name] = known[name].parse(value)
        except ValueError as error:
            raise SpecError("options", str(error)) from None
    return settled


def _check_batch(spec: Spec) -> None:
    ranks = spec.data_ranks
    if spec.scaling == "strong" and spec.batch_size % ranks:
        below = spec.batch_size // ranks * ranks
        near = [size for size in (below, below + ranks) if size]
        raise SpecError(
            "batch_size",
            f"a global batch of {spec.batch_size} is not divisible by {ranks} ranks; use --batch-size"
            f" {' or '.join(map(str, near))}, or --scaling weak for a batch size per rank",
        )
    if spec.train_samples < ranks:
        most = spec.data_row.most
        more = "" if most is not None and most < ranks else f"--samples {ranks} or more, or "
        raise SpecError(
            "samples",
            f"{spec.train_samples} samples are too few for {ranks} ranks; use {more}at most {spec.train_samples} ranks",
        )
    # A default batch is reduced to the shard silently: every displayed figure shows the reduced batch.
    if spec.wanted_per_rank > spec.shard and spec.batch_size != spec.workload_row.batch_size:
        fits = spec.shard if spec.scaling == "weak" else spec.shard * ranks
        raise SpecError(
            "batch_size",
            f"a batch of {spec.wanted_per_rank} per rank exceeds the {spec.shard} samples that a rank has per"
            f" epoch; use --batch-size {fits}, or more --samples",
        )
    micro_batches = spec.options.get("accumulate", 1)
    if micro_batches > spec.batch_per_rank:
        raise SpecError(
            "options",
            f"accumulate={micro_batches} splits a batch of {spec.batch_per_rank} samples into more micro-batches"
            f" than samples; use accumulate={spec.batch_per_rank} or less",
        )


def _check_warmup(spec: Spec) -> None:
    warmup_steps = spec.options.get("warmup_steps", 0)
    if warmup_steps >= spec.total_steps:
        raise SpecError(
            "options",
            f"warmup_steps={warmup_steps} leaves no step after the warm-up, because the training has"
            f" {spec.total_steps}; use warmup_steps={spec.total_steps - 1} or less, or more steps",
        )
