"""Advice on a training: which layouts of some devices fit, how fast they are, and what would make the others fit.

`training` and `laid` turn the arguments of `labkit.advise` into a `Training` and a `Layout`, with checks and defaults;
every refusal is one sentence. `advice` tries all layouts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from labkit.common.arguments import Number, check_choice, check_path, shown
from labkit.common.files import read_json_object
from labkit.common.text import visible_line
from labkit.common.units import size
from labkit.prediction.devices import ACCELERATED, DEFAULT_MACHINE, DEVICES, Device, Link, Rate
from labkit.prediction.links import Modelled
from labkit.prediction.scale.layouts import (
    ALONE,
    DEFAULT_FRAMEWORK,
    FRAMEWORKS,
    LOSSES,
    RECOMPUTED,
    SHARDINGS,
    TRAINED,
    Layout,
    Sharding,
    layouts,
)
from labkit.prediction.scale.model import ATTENTIONS, Model, of_config, of_parameters, of_workload
from labkit.prediction.scale.step import Estimate, Memory, Training, estimate, memory

MOST_DEVICES = 65_536
_LARGEST = 64  # samples of a micro-batch
WHOLE = {"devices": Number(int, 1, MOST_DEVICES), "sequence": Number(int, 1, 1 << 24)}
_MEMORY = Number(float, 1 << 20, 1 << 50)
_BATCH = Number(int, 1, 1 << 32)
_LONG = 8192  # tokens of the default sequence at most
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_BINARY = {letter: 1 << 10 * power for power, letter in enumerate("KMGT", start=1)}

# Tokens of a batch by parameters: Brown et al. 2020, table 2.1, and The Llama 3 Herd of Models, 2024, section 3.4.
_BATCHES = ((1e9, 0.5e6), (5e9, 1e6), (50e9, 2e6), (300e9, 3.2e6), (float("inf"), 16e6))

# ---- a training


def training(
    params: Any = None,
    *,
    config: Any = None,
    workload: Any = None,
    options: Mapping[str, Any] | None = None,
    devices: Any = None,
    machine: Any = DEFAULT_MACHINE,
    memory: Any = None,
    batch: Any = None,
    sequence: Any = None,
    precision: Any = None,
    attention: Any = ATTENTIONS[0],
) -> Training:
    """The training that the arguments of `labkit.advise` describe. Raises `ValueError`, `TypeError`, `SpecError`."""
    row = machine_of(machine)
    accelerator = row.accelerator
    assert accelerator
    model = _model({"params": params, "config": config, "workload": workload}, options or {})
    if precision is None:
        precision = next(name for name in ("bf16", "fp16") if name in accelerator.flops)
    accelerator.peak(precision)
    number = _devices(row, devices)
    length = min(model.positions, _LONG) if sequence is None else WHOLE["sequence"].check("sequence", sequence)
    if model.learned and length > model.positions:
        raise ValueError(f"sequence must be at most {model.positions}, the positions of {model.title}, got {length}")
    return Training(
        model,
        row,
        accelerator,
        Modelled(row),
        number,
        _default_batch(model, number, length) if batch is None else _batch(batch, length, number),
        length,
        accelerator.memory if memory is None else _memory(memory),
        precision,
        check_choice("attention", attention, ATTENTIONS),
    )


# ---- one layout

_DEGREES = ("dp", "tp", "pp", "cp")
_COUNT = Number(int, 1, 1 << 20)
_STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}
_SCHEDULES = ("1f1b", "interleaved")
FIELDS = (
    *(*_DEGREES, "zero", "sharding", "micro_batch", "micro_batches", "schedule", "chunks", "recompute", "compile"),
    *("precision", "framework", "async_tp", "loss", "offload", "trained"),
)
_REFUSED = {
    "ep": "mixtures of experts are not modelled, only dense models",
    "experts": "mixtures of experts are not modelled, only dense models",
}


def laid(value: Any, **asked: Any) -> tuple[Training, Layout]:
    """The training that the arguments of `labkit.advise` describe, and its layout: a mapping, or a text such as
    `dp=8,tp=4,pp=2,zero=1,micro_batch=2`. Devices and batch follow from the layout if they are not given.

    Raises `ValueError`, `TypeError`, `SpecError`, one sentence.
    """
    said = _fields(value)
    degrees = {name: _COUNT.read(f"layout: {name}", said[name]) if name in said else 1 for name in _DEGREES}
    ranks = math.prod(degrees.values())
    if asked.get("devices") is None:
        asked["devices"] = ranks
    if "precision" in said:
        asked["precision"] = said["precision"]
    batch = asked.pop("batch", None)
    training_of = training(**asked, batch=batch)
    if training_of.devices != ranks:
        words = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "dp 1"
        raise ValueError(f"layout has {ranks} devices ({words}), got devices {training_of.devices}")
    model = training_of.model
    for name, size_of in (("heads", model.heads), ("the width of the MLP", model.hidden)):
        if size_of % degrees["tp"]:
            raise ValueError(f"layout: tp must divide {name}, {size_of}, got {degrees['tp']}")
    if degrees["cp"] > 1 and training_of.sequence % (2 * degrees["cp"]):
        raise ValueError(f"layout: twice cp must divide the sequence, {training_of.sequence}, got {degrees['cp']}")
    size_of_micro_batch = _COUNT.read("layout: micro_batch", said.get("micro_batch", "1"))
    each = degrees["dp"] * size_of_micro_batch
    if "micro_batches" in said:
        count = _COUNT.read("layout: micro_batches", said["micro_batches"])
        if batch is not None and training_of.batch != each * count:
            raise ValueError(f"layout has {each * count} samples per step, got a batch of {training_of.batch}")
    elif batch is not None and training_of.batch % each:
        raise ValueError(f"batch must be a multiple of dp × micro_batch, {each}, got {training_of.batch}")
    else:
        count = max(1, round(training_of.batch / each))
    framework = FRAMEWORKS[check_choice("layout: framework", said.get("framework", DEFAULT_FRAMEWORK), FRAMEWORKS)]
    found = Layout(
        *_shared(said, degrees, training_of.machine),
        tensor=degrees["tp"],
        pipeline=degrees["pp"],
        context=degrees["cp"],
        micro_batch=size_of_micro_batch,
        micro_batches=count,
        recompute=check_choice("layout: recompute", said.get("recompute", "none"), RECOMPUTED),
        chunks=_chunks(said, degrees["pp"], framework.chunks),
        compiled=_switch(said, "compile", True),
        asynchronous=_switch(said, "async_tp", False),
        loss=check_choice("layout: loss", said.get("loss", LOSSES[0]), LOSSES),
        offload=_switch(said, "offload", False),
        trained=check_choice("layout: trained", said.get("trained", TRAINED[0]), TRAINED),
        framework=framework,
    )
    if found.offload and found.recompute != "full":
        raise ValueError("layout: offload moves the inputs of recomputed layers, and needs recompute=full")
    refused = found.refused(model)
    if refused:
        raise ValueError(f"layout: {refused}")
    return replace(training_of, batch=each * count), found


def _fields(value: Any) -> dict[str, str]:
    """The fields of a layout as texts, with checked names."""
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part.strip()]
        pairs = {name.strip(): text.strip() for name, _, text in parts}
    elif isinstance(value, Mapping):
        pairs = {str(name): str(text) for name, text in value.items()}
    else:
        raise TypeError(f"layout must be a text such as 'dp=8,tp=4' or a dict, got {shown(value)}")
    for name in pairs:
        if name in _REFUSED:
            raise ValueError(f"layout: {_REFUSED[name]}")
        check_choice("a field of layout", name, FIELDS)
    return pairs


def _shared(said: Mapping[str, str], degrees: Mapping[str, int], machine: Device) -> tuple[Sharding, int, int]:
    """The sharding, the data-parallel ranks, and how many ranks share the states."""
    data, synced = degrees["dp"], degrees["dp"] * degrees["cp"]
    if "zero" in said and "sharding" in said:
        raise ValueError("layout: zero and sharding say the same; use one of them")
    name = _STAGES[check_choice("layout: zero", said["zero"], _STAGES)] if "zero" in said else said.get("sharding")
    found = SHARDINGS[check_choice("layout: sharding", name or "fsdp", SHARDINGS)]
    if synced == 1:
        return ALONE, data, 1
    if not found.across:
        return found, data, synced
    shards = max(1, machine.per_node // degrees["tp"])
    if synced % shards or shards == synced:
        raise ValueError(f"layout: hsdp needs several nodes of {shards} data-parallel ranks, got {synced} ranks")
    return found, data, shards


def _chunks(said: Mapping[str, str], pipeline: int, usual: int) -> int:
    schedule = check_choice("layout: schedule", said.get("schedule", _SCHEDULES[0]), _SCHEDULES)
    number = _COUNT.read("layout: chunks", said["chunks"]) if "chunks" in said else None
    if schedule == "interleaved":
        return number or 2
    if number not in (None, 1):
        raise ValueError(f"layout: chunks need schedule=interleaved, got {number} with {schedule}")
    return usual if pipeline > 1 and "schedule" not in said else 1


def _switch(said: Mapping[str, str], name: str, usual: bool) -> bool:
    return check_choice(f"layout: {name}", said[name].lower(), ("true", "false")) == "true" if name in said else usual


# ---- the parts of a training


def _model(sources: Mapping[str, Any], options: Mapping[str, Any]) -> Model:
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            "describe the model by one of params (such as 7B), config (a config.json) or workload (such as gpt), got"
            f" {' and '.join(given) or 'none of them'}"
        )
    if options and given != ["workload"]:
        raise ValueError(f"options apply only to a workload, got {given[0]} and options {', '.join(options)}")
    if sources["workload"] is not None:
        return of_workload(sources["workload"], options)
    return of_parameters(sources["params"]) if given == ["params"] else of_config(sources["config"])


def _devices(machine: Device, value: Any) -> int:
    """A whole number of nodes, or fewer devices than one has."""
    if value is None:
        return machine.per_node
    number: int = WHOLE["devices"].check("devices", value)
    if machine.between is None and number > machine.per_node:
        raise ValueError(
            f"devices must be at most {machine.per_node} on {machine.name}, which is one node, got {number}"
        )
    if number > machine.per_node and number % machine.per_node:
        raise ValueError(
            f"devices must be whole nodes, a multiple of {machine.per_node} on {machine.name}, or fewer than one has,"
            f" got {number}"
        )
    return number


def _memory(value: Any) -> int:
    """Bytes, or a text such as `24GB` (10⁹) or `24GiB` (2³⁰)."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(i?)B", value.strip()) if isinstance(value, str) else None
    if found:
        value = float(found[1]) * (_BINARY[found[2]] if found[3] else _UNITS[found[2]])
    elif isinstance(value, str):
        raise ValueError(f"memory must be a size such as 24GB or 24GiB, got {shown(value)}")
    count: float = _MEMORY.check("memory (bytes)", value)
    return round(count)


def _batch(value: Any, sequence: int, devices: int) -> int:
    """Samples, from a number of them or a text such as `4M tokens`, which is rounded."""
    if not isinstance(value, str):
        return int(_BATCH.check("batch (samples)", value))
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGBT]?)\s*(tokens?|samples?|)", value.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"batch must be a number of samples such as 1024, or such as '4M tokens', got {shown(value)}")
    count = float(found[1]) * _UNITS[found[2].upper()]
    in_tokens = found[3].lower().startswith("token")
    if in_tokens and count < sequence:
        raise ValueError(f"batch must have at least one sample of {sequence} tokens, got {shown(value)}")
    return int(_BATCH.check("batch (samples)", _divisible(count / sequence, devices) if in_tokens else round(count)))


def _default_batch(model: Model, devices: int, sequence: int) -> int:
    """What was published for models of this size, in samples, and at least one sample for each device."""
    tokens = next(tokens for bound, tokens in _BATCHES if model.parameters < bound)
    return _divisible(max(devices, tokens / sequence), devices)


def _divisible(samples: float, devices: int) -> int:
    """The nearest number that many meshes divide: the odd factor of the number of devices times a power of two."""
    odd = devices // (devices & -devices)
    return odd << max(0, round(math.log2(samples / odd)))


def in_words(asked: Training) -> str:
    """The training in one line: model, devices, batch."""
    on = f"{asked.devices:,} × {asked.accelerator.name} ({size(asked.memory)} each)"
    batch = f"{asked.batch:,} × {asked.sequence:,} tokens per step"
    return f"{asked.model.title} on {on}, {batch}, {asked.precision}"


# ---- a machine that is not in the table: a row of the table with some figures of its own, read from a small JSON file
#
#     {"like": "h100x8", "per_node": 4, "between_gb_per_s": 25, "oversubscription": 2}
#
# `like` names the row; every other field replaces one of its figures. Units: 10⁹ bytes per second and direction for
# what one GPU sends within a node (`inside_gb_per_s`) and between nodes (`between_gb_per_s`), divided by
# `oversubscription`; GiB of memory; 10¹² FLOP/s by precision (`tflops`); `efficiency` is the fraction of them in large
# matrix products.

_LIMIT = 1 << 16  # bytes of a file
_FIGURES = {
    "per_node": Number(int, 1, 1 << 16),
    "memory_gib": Number(float, 1, 1 << 20),
    "memory_gb_per_s": Number(float, 1, 1e6),
    "inside_gb_per_s": Number(float, 1e-3, 1e6),
    "between_gb_per_s": Number(float, 1e-3, 1e6),
    "oversubscription": Number(float, 1, 1e3),
    "efficiency": Number(float, 0.01, 1),
}
_PEAK = Number(float, 1e-3, 1e6)


def machine_of(value: Any) -> Device:
    """The machine of a name of the table, or of a file (a path that ends in `.json`). Raises `ValueError`, `TypeError`,
    one sentence."""
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".json")):
        return _of_file(Path(check_path("machine", value)))
    return DEVICES[check_choice("machine", value, ACCELERATED)]


def _of_file(path: Path) -> Device:
    said = read_json_object("machine", path, _LIMIT, 'such as {"like": "h100x8"}')
    row = DEVICES[check_choice(f"{path}: like", said.get("like"), ACCELERATED)]
    unknown = [name for name in said if name not in (*_FIGURES, "like", "name", "tflops")]
    if unknown:
        raise ValueError(f"{path}: {shown(unknown[0])} is not one of like, name, tflops, {', '.join(_FIGURES)}")
    figures = {name: bounds.check(f"{path}: {name}", said[name]) for name, bounds in _FIGURES.items() if name in said}
    accelerator = row.accelerator
    assert accelerator and row.inside
    peaks = said.get("tflops", {})
    if not isinstance(peaks, Mapping):
        raise ValueError(f'{path}: tflops must be an object such as {{"bf16": 989}}, got {shown(peaks)}')
    flops = dict(accelerator.flops)
    for name, peak in peaks.items():
        check_choice(f"{path}: tflops", name, accelerator.flops)
        flops[name] = 1e12 * _PEAK.check(f"{path}: tflops {name}", peak)
    accelerator = replace(
        accelerator,
        flops=flops,
        memory=round(figures.get("memory_gib", accelerator.memory / (1 << 30)) * (1 << 30)),
        bandwidth=figures.get("memory_gb_per_s", accelerator.bandwidth / 1e9) * 1e9,
        efficiency=figures.get("efficiency", accelerator.efficiency),
        sources={**accelerator.sources, **dict.fromkeys(("flops", "memory", "bandwidth", "efficiency"), str(path))},
    )
    between = row.between
    if "between_gb_per_s" in figures or "oversubscription" in figures:
        network = between or row.inside
        reached = figures.get("between_gb_per_s", network.simple.bandwidth / 1e9)
        between = _faster(network, reached / figures.get("oversubscription", 1.0), path)
    return Device(
        visible_line(str(said.get("name", path.stem))),
        f"{row.title}, changed by {visible_line(path.name)}",
        figures.get("per_node", row.per_node),
        accelerator,
        _faster(row.inside, figures["inside_gb_per_s"], path) if "inside_gb_per_s" in figures else row.inside,
        between,
        row.crowded,
    )


def _faster(link: Link, bandwidth: float, path: Path) -> Link:
    """A link with another bandwidth, in 10⁹ bytes per second, and the same seconds per message."""
    ratio = bandwidth * 1e9 / link.simple.bandwidth
    low = Rate(link.low_latency.hop, link.low_latency.bandwidth * ratio)
    return replace(link, simple=Rate(link.simple.hop, bandwidth * 1e9), low_latency=low, source=str(path))


# ---- all layouts of a training


@dataclass(frozen=True)
class Misfit:
    """A strategy of which no layout fits: the layout that needs the least memory, with micro-batches of one sample and
    recomputation, the `missing` bytes, and the closest layout that fits (None if there is none)."""

    layout: Layout
    memory: Memory
    missing: float
    change: Layout | None

    @property
    def words(self) -> str:
        """The change: `TP 4`, `no CP`, `ZeRO-1 instead of DDP`."""
        if self.change is None:
            return ""
        own, other = self.layout, self.change
        words = []
        if own.sharding is not other.sharding and other.synced > 1:
            was = f" instead of {own.sharding.title}" if own.synced > 1 else ""
            words.append(f"{other.sharding.title}{was}")
        degrees = (
            ("TP", own.tensor, other.tensor),
            ("PP", own.pipeline, other.pipeline),
            ("CP", own.context, other.context),
        )
        for name, before, after in degrees:
            if before != after:
                changed = f"{name} {after}" + (f" instead of {before}" if before > 1 else "")
                words.append(changed if after > 1 else f"no {name}")
        return ", ".join(words) or other.title


@dataclass(frozen=True)
class Advice:
    """`fitting` has the estimates of everything that fits, the fastest first: of each mesh the fastest choice of
    micro-batch, accumulation and recomputation. `too_small` has the strategies for which the batch is too small, and
    the samples of which it must be a multiple."""

    training: Training
    fitting: tuple[Estimate, ...]
    misfits: tuple[Misfit, ...]
    too_small: dict[str, int]

    @cached_property
    def ranked(self) -> tuple[Estimate, ...]:
        """The fastest layout of each strategy, the fastest first."""
        best: dict[str, Estimate] = {}
        for candidate in self.fitting:
            best.setdefault(candidate.layout.kind, candidate)
        return tuple(best.values())

    def of_kind(self, kind: str) -> Estimate | None:
        """The fastest layout of a strategy such as `FSDP × TP` that fits; None if none does."""
        return next((estimate for estimate in self.ranked if estimate.layout.kind == kind), None)


def advice(training: Training) -> Advice:
    """Tries every strategy and mesh. It takes about a second for thousands of devices."""
    fitting: list[Estimate] = []
    least: dict[str, tuple[Layout, Memory]] = {}  # by strategy
    too_small: dict[str, int] = {}
    for mesh in layouts(training.model, training.machine, training.devices, training.sequence):
        if training.batch % mesh.data:
            too_small[mesh.kind] = min(too_small.get(mesh.kind, mesh.data), mesh.data)
            continue
        found = fastest(training, mesh)
        if found:
            fitting.append(found)
            continue
        smallest = replace(mesh, micro_batches=training.batch // mesh.data, recompute="full")
        needs = memory(training, smallest)
        if mesh.kind not in least or needs.total < least[mesh.kind][1].total:
            least[mesh.kind] = smallest, needs
    fitting.sort(key=lambda estimate: estimate.seconds)
    done = {estimate.layout.kind for estimate in fitting}
    misfits = (
        Misfit(layout, needs, needs.total - training.usable, _closest(layout, fitting))
        for kind, (layout, needs) in least.items()
        if kind not in done
    )
    in_order = tuple(sorted(misfits, key=lambda misfit: misfit.missing))
    known = done | least.keys()
    return Advice(training, tuple(fitting), in_order, {k: n for k, n in too_small.items() if k not in known})


def fastest(training: Training, mesh: Layout) -> Estimate | None:
    """The fastest micro-batch, accumulation and recomputation with which a mesh fits; None if it does not fit.

    The batch must be a multiple of the data-parallel ranks. Recomputation is tried only if the memory needs it.
    """
    samples = training.batch // mesh.data
    found: list[Estimate] = []
    for micro_batch in _divisors(samples):
        for recompute in ("none", "full"):
            layout = replace(mesh, micro_batch=micro_batch, micro_batches=samples // micro_batch, recompute=recompute)
            needs = memory(training, layout)
            if needs.total <= training.usable:
                found.append(estimate(training, layout, needs))
                break
        else:
            break  # larger micro-batches need more
    return min(found, key=lambda candidate: candidate.seconds, default=None)


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, min(number, _LARGEST) + 1) if number % divisor == 0)


def _closest(layout: Layout, fitting: Iterable[Estimate]) -> Layout | None:
    """The layout that fits with the fewest changes; of several, the fastest."""

    def changes(candidate: Estimate) -> tuple[int, float]:
        other = candidate.layout
        pairs = (
            (layout.sharding, other.sharding),
            (layout.tensor, other.tensor),
            (layout.pipeline, other.pipeline),
            (layout.context, other.context),
        )
        return sum(own != new for own, new in pairs), candidate.seconds

    return min(fitting, key=changes).layout if fitting else None


def devices_needed(training: Training) -> int | None:
    """The fewest devices, doubled until something fits, with at least one sample for each; None if there is none."""
    devices = training.devices
    most = training.machine.per_node if training.machine.between is None else MOST_DEVICES
    while 2 * devices <= most:
        devices *= 2
        larger = replace(training, devices=devices, batch=max(training.batch, devices))
        meshes = layouts(larger.model, larger.machine, devices, larger.sequence)
        smallest = (replace(mesh, micro_batches=larger.batch // mesh.data, recompute="full") for mesh in meshes)
        if any(memory(larger, layout).total <= larger.usable for layout in smallest):
            return devices
    return None


# ---- the common rule

RULE = "DDP if it fits on one device, otherwise FSDP, otherwise FSDP with TP within a node, otherwise PP between nodes"
_IN_ORDER = ("DDP", "FSDP", "FSDP × TP", "FSDP × TP × PP")
_AGREES = 1.05  # times the fastest


@dataclass(frozen=True)
class RuleVerdict:
    """What the common rule chooses (None: nothing), the fastest layout, and the strategies that the rule passes over
    because they do not fit or need a larger batch."""

    chosen: Estimate | None
    fastest: Estimate
    passed: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the choice of the rule is at most 5 % slower than the fastest."""
        return self.chosen is not None and self.chosen.seconds <= _AGREES * self.fastest.seconds

    @property
    def difference(self) -> tuple[str, float]:
        """The part of a step in which the choice loses the most, and the seconds."""
        assert self.chosen
        own, other = self.chosen.parts, self.fastest.parts
        part = max(own, key=lambda name: own[name] - other[name])
        return part, own[part] - other[part]


def verdict(found: Advice) -> RuleVerdict | None:
    """What the common rule says about this case; None for one device, or if nothing fits."""
    if not found.fitting or found.training.devices == 1:
        return None
    passed: list[str] = []
    for kind in _IN_ORDER:
        chosen = found.of_kind(kind)
        if chosen:
            return RuleVerdict(chosen, found.fitting[0], tuple(passed))
        passed.append(kind)
    return RuleVerdict(None, found.fitting[0], tuple(passed))


# ---- strong and weak scaling: how the time of a step changes with the number of devices, for each strategy

Mode = Literal["weak", "strong"]
MODES: tuple[Mode, ...] = ("weak", "strong")
MOST = 4096  # devices
KINDS = ("DDP", "ZeRO-1", "FSDP", "HSDP", "FSDP × TP", "FSDP × TP × PP", "ZeRO-1 × TP × PP")


@dataclass(frozen=True)
class Series:
    """A strategy from one device on: its fastest layout that fits for each number of devices, None if none fits.

    Weak scaling: the samples per device are those of the training, and the batch grows. Strong: the batch is that of
    the training.
    """

    kind: str
    mode: Mode
    devices: tuple[int, ...]
    estimates: tuple[Estimate | None, ...]

    @property
    def bound_from(self) -> int | None:
        """The smallest number of devices from which on communication takes longer than computation; None if it never
        does."""
        bound = None
        for devices, step in zip(reversed(self.devices), reversed(self.estimates)):
            if step is None:
                continue
            if not step.communication_bound:
                break
            bound = devices
        return bound


def efficiency(step: Estimate) -> float:
    """The time of the model's computation, divided evenly among all devices, as a fraction of the step: 1 is perfect
    scaling. Unlike a ratio to the time on one device, it is known for models that do not fit on one."""
    return step.mfu / step.training.accelerator.efficiency


def scaling(training: Training, most: int = MOST) -> tuple[Series, ...]:
    """The series of all strategies and modes for 1, 2, 4, … devices, up to `most` and to what the machine has."""
    limit = min(most, training.machine.per_node) if training.machine.between is None else most
    devices = tuple(1 << exponent for exponent in range(limit.bit_length()))
    found: dict[tuple[str, Mode], list[Estimate | None]] = {(kind, mode): [] for mode in MODES for kind in KINDS}
    for number in devices:
        meshes = [*layouts(training.model, training.machine, number, training.sequence)]
        for mode in MODES:
            here = replace(training, devices=number, batch=_scaled_batch(training, number, mode))
            for kind in KINDS:
                of_kind = [mesh for mesh in meshes if mesh.kind == kind or number == 1]
                steps = [fastest(here, mesh) for mesh in of_kind if here.batch % mesh.data == 0]
                fits = [step for step in steps if step]
                found[kind, mode].append(min(fits, key=lambda step: step.seconds, default=None))
    return tuple(Series(kind, mode, devices, tuple(found[kind, mode])) for kind, mode in found)


def _scaled_batch(training: Training, devices: int, mode: Mode) -> int:
    return training.batch if mode == "strong" else max(1, training.batch * devices // training.devices)
