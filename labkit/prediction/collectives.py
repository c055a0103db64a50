"""The interface of all models of communication, and what a collective costs: messages in a row, and bytes per link.

`size` is in bytes, as in nccl-tests and as the probe counts traffic: the whole tensor of an all-gather (output),
reduce-scatter (input) or all-to-all (input of a rank); the tensor of a rank for the other operations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from labkit.analysis.theory.collectives import bus_factor
from labkit.common.arguments import Number, check_choice

Source = Literal["measured", "modelled"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")

# operations that cost as much as another one: a receive is the other end of a send, a reduce is a broadcast in reverse
_SAME = {"recv": "send", "reduce": "broadcast"}
_SIZE = Number(int, 0, 1 << 60)
_COUNT = Number(int, 1, 1 << 20)


@dataclass(frozen=True)
class Duration:
    """How long one operation takes: `seconds` if nothing delays it, whether they were measured or modelled, and the
    algorithm (empty if measured). `delays` are further seconds, each as likely as the others, by the seconds that the
    ranks have computed before; empty if unknown."""

    seconds: float
    source: Source
    algorithm: str = ""
    delays: Mapping[float, tuple[float, ...]] = field(default_factory=dict)


class CommunicationModel(ABC):
    """How long an operation takes among some ranks. `title` names the machine for people; `per_node` are the ranks of
    a node, 0 if all are on one; `error` is the share by which times that were measured vary."""

    title: str
    per_node = 0
    error = 0.0

    def time(self, operation: str, size: int, ranks: int, nodes: int = 1) -> Duration:
        """The time of one operation on `size` bytes among `ranks` ranks, spread evenly over `nodes` nodes.

        A message (`send`, `recv`) passes between nodes if `nodes` is 2. Raises `ValueError` for an unknown operation or
        an impossible number, and `LookupError` if this machine has no such links.
        """
        operation = known(operation)
        _SIZE.check("size", size)
        _COUNT.check("ranks", ranks)
        _COUNT.check("nodes", nodes)
        if ranks % nodes:
            raise ValueError(f"ranks must be a multiple of nodes, got {ranks} ranks on {nodes} nodes")
        return Duration(0.0, "modelled") if ranks == 1 else self._time(operation, size, ranks, nodes)

    def seconds(self, operation: str, size: int, ranks: int, nodes: int = 1) -> float:
        """The seconds of `time`."""
        return self.time(operation, size, ranks, nodes).seconds

    @abstractmethod
    def _time(self, operation: str, size: int, ranks: int, nodes: int) -> Duration:
        """`time` with checked arguments and at least two ranks."""


def known(operation: str) -> str:
    """The name in `OPERATIONS` under which an operation is measured and modelled; `ValueError` for an unknown one."""
    return check_choice("operation", _SAME.get(operation, operation), OPERATIONS)


@dataclass(frozen=True)
class Load:
    """What an algorithm costs: messages in a row within (`near`) and between nodes (`far`), and the bytes per byte of
    `size` that the links of one rank carry in one direction (`inside`, `between`)."""

    near: int
    far: int
    inside: float
    between: float


def _ring(rounds: int, factor: Callable[[int], float]) -> Callable[[int, int], Load]:
    """A chunk passes every other rank once per round. The ranks of a node form as many rings as there are ranks, each
    of which enters and leaves the node through another network adapter (NCCL's rails)."""

    def load(ranks: int, nodes: int) -> Load:
        local, far = ranks // nodes, rounds * (nodes - 1)
        traffic = factor(ranks)
        return Load(
            rounds * (ranks - 1) - far, far, traffic if local > 1 else 0.0, traffic / local if nodes > 1 else 0.0
        )

    return load


def _tree(ranks: int, nodes: int) -> Load:
    """NCCL's double binary trees: a chain within each node, a tree between nodes, up and then down; every rank sends
    and receives the whole tensor twice, at 92 % of the bandwidth of a ring (NCCL, src/graph/tuning.cc)."""
    local, depth, traffic = ranks // nodes, math.ceil(math.log2(nodes)), 2.0 / 0.92
    return Load(2 * (local - 1), 2 * depth, traffic if local > 1 else 0.0, traffic / local if nodes > 1 else 0.0)


def _direct(ranks: int, nodes: int) -> Load:
    """One message to every other rank."""
    local = ranks // nodes
    return Load(local - 1, ranks - local, (local - 1) / ranks, (ranks - local) / ranks)


def _message(ranks: int, nodes: int) -> Load:
    return Load(1, 0, 1.0, 0.0) if nodes == 1 else Load(0, 1, 0.0, 1.0)


def _by_ring(operation: str, rounds: int = 1) -> Callable[[int, int], Load]:
    return _ring(rounds, lambda ranks: bus_factor(operation, ranks))


# Algorithms by operation. NCCL uses trees for all-reduce only.
ALGORITHMS: dict[str, dict[str, Callable[[int, int], Load]]] = {
    "all_reduce": {"ring": _by_ring("all_reduce", rounds=2), "tree": _tree},
    "all_gather": {"ring": _by_ring("all_gather")},
    "reduce_scatter": {"ring": _by_ring("reduce_scatter")},
    "broadcast": {"ring": _by_ring("broadcast")},
    "all_to_all": {"direct": _direct},
    "send": {"direct": _message},
}
