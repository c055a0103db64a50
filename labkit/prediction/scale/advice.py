"""Which layouts of some devices fit, how fast they are, and what would make the others fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from labkit.prediction.scale.layouts import Layout, layouts
from labkit.prediction.scale.step import Estimate, Memory, Training, estimate, memory

MOST_DEVICES = 65_536


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
                changed = f"{name} {after}" + f" instead of {before}" * (before > 1)
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
    for size in _divisors(samples):
        for recompute in ("none", "full"):
            layout = replace(mesh, micro_batch=size, micro_batches=samples // size, recompute=recompute)
            needs = memory(training, layout)
            if needs.total <= training.usable:
                found.append(estimate(training, layout, needs))
                break
        else:
            break  # larger micro-batches need more
    return min(found, key=lambda candidate: candidate.seconds, default=None)


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, min(number, _LARGEST) + 1) if number % size == 0)


_LARGEST = 64  # samples of a micro-batch


def _closest(layout: Layout, fitting: Iterable[Estimate]) -> Layout | None:
    """The layout that fits with the fewest changes; of several, the fastest."""

    def changes(one: Estimate) -> tuple[int, float]:
        other = one.layout
        pairs = (
            (layout.sharding, other.sharding),
            (layout.tensor, other.tensor),
            (layout.pipeline, other.pipeline),
            (layout.context, other.context),
        )
        return sum(own != new for own, new in pairs), one.seconds

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
            here = replace(training, devices=number, batch=_batch(training, number, mode))
            for kind in KINDS:
                of_kind = [mesh for mesh in meshes if mesh.kind == kind or number == 1]
                steps = [fastest(here, mesh) for mesh in of_kind if here.batch % mesh.data == 0]
                fits = [step for step in steps if step]
                found[kind, mode].append(min(fits, key=lambda step: step.seconds, default=None))
    return tuple(Series(kind, mode, devices, tuple(found[kind, mode])) for kind, mode in found)


def _batch(training: Training, devices: int, mode: Mode) -> int:
    return training.batch if mode == "strong" else max(1, training.batch * devices // training.devices)
