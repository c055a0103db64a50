"""What is trained, on what: the inputs of every estimate."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from labkit.prediction.collectives import CommunicationModel
from labkit.prediction.devices import Accelerator, Device
from labkit.prediction.scale.model import Model

RESERVED = 0.1  # of a device's memory
RESERVED_FOR = (
    "the rest is for the CUDA context, cuBLAS workspaces, NCCL buffers and fragmentation, as in vLLM's default"
    " gpu_memory_utilization of 0.9"
)


@dataclass(frozen=True)
class Training:
    """A model trained on `devices` of a machine with `batch` samples of `sequence` tokens per step, globally.

    `memory` is that of a device, in bytes; `precision` one that the accelerator has; `attention` is fused or eager.
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

    @property
    def usable(self) -> float:
        """Bytes of a device that the training may use."""
        return self.memory * (1 - RESERVED)

    @property
    def wide(self) -> int:
        """Bytes per number in computation and communication."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    @property
    def recipe(self) -> str:
        """The name in `RECIPES` of the bytes per parameter of the states."""
        return "mixed" if self.wide == 2 else "fp32"

    @cached_property
    def rate(self) -> float:
        """FLOP/s that a device is assumed to reach."""
        return self.accelerator.peak(self.precision) * self.accelerator.efficiency

    @cached_property
    def _known(self) -> dict[tuple[str, int, int, int], float]:
        return {}

    def seconds(self, operation: str, size: float, ranks: int, stride: int) -> float:
        """The seconds of an operation on `size` bytes in a group of `ranks` ranks that are `stride` apart."""
        key = operation, round(size), ranks, stride
        if key not in self._known:
            self._known[key] = self.links.seconds(operation, round(size), ranks, self._nodes(ranks, stride))
        return self._known[key]

    def send(self, size: float, stride: int) -> float:
        """The seconds of a message to the rank that is `stride` away."""
        return self.links.seconds("send", round(size), 2, 1 if stride < self.machine.per_node else 2)

    def _nodes(self, ranks: int, stride: int) -> int:
        """The nodes of a group, with equally many of its ranks in each."""
        near = max(1, self.machine.per_node // stride)
        return ranks // (ranks if ranks <= near else gcd(ranks, near))
