"""Communication against computation in the MLP of one layer: the tokens per device at which a layout becomes bound by
computation (modelled).

Forward only, in bf16, for an MLP of two matrices, width × inner and inner × width; backward has twice of both. The
comparison is that of Austin et al., How to Scale Your Model (2025), chapter "Training" (jax-ml.github.io/scaling-book):
all communication overlaps with computation, but not with other communication. The times are those of the table of
machines, so that a ring over whole nodes uses all network adapters of a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from labkit.common.arguments import Number, check_choice
from labkit.prediction.devices import ACCELERATED, DEFAULT_MACHINE, DEVICES
from labkit.prediction.links import Modelled

_WIDE = 2  # bytes of a number in bf16
_COUNT = Number(int, 1, 1 << 20)
MOST_TOKENS = 1 << 20  # per device: a layout that is bound by communication there is so with any batch

Ratio = Callable[[int], float]  # from tokens per device to seconds of communication per second of computation


@dataclass(frozen=True)
class Balance:
    """`devices` on whole nodes of a named machine, and an MLP of `width` × `inner`; an expert has `expert` instead of
    `inner`. `ValueError` if a number or the machine is impossible."""

    machine: str = DEFAULT_MACHINE
    devices: int = 64
    width: int = 8192
    inner: int = 28672
    expert: int = 2048

    def __post_init__(self) -> None:
        row = DEVICES[check_choice("machine", self.machine, ACCELERATED)]
        for name in ("devices", "width", "inner", "expert"):
            _COUNT.check(name, getattr(self, name))
        if self.devices % row.per_node or self.devices == row.per_node:
            raise ValueError(f"devices must be two or more nodes of {row.per_node}, got {self.devices}")

    def ratios(self) -> dict[str, Ratio]:
        """By layout, communication per computation as a function of the tokens per device. Tensor parallelism has the
        devices of a node; experts are on one node, or on all."""
        row = DEVICES[self.machine]
        assert row.accelerator is not None
        local, nodes = row.per_node, self.devices // row.per_node
        rate = row.accelerator.peak("bf16") * row.accelerator.efficiency
        seconds = Modelled(row).seconds
        whole = 2 * self.width * self.inner * _WIDE  # bytes of both matrices

        def computed(tokens: int, inner: int) -> float:
            return 4 * tokens * self.width * inner / rate

        def gathered(shards: int, ranks: int) -> float:
            return seconds("all_gather", whole // shards, ranks, nodes)

        def tensor(tokens: int) -> float:
            size = local * tokens * self.width * _WIDE  # the ranks of a group have the same tokens
            return seconds("all_gather", size, local) + seconds("reduce_scatter", size, local)

        def experts(tokens: int, ranks: int, nodes: int) -> float:
            return 2 * seconds("all_to_all", tokens * self.width * _WIDE, ranks, nodes)

        def per_computation(communicated: Callable[[int], float], inner: int) -> Ratio:
            return lambda tokens: communicated(tokens) / computed(tokens, inner)

        return {
            "FSDP": per_computation(lambda tokens: gathered(1, self.devices), self.inner),
            f"TP {local}": per_computation(tensor, self.inner),
            f"FSDP × TP {local}": per_computation(lambda tokens: gathered(local, nodes) + tensor(tokens), self.inner),
            f"EP {local}": per_computation(lambda tokens: experts(tokens, local, 1), self.expert),
            f"EP {self.devices}": per_computation(lambda tokens: experts(tokens, self.devices, nodes), self.expert),
        }

    def thresholds(self) -> dict[str, int | None]:
        """By layout, the fewest tokens per device with which communication takes no longer than computation; None if it
        takes longer with any number."""
        return {name: _least(ratio) for name, ratio in self.ratios().items()}


def _least(ratio: Ratio) -> int | None:
    low, high = 0, MOST_TOKENS
    if ratio(high) > 1:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ratio(middle) <= 1 else (middle, high)
    return high
