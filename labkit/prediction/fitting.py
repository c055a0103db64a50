"""Whether the ranks of a plan fit into the memory of their devices."""

from __future__ import annotations

from msgspec.structs import replace

from labkit.common.arguments import shown
from labkit.plan.spec import Spec
from labkit.prediction.devices import Device
from labkit.record.documents import MemoryLimit, Plan
from labkit.setup.machine import Machine

_NO_TRACE = "the peak of a rank is known from a trace only"
_SHARED = "the memory of this machine, which its ranks share; what their processes need besides tensors is not included"


def with_fit(plan: Plan, spec: Spec, machine: Device | None = None) -> Plan:
    """A plan with `fits` and `memory` on a machine of the table, or on this one."""
    peaks = [rank.peak_memory_bytes for rank in plan.ranks]
    known = [one for one in peaks if one is not None]
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
    least = min(gpus[:ranks], key=lambda one: one.memory)
    return _memory(least.memory, _of_a_rank(plan), f"{least.name}, as its driver reports it")
