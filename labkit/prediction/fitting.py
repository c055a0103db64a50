"""Whether the ranks of a plan fit into the memory of their devices, with what a GPU needs besides tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from labkit.common.arguments import shown
from labkit.plan.spec import Spec
from labkit.prediction.devices import BEFORE_HOPPER, Accelerator, Device, accelerator_of
from labkit.prediction.links import CALIBRATE, LinkTable, stored
from labkit.record.documents import AllocatorPeak, Called, Estimate, MemoryLimit, Peak, Plan, PredictedClass
from labkit.setup.machine import Machine

# ---- what a GPU adds to a trace


_MIB = 1 << 20
_CONNECTIONS = 2  # of a rank in a ring, each with a buffer per channel


def on_gpus(plan: Plan, machine: Device) -> Plan:
    """A plan of a trace with the peak of each rank on the GPUs of a machine, and what comes on top of it; any other
    plan stays as it is. What is not a tensor of the step counts as `other`."""
    accelerator = machine.accelerator or _here()
    workspace = accelerator.workspace if accelerator else BEFORE_HOPPER
    parts = [_on_gpu(part, workspace) for part in plan.classes]
    steps = {rank: part.step for part in parts if part.allocator for rank in part.ranks}
    ranks = [
        replace(predicted, peak_memory_bytes=steps[predicted.rank].peak, at_peak=steps[predicted.rank].at_peak)
        if predicted.rank in steps
        else predicted
        for predicted in plan.ranks
    ]
    return replace(plan, ranks=ranks, classes=parts)


def _here() -> Accelerator | None:
    gpus = Machine.here().gpus
    return accelerator_of(gpus[0].name) if gpus else None


def _on_gpu(part: PredictedClass, workspace: int) -> PredictedClass:
    found = next((peaks for peaks in part.allocator if peaks.workspace == workspace), None)
    if found is None:
        return part
    step = part.step
    more = found.allocated - step.peak
    owners = {**step.owners, "other": [size + more for size in step.owners["other"]]}
    at_peak = {**step.at_peak, "other": step.at_peak["other"] + more}
    step = replace(step, owners=owners, at_peak=at_peak, peak=found.allocated)
    return replace(part, step=step, estimates=estimates(part.calls, found))


def estimates(calls: Iterable[Called], allocator: AllocatorPeak) -> list[Estimate]:
    """The estimates for a rank with these collectives."""
    groups = len({ranks for _, _, ranks in calls if ranks > 1})
    found = [
        Estimate(
            "CUDA context and kernels",
            low=287_047_680,
            high=666_632_192,
            source="PyTorch pull request 86509, a process with one tensor: kernels loaded lazily, and all at once",
        )
    ]
    if groups:
        found.append(
            Estimate(
                "NCCL buffers",
                low=groups * 2 * _CONNECTIONS * 4 * _MIB,
                high=groups * 32 * _CONNECTIONS * 10 * _MIB,
                source="2 to 32 channels, two connections each; NCCL_BUFFSIZE of 4 MiB (NCCL's documentation) to"
                " buffers of 10 MiB (NCCL issue 1685), for each size of a group",
            )
        )
    found.append(
        Estimate(
            "cached by the allocator",
            low=0,
            high=allocator.reserved - allocator.allocated,
            source="a replay of PyTorch's caching allocator, which gives it back before it runs out of memory",
        )
    )
    return found


# ---- peaks


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
    table = _nearest([candidate for candidate in stored(machine).tables if precision in candidate.peaks], ranks)
    if table is None:
        return Peak(None, f"no peak of this CPU has been measured for {precision}; measure it with {CALIBRATE}")
    share = min(1.0, machine.cores / ranks) / min(1.0, machine.cores / table.ranks)
    how = f"matrix products in {precision} on one core per rank, {table.title}"
    return Peak(table.peaks[precision] * share, how)


def kernels_of(machine: Machine, ranks: int) -> LinkTable:
    """The measured table with what kernels reach on this machine, of the nearest number of ranks; `LookupError` if
    there is none."""
    table = _nearest(
        [candidate for candidate in stored(machine).tables if candidate.kernels and candidate.peaks], ranks
    )
    if table is None:
        raise LookupError(f"what kernels reach on this machine has not been measured; measure it with {CALIBRATE}")
    return table


def _nearest(tables: Sequence[LinkTable], ranks: int) -> LinkTable | None:
    return min(tables, key=lambda table: abs(math.log(table.ranks / ranks)), default=None)


# ---- whether the ranks of a plan fit into the memory of their devices


_NO_TRACE = "the peak of a rank is known from a trace only"
_SHARED = "the memory of this machine, which its ranks share; what their processes need besides tensors is not included"


def with_fit(plan: Plan, spec: Spec, machine: Device | None = None) -> Plan:
    """A plan with `fits` and `memory` on a machine of the table, or on this one."""
    peaks = [rank.peak_memory_bytes for rank in plan.ranks]
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks):
        return replace(plan, fits=None, memory=_memory(None, (0, 0), _NO_TRACE))
    accelerator = machine.accelerator if machine else None
    if accelerator:
        limit, source = accelerator.memory, f"{accelerator.name}: {accelerator.sources['memory']}"
        memory = _memory(limit, _of_a_rank(plan), source)
    elif spec.device == "cuda":
        memory = _on_gpus_here(plan, spec)
    else:
        memory = _memory(Machine.here().memory, (sum(known), sum(known)), _SHARED)
    return replace(plan, fits=_fits(memory), memory=memory)


def _memory(limit: float | None, needed: tuple[float, float], source: str) -> MemoryLimit:
    return MemoryLimit(limit_bytes=limit, low_bytes=needed[0], high_bytes=needed[1], source=source)


def _fits(memory: MemoryLimit) -> bool | None:
    limit = memory.limit_bytes
    if limit is None or memory.low_bytes <= limit < memory.high_bytes:
        return None
    return memory.high_bytes <= limit


def _of_a_rank(plan: Plan) -> tuple[float, float]:
    """The bytes of the rank that needs the most, with the least and the most of each estimate."""
    found = [(part.step.peak, part.estimates) for part in plan.classes]
    low = max(peak + sum(estimate.low for estimate in estimates) for peak, estimates in found)
    return low, max(peak + sum(estimate.high for estimate in estimates) for peak, estimates in found)


def _on_gpus_here(plan: Plan, spec: Spec) -> MemoryLimit:
    gpus, ranks = Machine.here().gpus, spec.nproc or 1
    if len(gpus) < ranks:
        why = f"this machine has {shown(len(gpus))} GPUs for {ranks} ranks; name a machine with --machine"
        return _memory(None, _of_a_rank(plan), why)
    least = min(gpus[:ranks], key=lambda gpu: gpu.memory)
    return _memory(least.memory, _of_a_rank(plan), f"{least.name}, as its driver reports it")
