"""The most FLOP/s of a device in the precision of a Spec: published for a GPU, measured for a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from labkit.plan.spec import Spec
from labkit.prediction.devices import Accelerator, Device, accelerator_of
from labkit.prediction.link_table import CALIBRATE, LinkTable, stored
from labkit.record.documents import Peak
from labkit.setup.machine import Machine


def peak_here(spec: Spec) -> Peak:
    """That of one device of a Spec on this machine."""
    machine = Machine.here()
    if spec.device != "cuda":
        return _measured(spec, machine)
    if not machine.gpus:
        return Peak(None, "this machine has no GPU; name one with --machine")
    name = machine.gpus[0].name
    found = accelerator_of(name)
    return _published(spec, found) if found else Peak(None, f"no published peak of {name} is known here")


def peak_of(spec: Spec, machine: Device) -> Peak:
    """That of one device of a Spec on a machine of the table."""
    return _published(spec, machine.accelerator) if machine.accelerator else peak_here(spec)


def _published(spec: Spec, accelerator: Accelerator) -> Peak:
    flops = accelerator.flops.get(spec.precision or "")
    if flops is None:
        asked = f"no peak for {spec.precision}" if spec.precision else "no peak for a script of unknown precision"
        return Peak(None, f"{accelerator.name} has {asked}, only for {', '.join(accelerator.flops)}")
    return Peak(flops, f"{accelerator.name}, {spec.precision}: {accelerator.sources['flops']}")


def _measured(spec: Spec, machine: Machine) -> Peak:
    """Of the ranks that were measured together, each had a share of the cores; so do the ranks of the Spec."""
    precision, ranks = spec.precision or "fp32", spec.nproc or 1
    table = _nearest([one for one in stored(machine).tables if precision in one.peaks], ranks)
    if table is None:
        return Peak(None, f"no peak of this CPU has been measured for {precision}; measure it with {CALIBRATE}")
    share = min(1.0, machine.cores / ranks) / min(1.0, machine.cores / table.ranks)
    how = f"matrix products in {precision} on one core per rank, {table.title}"
    return Peak(table.peaks[precision] * share, how)


def kernels_of(machine: Machine, ranks: int) -> LinkTable:
    """The measured table with what kernels reach on this machine, of the nearest number of ranks; `LookupError` if
    there is none."""
    table = _nearest([one for one in stored(machine).tables if one.kernels and one.peaks], ranks)
    if table is None:
        raise LookupError(f"what kernels reach on this machine has not been measured; measure it with {CALIBRATE}")
    return table


def _nearest(tables: Sequence[LinkTable], ranks: int) -> LinkTable | None:
    return min(tables, key=lambda one: abs(math.log(one.ranks / ranks)), default=None)
