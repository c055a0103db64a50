"""Node: the place of this machine in a run on several."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.common.arguments import Number, shown
from labkit.common.units import counted
from labkit.plan.fields import SpecError

_NODES = Number(int, 2, 65_536)
_PORT = Number(int, 1, 65_535)


@dataclass(frozen=True)
class Node:
    """One of several nodes of a run: its `rank` from 0, and the `endpoint` (HOST:PORT) of node 0, where all meet.

    Raises `SpecError` for an invalid value.
    """

    nodes: int
    rank: int
    endpoint: str

    def __post_init__(self) -> None:
        try:
            _NODES.check("--nodes", self.nodes)
            Number(int, 0, self.nodes - 1).check("--node-rank", self.rank)
        except ValueError as error:
            raise SpecError("nodes", str(error)) from None
        host, _, port = self.endpoint.rpartition(":")
        if not host.strip("[]") or any(one.isspace() for one in host) or _PORT.from_text(port) not in range(1, 65_536):
            raise SpecError(
                "nodes",
                f"--rdzv-endpoint must be the address and a free port of node 0, such as node0:29500, got"
                f" {shown(self.endpoint)}",
            )

    @property
    def host(self) -> str:
        """The host of the endpoint."""
        return self.endpoint.rpartition(":")[0]

    def share(self, count: int) -> int:
        """The part of `count` ranks that this node has; `SpecError` as `divided`."""
        return divided(count, self.nodes)


def divided(ranks: int, nodes: int) -> int:
    """Ranks on each of several nodes; `SpecError` if the nodes cannot have equally many."""
    if ranks % nodes:
        raise SpecError(
            "nproc",
            f"{counted(ranks, 'rank')} cannot be divided equally among {nodes} nodes; --nproc is the number of ranks of"
            f" all nodes: use a multiple of {nodes}, and a strategy with one process per device",
        )
    return ranks // nodes
