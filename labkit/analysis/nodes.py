"""What happened to the nodes of a run on several: when they met, and which of them were cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from labkit.common.units import counted
from labkit.record.documents import NodesFigures
from labkit.record.events import Hosts
from labkit.record.state import elapsed, per_revision

if TYPE_CHECKING:
    from labkit.record.state import RunState


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
        (counted(len(one.hosts), "node") if one.what == "met" else ", ".join(one.hosts))
        + f" {one.what}"
        + ("" if one.seconds is None else f" ({one.seconds:.1f} s)")
        for one in changes
    ]
    return ", ".join(said) if len(said) > 1 else ""
