"""Machines by name: what their accelerators compute and store, and what their links carry. Rows are data.

Every figure names its public source. `here` is the machine that the lab runs on, whose figures are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.common.arguments import check_choice, shown


@dataclass(frozen=True)
class Rate:
    """One protocol on one link: seconds per message between neighbours (`hop`), and bytes per second and direction that
    one rank sends."""

    hop: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """A link as NCCL uses it: `simple` has the full bandwidth, `low_latency` (LL, a flag with every 4 bytes) the
    shortest messages. `source` names the sources of the figures."""

    name: str
    simple: Rate
    low_latency: Rate
    source: str


@dataclass(frozen=True)
class Accelerator:
    """One GPU. `flops` is the peak per second by precision (dense, without sparsity), `memory` in bytes, `bandwidth` of
    the memory in bytes per second, `workspace` the bytes that PyTorch gives to each handle of cuBLAS. `efficiency`
    is the fraction of the peak that the computation of a training step reaches, a stated assumption. `reached` has
    the least and the most that single kernels reach: `products`, the fraction of the peak in matrix products,
    `copies`, the fraction of the bandwidth in kernels that only move bytes, and `launch`, the seconds of the
    shortest kernel. `sources` names the source of each figure; `driver` is how the names begin that the driver has
    for it and for its variants with the same peak."""

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    efficiency: float
    reached: Mapping[str, tuple[float, float]]
    sources: Mapping[str, str] = field(repr=False)
    driver: str
    workspace: int

    def peak(self, precision: str) -> float:
        """FLOP/s of a precision; `ValueError` if it has none for it."""
        return self.flops[check_choice(f"precision on {self.name}", precision, self.flops)]


@dataclass(frozen=True)
class Device:
    """A named machine: nodes of `per_node` accelerators, with links `inside` a node and `between` nodes (None: there is
    one node). If `accelerator` and `inside` are None, all figures are measured on this machine."""

    name: str
    title: str
    per_node: int = 0
    accelerator: Accelerator | None = None
    inside: Link | None = None
    between: Link | None = None


_MIB = 1 << 20
BEFORE_HOPPER = 2 * 4 * _MIB + 8 * 16 * 1024  # in pieces of 4 MiB and 16 KiB
WORKSPACES = BEFORE_HOPPER, 32 * _MIB  # PyTorch's default CUBLAS_WORKSPACE_CONFIG, the latter of pull request 120925
_TUNING = "seconds per hop and the bandwidth of LL: NCCL, src/graph/tuning.cc, ncclTunerConstantsDefaults"
_MEASURED = (
    "median of the hardware FLOPs utilisation of one node with FSDP at a sequence of 2,048 tokens, MosaicML LLM"
    " Foundry, scripts/train/benchmarking"
)
_LARGEST = "the fastest product of two matrices in bf16, S. Bekman, Machine Learning Engineering, compute/accelerator"
_KERNELS = {"copies": (0.6, 0.87), "launch": (9.6e-6, 3.8e-6)}
_OF_KERNELS = {
    "copies": "at most what a copy reaches on an H100, 2,903 of 3,350 GB/s (github.com/aigatech/vpbenchmarking); the"
    " least is an assumption",
    "launch": "short kernels with and without a synchronisation after each, on a V100: A. Gray, Getting Started with"
    " CUDA Graphs, NVIDIA 2019",
}

T4 = Accelerator(
    "NVIDIA T4",
    {"fp32": 8.1e12, "fp16": 65e12},
    15 << 30,
    320e9,
    0.37,
    {"products": (0.3, 0.45), **_KERNELS},
    {
        "flops": "NVIDIA T4 data sheet",
        "memory": "16 GB by the data sheet, of which nvidia-smi reports 15,360 MiB",
        "bandwidth": "NVIDIA T4 product brief (GDDR6, 256 bit)",
        "efficiency": "24 of 65 TFLOP/s in cuBLAS, limited by 70 W: forums.developer.nvidia.com/t/264462",
        "products": "an assumption around the efficiency",
        **_OF_KERNELS,
    },
    "Tesla T4",
    BEFORE_HOPPER,
)
A100 = Accelerator(
    "NVIDIA A100 SXM 80 GB",
    {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    80 << 30,
    2039e9,
    0.62,
    {"products": (0.62, 0.869), **_KERNELS},
    {
        "flops": "NVIDIA A100 data sheet",
        "memory": "NVIDIA A100 data sheet; nvidia-smi reports 81,920 MiB",
        "bandwidth": "NVIDIA A100 data sheet",
        "efficiency": f"{_MEASURED}, 1B to 30B: 60 to 74 %",
        "products": f"the efficiency, and {_LARGEST}: 271.2 of 312 TFLOP/s",
        **_OF_KERNELS,
    },
    "NVIDIA A100",
    BEFORE_HOPPER,
)
H100 = Accelerator(
    "NVIDIA H100 SXM 80 GB",
    {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12},
    81_559 << 20,
    3350e9,
    0.44,
    {"products": (0.44, 0.803), **_KERNELS},
    {
        "flops": "NVIDIA H100 data sheet, without sparsity",
        "memory": "80 GB by the data sheet, of which nvidia-smi reports 81,559 MiB",
        "bandwidth": "NVIDIA H100 data sheet",
        "efficiency": f"{_MEASURED}, 1B to 30B: 40 to 51 %",
        "products": f"the efficiency, and {_LARGEST}: 794.5 of 989 TFLOP/s",
        **_OF_KERNELS,
    },
    "NVIDIA H100 80GB HBM3",
    32 * _MIB,
)
_PCIE3 = Link(
    "PCIe 3.0 x16",
    Rate(5.7e-6, 12e9),
    Rate(1.0e-6, 6e9),
    f"12 GB/s, of 16 GB/s by the data sheet of the T4: NCCL, src/graph/topo.h, PCI_BW; {_TUNING}",
)
_NVLINK3 = Link(
    "NVLink 3",
    Rate(3.4e-6, 12 * 20.0e9),
    Rate(0.6e-6, 87.7e9),
    f"12 links (A100 data sheet: 600 GB/s in both directions) of 20.0 GB/s: NCCL, src/graph/topo.h; {_TUNING}",
)
_NVLINK4 = Link(
    "NVLink 4",
    Rate(3.4e-6, 18 * 20.6e9),
    Rate(0.6e-6, 141e9),
    f"18 links (H100 data sheet: 900 GB/s in both directions) of 20.6 GB/s: NCCL, src/graph/topo.h; {_TUNING}",
)
_HDR = Link(
    "InfiniBand HDR",
    Rate(14e-6, 25e9),
    Rate(2.7e-6, 22.5e9 / 8),
    f"one adapter of 200 Gbit/s per GPU: NVIDIA DGX A100 data sheet; {_TUNING} (22.5 GB/s for the rings of a node)",
)
_NDR = Link(
    "InfiniBand NDR",
    Rate(14e-6, 50e9),
    Rate(2.7e-6, 45e9 / 8),
    f"one adapter of 400 Gbit/s per GPU: NVIDIA DGX H100 data sheet; {_TUNING} (45 GB/s for the rings of a node)",
)

HERE = "here"
DEVICES: dict[str, Device] = {
    one.name: one
    for one in (
        Device(HERE, "this machine, as measured by labkit doctor --calibrate"),
        Device("t4x2", "2 × T4 with PCIe", 2, T4, _PCIE3),
        Device("a100x8", "nodes of 8 × A100 with NVLink, InfiniBand HDR between nodes", 8, A100, _NVLINK3, _HDR),
        Device("h100x8", "nodes of 8 × H100 with NVLink, InfiniBand NDR between nodes", 8, H100, _NVLINK4, _NDR),
    )
}
ACCELERATED = tuple(name for name, one in DEVICES.items() if one.accelerator)  # with all figures in the table
DEFAULT_MACHINE = "h100x8"


def device(name: str) -> Device:
    """The machine of this name; `ValueError` with all names if there is none."""
    return DEVICES[check_choice("device", name, DEVICES)]


def accelerator_of(name: str) -> Accelerator | None:
    """The accelerator that the driver calls `name`; None if the table has none."""
    known = (one.accelerator for one in DEVICES.values() if one.accelerator)
    return next((one for one in known if name.startswith(one.driver)), None)


def check_fits(machine: Device, ranks: int, nodes: int) -> None:
    """`LookupError` if the machine has no such nodes: too many ranks per node, or several nodes without a link."""
    if nodes > 1 and machine.between is None:
        raise LookupError(f"{machine.title} is one node, got nodes={shown(nodes)}")
    if ranks > nodes * machine.per_node:
        raise LookupError(
            f"{machine.title} has {machine.per_node} accelerators per node, got {ranks} ranks on {nodes} nodes"
        )
