"""How far the clocks of a run's hosts are apart, from the collectives that their ranks have in common.

A blocking collective ends on all of its ranks at almost the same moment, however late each of them came. The difference
between the recorded ends on two hosts is therefore the difference of their clocks, up to the time of the last message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from labkit.analysis.metrics import median, quartiles
from labkit.record.state import per_revision

if TYPE_CHECKING:
    from labkit.record.events import Timeline
    from labkit.record.state import RunState

_MUTUAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # none ends before all have begun it


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
        for step, one in state.ranks[number].timelines.items():
            starts = moments(one, "start")
            for key, end in moments(one, "end").items():
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
        if call.seq and call.op in _MUTUAL
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
        via = next(one for one in known if one in by)
        values, shortest = [value for value, _ in by[via]], min(seconds for _, seconds in by[via])
        low, high = quartiles(values)
        spread = max(high - low, shortest) / 2
        found[host] = Offset(median(values) + known[via].seconds, spread + known[via].uncertainty, len(values))
    return found
