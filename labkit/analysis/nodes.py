"""Runs on several nodes: their clocks, and which ranks share a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from labkit.analysis.metrics import median, quartiles
from labkit.common.units import counted
from labkit.record.documents import NodesFigures
from labkit.record.events import Hosts
from labkit.record.state import elapsed, per_revision

if TYPE_CHECKING:
    from labkit.record.events import Timeline
    from labkit.record.state import RunState


# ---- the clocks of hosts


MUTUAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # none ends before all have begun it


@dataclass(frozen=True)
class Offset:
    """A host's clock is `seconds` ahead of that of the first rank's host, give or take `uncertainty` (seconds: half the
    range of the middle half of all differences, at least half the shortest collective), from so many `collectives`."""

    seconds: float
    uncertainty: float
    collectives: int


@per_revision
def clocks(state: RunState) -> dict[str, Offset]:
    """The offset of each host but the first rank's, as far as profiled collectives link them; empty with one host."""
    hosts = {number: rank.host for number, rank in state.ranks.items() if rank.host}
    if len(set(hosts.values())) < 2:
        return {}
    ends: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for number in hosts:
        for step, timeline in state.ranks[number].timelines.items():
            starts = moments(timeline, "start")
            for key, end in moments(timeline, "end").items():
                ends.setdefault((step, *key), {})[number] = end, end - starts[key]
    known = {hosts[min(hosts)]: Offset(0.0, 0.0, 0)}
    while linked := _linked(ends, hosts, known):
        known |= linked
    return dict(list(known.items())[1:])


def ahead(state: RunState) -> dict[int, float]:
    """By rank the seconds by which its host's clock is ahead; ranks whose host has no offset are left out."""
    found = clocks(state)
    return {number: found[rank.host].seconds for number, rank in state.ranks.items() if rank.host in found}


def moments(one: Timeline, which: Literal["start", "end"]) -> dict[tuple[Any, ...], float]:
    """When each numbered collective of a group (its name and ranks) started or ended, in unix seconds."""
    return {
        (call.group, *(call.ranks or ()), call.seq): one.t0 + (call.start if which == "start" else call.end)
        for call in one.comm
        if call.seq and call.op in MUTUAL
    }


def _linked(
    ends: dict[tuple[Any, ...], dict[int, tuple[float, float]]], hosts: dict[int, str], known: dict[str, Offset]
) -> dict[str, Offset]:
    """The offsets of further hosts that have a collective in common with a known one, each from its first such host."""
    differences: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for ranks in ends.values():
        for number, (end, seconds) in ranks.items():
            for other, (then, others) in ranks.items():
                if hosts[other] in known and hosts[number] not in known:
                    pair = end - then, min(seconds, others)
                    differences.setdefault(hosts[number], {}).setdefault(hosts[other], []).append(pair)
    found = {}
    for host, by in differences.items():
        via = next(name for name in known if name in by)
        values, shortest = [value for value, _ in by[via]], min(seconds for _, seconds in by[via])
        low, high = quartiles(values)
        spread = max(high - low, shortest) / 2
        found[host] = Offset(median(values) + known[via].seconds, spread + known[via].uncertainty, len(values))
    return found


# ---- nodes that meet and leave


@per_revision
def node_changes(state: RunState) -> list[NodesFigures]:
    """The changes in order, each once, although every node reports it in its own folder; empty with one node."""
    found: list[NodesFigures] = []
    for event in sorted(state.nodes, key=lambda event: event.t):
        seconds = elapsed(state.status.started, event.t)
        change = NodesFigures(
            seconds=None if seconds is None else round(seconds, 3),
            what="met" if isinstance(event, Hosts) else "cut off",
            hosts=list(dict.fromkeys(event.hosts.values())),
            ranks=len(event.hosts),
        )
        if not found or replace(change, seconds=None) != replace(found[-1], seconds=None):
            found.append(change)
    return found


def nodes_in_words(state: RunState) -> str:
    """`2 nodes met (5.8 s), b cut off (9.0 s), 1 node met (14.2 s)`; empty if nothing changed after they met."""
    changes = node_changes(state)
    said = [
        (counted(len(event.hosts), "node") if event.what == "met" else ", ".join(event.hosts))
        + f" {event.what}"
        + ("" if event.seconds is None else f" ({event.seconds:.1f} s)")
        for event in changes
    ]
    return ", ".join(said) if len(said) > 1 else ""
