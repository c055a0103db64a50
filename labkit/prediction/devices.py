"""Machines by name: what their accelerators compute and store, and what their links carry. Rows are data.

Every figure names its public source. `here` is the machine that the lab runs on, whose figures are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
    shortest messages. `jitter`: the part of a step that all ranks wait for the slowest one, for each doubling of the
    nodes that the link joins. `source` names the sources of the figures."""

    name: str
    simple: Rate
    low_latency: Rate
    source: str
    jitter: float = 0.01


# Bytes that PyTorch gives to each handle of cuBLAS: CUBLAS_WORKSPACE_CONFIG by default, in pieces of 4 MiB and of 16
# KiB, and as pull request 120925 of PyTorch sets it.
BEFORE_HOPPER, FROM_HOPPER = (2 * 4096 + 8 * 16) << 10, 32 << 20


@dataclass(frozen=True)
class Accelerator:
    """One GPU. `flops` is the peak per second by precision (dense, without sparsity), `memory` in bytes, `bandwidth` of
    the memory in bytes per second. What training reaches of them: `efficiency`, the fraction of the peak in large
    matrix products, and `attention`, that in fused attention with heads of 128 numbers, causal FLOPs only. `reached`
    has the least and the most that single kernels reach: `products`, the fraction of the peak in matrix products,
    `copies`, the fraction of the bandwidth in kernels that only move bytes, and `launch`, the seconds of the shortest
    kernel. `sources` names the source of each figure; `driver` is how the names begin that the driver has for it and
    for its variants with the same peak; `workspace` is that of a handle of cuBLAS, in bytes."""

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    efficiency: float
    attention: float
    reached: Mapping[str, tuple[float, float]]
    sources: Mapping[str, str] = field(repr=False)
    driver: str
    workspace: int = BEFORE_HOPPER

    def peak(self, precision: str) -> float:
        """FLOP/s of a precision; `ValueError` if it has none for it."""
        return self.flops[check_choice(f"precision on {self.name}", precision, self.flops)]


@dataclass(frozen=True)
class Device:
    """A named machine: nodes of `per_node` accelerators, with links `inside` a node and `between` nodes (None: there is
    one node). If `accelerator` and `inside` are None, all figures are measured on this machine. `crowded`: seconds that
    a message of a pipeline waits if very many ranks send some, as measured on one such cluster (0: not known)."""

    name: str
    title: str
    per_node: int = 0
    accelerator: Accelerator | None = None
    inside: Link | None = None
    between: Link | None = None
    crowded: float = 0.0


_TUNING = "seconds per hop and the bandwidth of LL: NCCL, src/graph/tuning.cc, ncclTunerConstantsDefaults"
_LARGEST = "the fastest product of two matrices in bf16, S. Bekman, Machine Learning Engineering, compute/accelerator"
_KERNELS = {"copies": (0.6, 0.87), "launch": (9.6e-6, 3.8e-6)}
_OF_KERNELS = {
    "copies": "at most what a copy reaches on an H100, 2,903 of 3,350 GB/s (github.com/aigatech/vpbenchmarking); the"
    " least is an assumption",
    "launch": "short kernels with and without a synchronisation after each, on a V100: A. Gray, Getting Started with"
    " CUDA Graphs, NVIDIA 2019",
}

_FITTED = "fitted to published runs, see labkit/MEASUREMENTS.md"
_ASSUMED = "an assumption: that of the measured generation before it"

GIB, MIB = 1 << 30, 1 << 20


def _gpu(
    name: str,
    driver: str,
    flops: Mapping[str, float],
    stores: tuple[int, float],
    reached: tuple[float, float, float],
    fitted: str,
    sheet: str,
    sources: Mapping[str, str] | None = None,
    workspace: int = BEFORE_HOPPER,
) -> Accelerator:
    """A row: `flops` in 10¹² per second; `stores` has the memory, and its bandwidth in 10⁹ bytes per second; `reached`
    the efficiency, that in attention, and the largest fraction of the peak that products reach, with the efficiency in
    the middle of their range. Peak, memory and bandwidth are those of a data `sheet` unless `sources` say otherwise;
    `fitted` says where efficiency and attention come from."""
    (memory, bandwidth), (efficiency, attention, largest) = stores, reached
    said = {"flops": sheet, "memory": sheet, "bandwidth": sheet, "efficiency": fitted, "attention": fitted}
    peaks = {precision: rate * 1e12 for precision, rate in flops.items()}
    ranges = {"products": (2 * efficiency - largest, largest), **_KERNELS}
    known = {**said, "products": "an assumption: a range around the efficiency", **_OF_KERNELS, **(sources or {})}
    return Accelerator(name, peaks, memory, bandwidth * 1e9, efficiency, attention, ranges, known, driver, workspace)


T4 = _gpu(
    "NVIDIA T4",
    "Tesla T4",
    {"fp32": 8.1, "fp16": 65},
    (15 * GIB, 320),
    (0.37, 0.1, 0.45),
    "24 of 65 TFLOP/s in cuBLAS, limited by 70 W: forums.developer.nvidia.com/t/264462",
    "NVIDIA T4 data sheet",
    {
        "memory": "16 GB by the data sheet, of which nvidia-smi reports 15,360 MiB",
        "bandwidth": "NVIDIA T4 product brief (GDDR6, 256 bit)",
        "attention": "an assumption: its share of the efficiency as on an A100",
    },
)
V100 = _gpu(
    "NVIDIA V100 SXM2 16 GB",
    "Tesla V100-SXM2-16GB",
    {"fp32": 15.7, "fp16": 125},
    (16 * GIB, 900),
    (0.62, 0.16, 0.75),
    _ASSUMED,
    "NVIDIA V100 data sheet",
)
V100_32 = replace(V100, name="NVIDIA V100 SXM3 32 GB", driver="Tesla V100-SXM2-32GB", memory=32 * GIB)
_A100_PEAKS = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}
_A100_PRODUCTS = f"at most {_LARGEST}: 271.2 of 312 TFLOP/s"
A100 = _gpu(
    "NVIDIA A100 SXM 80 GB",
    "NVIDIA A100",
    _A100_PEAKS,
    (80 * GIB, 2039),
    (0.81, 0.34, 0.869),
    _FITTED,
    "NVIDIA A100 data sheet",
    {"memory": "NVIDIA A100 data sheet; nvidia-smi reports 81,920 MiB", "products": _A100_PRODUCTS},
)
A100_40 = _gpu(
    "NVIDIA A100 SXM 40 GB",
    "NVIDIA A100-SXM4-40GB",
    _A100_PEAKS,
    (40 * GIB, 1555),
    (0.81, 0.34, 0.869),
    "as of the A100 with 80 GB",
    "NVIDIA A100 data sheet",
    {"products": _A100_PRODUCTS},
)
_HOPPER = {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_H100_PRODUCTS = f"at most {_LARGEST}: 794.5 of 989 TFLOP/s"
H100 = _gpu(
    "NVIDIA H100 SXM 80 GB",
    "NVIDIA H100 80GB HBM3",
    _HOPPER,
    (81_559 * MIB, 3350),
    (0.7, 0.175, 0.803),
    _FITTED,
    "NVIDIA H100 data sheet, without sparsity",
    {"memory": "80 GB by the data sheet, of which nvidia-smi reports 81,559 MiB", "products": _H100_PRODUCTS},
    workspace=FROM_HOPPER,
)
H100_96 = _gpu(
    "NVIDIA H100 SXM 96 GB, 500 W",
    "NVIDIA H100 96GB",
    _HOPPER,
    (97_871 * MIB, 2400),
    (0.56, 0.175, 0.7),
    _FITTED,
    "NVIDIA H100 data sheet, without sparsity",
    {
        "memory": "96 GB, of which nvidia-smi reports 97,871 MiB",
        "bandwidth": "96 GB of HBM2e at 2.4 TB/s: pytorch/torchtitan, benchmarks",
    },
    workspace=FROM_HOPPER,
)
H200 = _gpu(
    "NVIDIA H200 SXM",
    "NVIDIA H200",
    _HOPPER,
    (143_771 * MIB, 4800),
    (0.7, 0.175, 0.803),
    "as of the H100, which has the same chip",
    "NVIDIA H200 data sheet, without sparsity",
    {"memory": "141 GB by the data sheet, of which nvidia-smi reports 143,771 MiB"},
    workspace=FROM_HOPPER,
)
_BLACKWELL = {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500}
B200 = _gpu(
    "NVIDIA B200",
    "NVIDIA B200",
    _BLACKWELL,
    (180 * GIB, 8000),
    (0.7, 0.16, 0.8),
    _ASSUMED,
    "NVIDIA DGX B200 data sheet, without sparsity",
    workspace=FROM_HOPPER,
)
GB200 = _gpu(
    "NVIDIA GB200",
    "NVIDIA GB200",
    {**_BLACKWELL, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000},
    (186 * GIB, 8000),
    (0.7, 0.16, 0.8),
    _ASSUMED,
    "NVIDIA GB200 NVL72 data sheet, without sparsity",
    workspace=FROM_HOPPER,
)
MI300X = _gpu(
    "AMD Instinct MI300X",
    "AMD Instinct MI300X",
    {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
    (192 * GIB, 5300),
    (0.5, 0.12, 0.6),
    "about half of the peak in large products: S. Bekman, Machine Learning Engineering, compute/accelerator",
    "AMD Instinct MI300X data sheet, without sparsity",
)
MI250X = _gpu(
    "AMD Instinct MI250X, one of two dies",
    "AMD Instinct MI250X",
    {"fp32": 47.9, "bf16": 191.5, "fp16": 191.5},
    (64 * GIB, 1638),
    (0.6, 0.15, 0.7),
    "an assumption",
    "AMD Instinct MI250X data sheet",
)
L4 = _gpu(
    "NVIDIA L4",
    "NVIDIA L4",
    {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5},
    (23_034 * MIB, 300),
    (0.5, 0.16, 0.6),
    "an assumption: limited by 72 W, as the T4 by 70 W",
    "NVIDIA L4 data sheet, without sparsity",
)
A10G = _gpu(
    "NVIDIA A10G",
    "NVIDIA A10G",
    {"fp32": 31.2, "tf32": 35, "bf16": 70, "fp16": 70},
    (23_028 * MIB, 600),
    (0.8, 0.3, 0.85),
    "as of the A100",
    "AWS, EC2 G5 instances: 70 TFLOP/s dense in 16 bits",
)
A6000 = _gpu(
    "NVIDIA RTX A6000",
    "NVIDIA RTX A6000",
    {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8},
    (49_140 * MIB, 768),
    (0.75, 0.3, 0.8),
    "as of the A100, limited by 300 W",
    "NVIDIA RTX A6000 data sheet, without sparsity",
)
RTX3090 = _gpu(
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 3090",
    {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
    (24 * GIB, 936),
    (0.85, 0.4, 0.95),
    "an assumption: products in 16 bits with sums in 32 bits come close to the halved peak",
    "NVIDIA Ampere GA102 whitepaper, with FP32 accumulation",
)
RTX4090 = _gpu(
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 4090",
    {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    (24_564 * MIB, 1008),
    (0.85, 0.4, 0.95),
    "an assumption: products in 16 bits with sums in 32 bits come close to the halved peak",
    "NVIDIA Ada GPU architecture whitepaper, with FP32 accumulation",
)


def _nvlink(generation: int, links: int, each: float, low: float, sheet: str) -> Link:
    """NVLink: `links` of `each` 10⁹ bytes per second, `low` with the LL protocol; the hops are those of NCCL."""
    known = f"{links} links ({sheet}) of {each} GB/s: NCCL, src/graph/topo.h; {_TUNING}"
    return Link(f"NVLink {generation}", Rate(3.4e-6, links * each * 1e9), Rate(0.6e-6, low * 1e9), known)


def _network(name: str, adapter: float, reached: float, source: str, jitter: float = 0.01) -> Link:
    """A network with one adapter of `adapter` 10⁹ bytes per second for each GPU, of which collectives reach the
    fraction `reached`."""
    rate = adapter * reached * 1e9
    return Link(name, Rate(14e-6, rate), Rate(2.7e-6, 0.9 * rate / 8), f"{source}; {_TUNING}", jitter)


_PCIE3 = Link(
    "PCIe 3.0 x16",
    Rate(5.7e-6, 12e9),
    Rate(1.0e-6, 6e9),
    f"12 GB/s, of 16 GB/s by the data sheet of the T4: NCCL, src/graph/topo.h, PCI_BW; {_TUNING}",
)
_PCIE4 = Link(
    "PCIe 4.0 x16",
    Rate(5.7e-6, 24e9),
    Rate(1.0e-6, 12e9),
    f"twice PCIe 3.0 (PCI-SIG), as NCCL, src/graph/topo.h, PCI_BW for it; {_TUNING}",
)
_NVLINK2 = _nvlink(2, 6, 20.0, 39, "V100 data sheet: 300 GB/s in both directions")
_NVLINK3 = _nvlink(3, 12, 20.0, 87.7, "A100 data sheet: 600 GB/s in both directions")
_NVLINK4 = _nvlink(4, 18, 20.6, 141, "H100 data sheet: 900 GB/s in both directions")
_NVLINK5 = _nvlink(5, 18, 40.1, 282, "B200 data sheet: 1,800 GB/s in both directions")
_FABRIC = Link(
    "Infinity Fabric",
    Rate(3.4e-6, 7 * 45e9),
    Rate(0.6e-6, 100e9),
    "7 links of 64 GB/s to the other GPUs, of which 45 are reached (AMD Instinct MI300X data sheet); hops as of NVLink",
)
_EDR = _network("InfiniBand EDR", 12.5 / 2, 1, "4 adapters of 100 Gbit/s for 8 GPUs: NVIDIA DGX-1V data sheet")
_HDR = _network("InfiniBand HDR", 25, 1, "one adapter of 200 Gbit/s per GPU: NVIDIA DGX A100 data sheet")
_NDR = _network("InfiniBand NDR", 50, 1, "one adapter of 400 Gbit/s per GPU: NVIDIA DGX H100 data sheet")
_XDR = _network("InfiniBand NDR", 50, 1, "one adapter of 400 Gbit/s per GPU: NVIDIA DGX B200 data sheet")
_EFA = _network("EFA, 3,200 Gbit/s", 50, 0.75, f"AWS, EC2 P5 instances; the reached fraction is {_FITTED}", 0.03)
_EFA1 = _network("EFA, 400 Gbit/s", 6.25, 0.7, "AWS, EC2 P4 instances; the reached fraction as of P5")
_ROCE1 = _network("RoCE, 1,600 Gbit/s", 25, 0.8, "MosaicML LLM Foundry, scripts/train/benchmarking; reached: assumed")
_ROCE = _network("RoCE, 3,200 Gbit/s", 50, 0.8, "Meta, The Llama 3 Herd of Models, section 3.3.1; reached: assumed")
_OPA = _network("Omni-Path 100", 6.25, 0.8, "4 adapters of 100 Gbit/s for 8 GPUs: IDRIS, Jean Zay; reached: assumed")
_SLINGSHOT = _network("Slingshot 11", 12.5, 0.8, "4 adapters of 200 Gbit/s for 8 dies: LUMI documentation")

HERE = "here"
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(HERE, "this machine, as measured by labkit doctor --calibrate"),
        Device("t4x2", "2 × T4 with PCIe", 2, T4, _PCIE3),
        Device("a100x8", "nodes of 8 × A100 with NVLink, InfiniBand HDR between nodes", 8, A100, _NVLINK3, _HDR),
        Device("h100x8", "nodes of 8 × H100 with NVLink, InfiniBand NDR between nodes", 8, H100, _NVLINK4, _NDR),
        Device("h100x8-efa", "nodes of 8 × H100 with NVLink, EFA between nodes", 8, H100, _NVLINK4, _EFA, 0.41),
        Device("h100x8-roce", "nodes of 8 × H100 with NVLink, RoCE between nodes", 8, H100, _NVLINK4, _ROCE),
        Device("h100x8-96gb", "nodes of 8 × H100 with 96 GB and 500 W, InfiniBand", 8, H100_96, _NVLINK4, _NDR),
        Device("h200x8", "nodes of 8 × H200 with NVLink, InfiniBand NDR between nodes", 8, H200, _NVLINK4, _NDR),
        Device("b200x8", "nodes of 8 × B200 with NVLink, InfiniBand NDR between nodes", 8, B200, _NVLINK5, _XDR),
        Device("gb200-nvl72", "racks of 72 × GB200 in one NVLink domain, InfiniBand NDR", 72, GB200, _NVLINK5, _XDR),
        Device("a100x8-40gb", "nodes of 8 × A100 with 40 GB, InfiniBand HDR between nodes", 8, A100_40, _NVLINK3, _HDR),
        Device("a100x8-roce", "nodes of 8 × A100 with NVLink, RoCE between nodes", 8, A100, _NVLINK3, _ROCE1),
        Device("a100x8-opa", "nodes of 8 × A100 with NVLink, Omni-Path between nodes", 8, A100, _NVLINK3, _OPA),
        Device("a100x8-efa", "nodes of 8 × A100 with 40 GB, EFA between nodes", 8, A100_40, _NVLINK3, _EFA1),
        Device("v100x8", "nodes of 8 × V100 with 16 GB, InfiniBand EDR between nodes", 8, V100, _NVLINK2, _EDR),
        Device("v100x8-32gb", "nodes of 8 × V100 with 32 GB, InfiniBand EDR", 8, V100_32, _NVLINK2, _EDR),
        Device("mi300x8", "nodes of 8 × MI300X with Infinity Fabric, InfiniBand NDR", 8, MI300X, _FABRIC, _NDR),
        Device("mi250x8", "nodes of 8 dies of MI250X with Infinity Fabric, Slingshot", 8, MI250X, _FABRIC, _SLINGSHOT),
        Device("a10gx8", "8 × A10G with PCIe", 8, A10G, _PCIE4),
        Device("a6000x8", "8 × RTX A6000 with PCIe", 8, A6000, _PCIE4),
        Device("rtx3090", "up to 8 × RTX 3090 with PCIe", 8, RTX3090, _PCIE4),
        Device("rtx4090", "up to 8 × RTX 4090 with PCIe", 8, RTX4090, _PCIE4),
        Device("l4", "up to 8 × L4 with PCIe", 8, L4, _PCIE4),
    )
}
ACCELERATED = tuple(name for name, device in DEVICES.items() if device.accelerator)  # with all figures in the table
DEFAULT_MACHINE = "h100x8"


def device(name: str) -> Device:
    """The machine of this name; `ValueError` with all names if there is none."""
    return DEVICES[check_choice("device", name, DEVICES)]


def accelerator_of(name: str) -> Accelerator | None:
    """The accelerator that the driver calls `name`; None if the table has none."""
    known = (device.accelerator for device in DEVICES.values() if device.accelerator)
    matching = (accelerator for accelerator in known if name.startswith(accelerator.driver))
    return max(matching, key=lambda accelerator: len(accelerator.driver), default=None)


def check_fits(machine: Device, ranks: int, nodes: int) -> None:
    """`LookupError` if the machine has no such nodes: too many ranks per node, or several nodes without a link."""
    if nodes > 1 and machine.between is None:
        raise LookupError(f"{machine.title} is one node, got nodes={shown(nodes)}")
    if ranks > nodes * machine.per_node:
        raise LookupError(
            f"{machine.title} has {machine.per_node} accelerators per node, got {ranks} ranks on {nodes} nodes"
        )
