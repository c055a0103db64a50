"""Memory of a GPU besides the tensors of a step, as estimates with a range: nothing of it is traced or measured here.

The figures are published, and each estimate names its source. They were not verified on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import Iterable

from labkit.record.documents import Called, Estimate

_MIB = 1 << 20
_CONNECTIONS = 2  # of a rank in a ring, each with a buffer per channel


def estimates(calls: Iterable[Called], allocator: tuple[int, int]) -> list[Estimate]:
    """The estimates for a rank with these collectives; `allocator` are the bytes of `tracing.allocator.overhead`."""
    groups = len({ranks for _, _, ranks in calls if ranks > 1})
    rounding, reserved = allocator
    found = [
        Estimate(
            "CUDA context and kernels",
            low=287_047_680,
            high=666_632_192,
            source="PyTorch pull request 86509, a process with one tensor: kernels loaded lazily, and all at once",
        ),
        Estimate(
            "cuBLAS workspaces",
            low=8_519_680,
            high=64 * _MIB,
            source="PyTorch's default CUBLAS_WORKSPACE_CONFIG before Hopper, and from Hopper on 32 MiB each for"
            " cuBLAS and cuBLASLt (pull request 120925)",
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
            "allocator: rounding and fragmentation",
            low=rounding,
            high=max(rounding, reserved),
            source="rounding at the peak, and what a replay of PyTorch's caching allocator reserves",
        )
    )
    return found
