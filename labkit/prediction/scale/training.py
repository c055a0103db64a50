"""What is trained, on what: the inputs of every estimate."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from labkit.prediction.devices import Accelerator, Device
from labkit.prediction.links import CommunicationModel
from labkit.prediction.scale.frameworks import USABLE
from labkit.prediction.scale.layouts import Layout
from labkit.prediction.scale.model import Model
from labkit.prediction.timing import product_seconds

# Products in fp8 by how numbers are scaled: their efficiency, relative to that in 16 bits, and the traffic of all other
# operations, relative to that without conversions. Fitted to torchtitan's benchmarks.
FP8 = {"tensorwise": (0.9, 1.5), "rowwise": (0.5, 2.0)}
CROWDED_DEVICES, CROWDED_SAMPLES = 256, 512
RESERVED_FOR = (
    "the rest is for the CUDA context, cuBLAS workspaces, NCCL buffers and fragmentation, as in vLLM's default"
    " gpu_memory_utilization of 0.9"
)


@dataclass(frozen=True)
class Training:
    """A model trained on `devices` of a machine with `batch` samples of `sequence` tokens per step, globally.

    `memory` is that of a device, in bytes; `precision` one that the accelerator has; `attention` is fused or eager;
    `scaling` of numbers in fp8 is `tensorwise` or `rowwise`.
    """

    model: Model
    machine: Device
    accelerator: Accelerator
    links: CommunicationModel = field(repr=False)
    devices: int
    batch: int
    sequence: int
    memory: int
    precision: str
    attention: str = "fused"
    scaling: str = "tensorwise"

    @property
    def usable(self) -> float:
        """Bytes of a device that the training may use."""
        return self.memory * USABLE

    @property
    def wide(self) -> int:
        """Bytes per number in computation and communication; products in fp8 read and write 16-bit numbers."""
        return 2 if self.precision in ("bf16", "fp16", "fp8") else 4

    @property
    def sixteen(self) -> str:
        """The precision of what is not computed in fp8: attention and the head."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def casts(self) -> float:
        """Traffic of the operations between matrix products, relative to that without conversion to fp8."""
        return FP8[self.scaling][1] if self.precision == "fp8" else 1.0

    @property
    def recipe(self) -> str:
        """The name in `RECIPES` of the bytes per parameter of the states."""
        return "mixed" if self.wide == 2 else "fp32"

    @cached_property
    def rate(self) -> float:
        """FLOP/s of large matrix products, in 16 bits if the layers compute in fp8."""
        return self.accelerator.peak(self.sixteen) * self.accelerator.efficiency

    def product(self, rows: float, columns: float, inner: float, *, layers: bool) -> float:
        """The seconds of a matrix product, of the `layers` in the precision of the training, others in 16 bits if that
        is fp8 (`roofline.product_seconds`)."""
        rate = self.accelerator.peak(self.precision if layers else self.sixteen) * self.accelerator.efficiency
        if layers and self.precision == "fp8":
            rate *= FP8[self.scaling][0]
        elements = rows * columns + rows * inner + columns * inner
        return product_seconds(2 * rows * columns * inner, elements, rate)

    @cached_property
    def _known(self) -> dict[tuple[str, int, int, int], float]:
        return {}

    def seconds(self, operation: str, size: float, ranks: int, stride: int) -> float:
        """The seconds of an operation on `size` bytes in a group of `ranks` ranks that are `stride` apart."""
        key = operation, round(size), ranks, stride
        if key not in self._known:
            self._known[key] = self.links.seconds(operation, round(size), ranks, self.nodes(ranks, stride))
        return self._known[key]

    def send(self, size: float, stride: int) -> float:
        """The seconds of a message to the rank that is `stride` away."""
        return self.links.seconds("send", round(size), 2, 1 if stride < self.machine.per_node else 2)

    def crowded(self, layout: Layout) -> float:
        """Seconds per micro-batch that the messages of a pipeline wait in a network that is too busy for them."""
        if self.devices < CROWDED_DEVICES or self.devices * layout.micro_batch < CROWDED_SAMPLES:
            return 0.0
        return 2 * (layout.pipeline - 1) / layout.pipeline * self.machine.crowded

    def nodes(self, ranks: int, stride: int) -> int:
        """The nodes of a group, with equally many of its ranks in each."""
        near = max(1, self.machine.per_node // stride)
        return ranks // (ranks if ranks <= near else gcd(ranks, near))
