"""What a GPU adds to a trace: the peak of PyTorch's caching allocator, and estimates of the memory outside of it.

The peak is that of `torch.cuda.max_memory_allocated()`: the blocks of all tensors and the workspaces of cuBLAS, from a
replay of the allocator. The estimates are published figures with a range, and each names its source.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from labkit.prediction.devices import BEFORE_HOPPER, Accelerator, Device, accelerator_of
from labkit.record.documents import AllocatorPeak, Called, Estimate, Plan, PredictedClass
from labkit.setup.machine import Machine

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
        replace(one, peak_memory_bytes=steps[one.rank].peak, at_peak=steps[one.rank].at_peak)
        if one.rank in steps
        else one
        for one in plan.ranks
    ]
    return replace(plan, ranks=ranks, classes=parts)


def _here() -> Accelerator | None:
    gpus = Machine.here().gpus
    return accelerator_of(gpus[0].name) if gpus else None


def _on_gpu(part: PredictedClass, workspace: int) -> PredictedClass:
    found = next((one for one in part.allocator if one.workspace == workspace), None)
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
        ),
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
