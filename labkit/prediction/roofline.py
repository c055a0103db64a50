"""Seconds of kernels by the roofline model (Williams, Waterman and Patterson 2009): a kernel takes as long as its FLOPs
or its bytes, whichever is slower, and at least as long as its launch.

Matrix products with short sides reach less than large ones, because their last tiles are not full, and filling and
draining the pipelines of a tile takes a larger part: a product of m × n × k takes 1 + EDGE · (1/m + 1/n + 1/k) times as
long as its FLOPs at the rate of large ones. That is as long as 2 · EDGE more FLOPs for each element of the three
matrices, which a traced kernel has as bytes. Traced kernels and the closed formulas of `prediction/scale/` share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.prediction.devices import Accelerator
from labkit.prediction.link_table import LinkTable

EDGE = 100.0  # elements, fitted to published runs (labkit/MEASUREMENTS.md)
_WIDTHS = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # bytes of an element by type
WITH_TENSOR_CORES = {"tf32": {"fp32": "tf32"}}  # by precision, types whose matrix products have the peak of another


@dataclass(frozen=True)
class Roofline:
    """What one device reaches: FLOP/s by type of the numbers in large products, bytes per second of its memory, the
    seconds of the shortest kernel, and the `edge` of products (0: short sides reach as much as long ones)."""

    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    edge: float = 0.0

    def seconds(self, kernels: Iterable[tuple[str, float, float, int]]) -> float:
        """The time of kernels one after another, each group as (type, FLOPs, bytes, number of them). `LookupError` for
        matrix products of a type without a peak."""
        return sum(count * self._one(kind, flops, size) for kind, flops, size, count in kernels)

    def _one(self, kind: str, flops: float, size: float) -> float:
        if flops and kind not in self.flops:
            raise LookupError(f"no peak is known for matrix products in {kind}, only for {', '.join(self.flops)}")
        product = product_seconds(flops, size / _WIDTHS.get(kind, 4), self.flops[kind], self.edge) if flops else 0.0
        return max(product, size / self.bandwidth, self.launch)


def product_seconds(flops: float, elements: float, rate: float, edge: float = EDGE) -> float:
    """The seconds of a matrix product of so many FLOPs whose three matrices have so many elements together, at the
    `rate` of large products in FLOP/s."""
    return (flops + 2 * edge * elements) / rate


def of_accelerator(accelerator: Accelerator, precision: str, share: float) -> Roofline:
    """That of an accelerator for a training in a precision: `share` from 0 to 1 chooses between the least and the most
    that its kernels reach."""

    def reached(name: str) -> float:
        least, most = accelerator.reached[name]
        return least + share * (most - least)

    peaks = dict(accelerator.flops)
    for kind, other in WITH_TENSOR_CORES.get(precision, {}).items():
        peaks[kind] = peaks[other]
    return Roofline(
        {kind: peak * reached("products") for kind, peak in peaks.items()},
        accelerator.bandwidth * reached("copies"),
        reached("launch"),
        EDGE,
    )


def of_cores(table: LinkTable, share: float) -> Roofline:
    """That of a rank of this machine, whose kernels reach between half and all of what was measured; half is an
    assumption."""
    reached = (1 + share) / 2
    peaks = {kind: reached * peak for kind, peak in table.peaks.items()}
    return Roofline(peaks, reached * table.kernels["copies"], table.kernels["launch"] / reached)


def with_seconds(program: Iterable[Iterable[Any]], roofline: Roofline) -> list[list[Any]]:
    """A program of `tracing.work` with the seconds of its kernels in their place, as `simulation.program_of` reads
    it."""
    found = []
    for kind, *rest in program:
        if kind == "compute":
            phase, kernels = rest
            rest = [phase, [roofline.seconds(kernels)]]
        found.append([kind, *rest])
    return found
