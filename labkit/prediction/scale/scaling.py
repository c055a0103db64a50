"""Strong and weak scaling: how the time of a step changes with the number of devices, for each strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from labkit.prediction.scale.advice import fastest
from labkit.prediction.scale.layouts import layouts
from labkit.prediction.scale.step import Estimate
from labkit.prediction.scale.training import Training

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
        for devices, estimate in zip(reversed(self.devices), reversed(self.estimates)):
            if estimate is None:
                continue
            if not estimate.communication_bound:
                break
            bound = devices
        return bound


def efficiency(one: Estimate) -> float:
    """The time of the model's computation, divided evenly among all devices, as a fraction of the step: 1 is perfect
    scaling. Unlike a ratio to the time on one device, it is known for models that do not fit on one."""
    return one.mfu / one.training.accelerator.efficiency


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
                fits = [
                    estimate
                    for mesh in meshes
                    if mesh.kind == kind or number == 1
                    for estimate in ([fastest(here, mesh)] if here.batch % mesh.data == 0 else [])
                    if estimate
                ]
                found[kind, mode].append(min(fits, key=lambda estimate: estimate.seconds, default=None))
    return tuple(Series(kind, mode, devices, tuple(found[kind, mode])) for kind, mode in found)


def _batch(training: Training, devices: int, mode: Mode) -> int:
    return training.batch if mode == "strong" else max(1, training.batch * devices // training.devices)
