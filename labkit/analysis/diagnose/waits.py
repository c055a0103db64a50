"""What ranks wait for, read from their `waiting` and `error` events: which collective of which process group, at which
line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from labkit.record.events import Error
from labkit.record.ranks import PEER_GONE
from labkit.record.stacks import place

if TYPE_CHECKING:
    from labkit.record.documents import Failure
    from labkit.record.events import Silent, Waiting
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState

MISMATCH = re.compile(
    r"collective mismatch|data size doesn't match|preamble\.length|Detected mismatch between collectives", re.IGNORECASE
)
_POINT_TO_POINT = re.compile(r"\bin (?:i?send|i?recv|batch_isend_irecv)\b")
IDLE = 0.05  # share of the time that a waiting rank may spend on the CPU
STOPPED = ("stopped", "tracing-stop")
_GONE = 2.0  # seconds without a sample of a process before it counts as gone
_UNNAMED = ("", "undefined")


def blames_peers(failure: Failure) -> bool:
    """Whether an error only reports other ranks: gone, too late, or in a different collective."""
    message = f"{failure.type}: {failure.message}"
    return failure.type in ("SIGABRT", "SIGTERM") or bool(PEER_GONE.search(message) or MISMATCH.search(message))


def waiting(state: RunState) -> dict[int, Waiting]:
    """By rank the `waiting` event of each rank that waits: not those that made progress since, exited with 0, or only
    compute for long.
    """
    return {number: event for number, event in held(state).items() if _is_in_collective(event)}


def held(state: RunState) -> dict[int, Waiting]:
    """By rank the newest `waiting` event of each rank that has made no progress since, even if it computes."""
    if state.status.state == "finished":
        return {}
    ranks = (rank for _, rank in sorted(state.ranks.items()))
    return {rank.rank: rank.waiting for rank in ranks if rank.waiting and rank.exit_code != 0 and not _went_on(rank)}


def silent(state: RunState) -> dict[int, Silent]:
    """By rank the `silent` event of each rank that cannot report itself, because it is stopped or inside a C call that
    holds the GIL.

    The supervisor writes these events to a separate file, so times decide whether they are newer than the rank's
    events.
    """
    if state.status.state == "finished":
        return {}
    ranks = (rank for _, rank in sorted(state.ranks.items()))
    return {
        rank.rank: rank.silent
        for rank in ranks
        if rank.silent and rank.exit_code is None and _heard(rank) <= rank.silent.t
    }


def _heard(rank: RankState) -> float:
    """When the rank wrote last."""
    last: float = rank.steps.t[-1] if len(rank.steps) else 0.0
    return max(last, rank.started or 0.0, rank.waiting.t if rank.waiting else 0.0)


def gone(state: RunState) -> tuple[int, ...]:
    """Ranks whose process exited without an `end` event while the run is still under way."""
    if state.over or not len(state.system.t):
        return ()
    samples = ((number, columns["t"][-1]) for number, columns in state.system.ranks.items() if len(columns["t"]))
    ended = (number for number, last in samples if last < state.system.t[-1] - _GONE)
    return tuple(number for number in sorted(ended) if number in state.ranks and state.ranks[number].exit_code is None)


def _went_on(rank: RankState) -> bool:
    since = rank.waiting.step if rank.waiting else None
    return isinstance(since, int) and len(rank.steps) > rank.first_step and rank.steps.step[-1] > since


def _is_in_collective(event: Waiting) -> bool:
    computed = event.computed
    return first_pending(event) is not None or (computed is not None and computed < IDLE)


# ---- collectives


class Call(TypedDict):
    """A collective that a rank has called: `Collective` with defaults for missing fields."""

    op: str
    over: bool
    group: str
    id: str | None
    ranks: tuple[int, ...]
    seq: int
    sizes: list[list[int]]


def operations(event: Waiting | Error) -> list[Call]:
    """The collectives of an event; those without a group or number are left out."""
    return [
        {
            "op": op.op,
            "over": op.over,
            "group": group,
            "id": op.id,
            "ranks": tuple(op.ranks or ()),
            "seq": seq,
            "sizes": op.sizes or [],
        }
        for op in event.ops or ()
        if (seq := op.seq) is not None and (group := op.group)
    ]


def place_of(event: Waiting | Error) -> str:
    """The line at which a rank waits or failed; empty if unknown."""
    return place(event.traceback if isinstance(event, Error) else event.stack)


def first_pending(event: Waiting | Error) -> Call | None:
    """The oldest collective that has not completed on this rank."""
    return next((op for op in operations(event) if not op["over"]), None)


def failed_in(event: Error) -> Call | None:
    """The collective that raised an error: the newest one, because an error completes it too; None if a send or receive
    failed.
    """
    ops = operations(event)
    if not ops or _POINT_TO_POINT.search(event.traceback):
        return None
    return first_pending(event) or ops[-1]


def group_of(op: Call) -> tuple[Any, ...]:
    """What identifies a group on all of its ranks; two groups may have the same description and the same ranks."""
    return op["group"], op["id"], op["ranks"]


def same(one: Call, other: Call) -> bool:
    """Whether two ranks are in the same collective."""
    return group_of(one) == group_of(other) and (one["seq"], one["op"]) == (other["seq"], other["op"])


def in_words(op: Call) -> str:
    """`all_reduce #10 (4×4)`, with the shapes of the rank's inputs."""
    shapes = " and ".join("×".join(map(str, shape)) or "scalar" for shape in op["sizes"])
    return f"{op['op']} #{op['seq']}" + (f" ({shapes})" if shapes else "")


def group_in_words(op: Call) -> str:
    """`the default group`, `group "tp" of ranks 0, 1`; a group without a description has its number."""
    if op["group"] == "default_pg":
        return "the default group"
    name = f"#{op['id']}" if op["group"] in _UNNAMED and op["id"] is not None else f'"{op["group"]}"'
    return f"group {name} of ranks {', '.join(map(str, op['ranks']))}"


def where(event: Waiting, op: Call | None) -> str:
    """`in all_reduce #10 (4) at train.py:88 in step, 12 steps done`."""
    at = place(event.stack) or event.phase or "an unknown line"
    return (f"in {in_words(op)} at {at}" if op else f"in no collective, at {at}") + f", {event.step} steps done"


def on_hosts(state: RunState, numbers: Iterable[int]) -> str:
    """` on node1, node2`: the hosts of ranks; empty if the run has one host, or if they are not known."""
    known = {number: rank.host for number, rank in state.ranks.items() if rank.host}
    for event in state.nodes:
        known |= {int(number): host for number, host in event.hosts.items()}
    found = dict.fromkeys(known[number] for number in numbers if number in known)
    several = len(set(known.values())) > 1 or state.expected < state.world_size
    return f" on {', '.join(found)}" if found and several else ""


def last_seen(state: RunState, number: int) -> str:
    """What is known about a rank that does not wait."""
    rank = state.ranks.get(number)
    if rank is None:
        return "its events are in the run folder of its node" if on_hosts(state, [number]) else "has not started"
    if rank.exit_code is not None:
        return f"exited with code {rank.exit_code}"
    if number in gone(state):
        return f"its process exited after {steps_done(rank)} steps"
    return f"still {'evaluating' if rank.activity == 'evaluating' else 'running'}, {steps_done(rank)} steps done"


def steps_done(rank: RankState) -> int:
    """The number of steps done in the newest attempt."""
    return int(rank.steps.step[-1]) if len(rank.steps) > rank.first_step else 0


def pending_operations(events: Mapping[int, Waiting]) -> dict[int, Call]:
    """By rank the collective that it is in; ranks in no collective are left out."""
    return {number: op for number, event in events.items() if (op := first_pending(event)) is not None}


def crossing(events: Mapping[int, Waiting]) -> list[int]:
    """Ranks that wait for each other in a circle, each in a collective of a different group than the next; empty if
    there are none.

    A rank waits for those ranks of its collective that are in a collective of a different group and have not completed
    this one.
    """
    pending = pending_operations(events)
    completed = {number: [op for op in operations(event) if op["over"]] for number, event in events.items()}

    def has_completed(other: int, op: Call) -> bool:
        return any(group_of(one) == group_of(op) and one["seq"] >= op["seq"] for one in completed[other])

    def waits_for(number: int) -> list[int]:
        op = pending[number]
        elsewhere = (other for other in op["ranks"] if other in pending and group_of(pending[other]) != group_of(op))
        return [other for other in elsewhere if not has_completed(other, op)]

    return _circle({number: waits_for(number) for number in sorted(pending)})


def _circle(following: Mapping[int, list[int]]) -> list[int]:
    """A cycle in a graph, preferably of two nodes; empty if there is none."""
    pair = next(([one, other] for one, others in following.items() for other in others if one in following[other]), [])
    if pair:
        return pair
    done: set[int] = set()
    for start in following:
        path, rest = [start], [iter(following[start])] if start not in done else []
        while rest:
            node = next(rest[-1], None)
            if node in path:
                return path[path.index(node) :]
            if node is None:
                done.add(path.pop())
                rest.pop()
            elif node not in done:
                path.append(node)
                rest.append(iter(following[node]))
    return []
