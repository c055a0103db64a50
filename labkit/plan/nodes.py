"""Runs on several nodes: the place of this machine, and the commands that start a Spec on each."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace

from labkit.common.arguments import Number, shown
from labkit.common.units import counted
from labkit.plan.spec import Spec, SpecError, about, default_of
from labkit.setup.machine import Machine

# ---- the commands of the lab that start a Spec


def arguments(spec: Spec) -> list[str]:
    """The arguments of `labkit run` for a Spec, without those that have their default."""
    words = [spec.strategy] if spec.script is None else [*(["-m"] if spec.as_module else []), spec.script]
    for flag in fields(Spec):
        value = getattr(spec, flag.name)
        if about(flag).on_command_line and value != default_of(flag):
            words += [f"--{flag.name.replace('_', '-')}", *([] if about(flag).switch else [str(value)])]
    rows = () if spec.script else (*spec.strategy_row.all_options, *spec.workload_row.options)
    known = {option.name: option.default for option in rows}
    for name, value in spec.options.items():
        if value != known.get(name):
            words += ["--option", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return [*words, *(["--", *spec.args] if spec.args else [])]


def node_commands(spec: Spec, nodes: int, endpoint: str) -> list[str]:
    """The command for each of `nodes` machines like this one, in order: each has as many ranks as the Spec has here.

    `endpoint` is the address and port of node 0 as the others reach it. Raises `SpecError` if they cannot run it.
    """
    whole = replace(spec, nproc=(spec.nproc or 1) * nodes).settled(Machine.here().times(nodes))
    Node(nodes, 0, endpoint).share(whole.processes)
    words = arguments(whole)
    end = words.index("--") if "--" in words else len(words)
    start = ["python3", "-m", "labkit", "run", *words[:end], "--nodes", str(nodes)]
    return [
        shlex.join([*start, "--node-rank", str(rank), "--rdzv-endpoint", endpoint, *words[end:]])
        for rank in range(nodes)
    ]


# ---- the place of this machine


_NODES = Number(int, 2, 65_536)
_PORT = Number(int, 1, 65_535)


@dataclass(frozen=True)
class Node:
    """One of several nodes of a run: its `rank` from 0, and the `endpoint` (HOST:PORT) of node 0, where all meet.

    An elastic run continues with any number of nodes from `least` (default: all of them) to `nodes`. Raises `SpecError`
    for an invalid value.
    """

    nodes: int
    rank: int
    endpoint: str
    least: int | None = None

    def __post_init__(self) -> None:
        try:
            _NODES.check("--nodes", self.nodes)
            if self.least is not None:
                Number(int, 1, self.nodes).check("MIN of --nodes MIN:MAX", self.least)
            Number(int, 0, self.nodes - 1).check("--node-rank", self.rank)
        except ValueError as error:
            raise SpecError("nodes", str(error)) from None
        host, _, port = self.endpoint.rpartition(":")
        if (
            not host.strip("[]")
            or any(character.isspace() for character in host)
            or _PORT.from_text(port) not in range(1, 65_536)
        ):
            raise SpecError(
                "nodes",
                f"--rdzv-endpoint must be the address and a free port of node 0, such as node0:29500, got"
                f" {shown(self.endpoint)}",
            )

    @property
    def fewer(self) -> range:
        """The smaller numbers of nodes with which an elastic run continues."""
        return range(self.least or self.nodes, self.nodes)

    @property
    def words(self) -> str:
        """The value of --nodes: `2`, or `1:2`."""
        return f"{self.least}:{self.nodes}" if self.fewer else str(self.nodes)

    @property
    def host(self) -> str:
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
