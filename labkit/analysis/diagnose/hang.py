"""Runs that make no progress: which rank waits in which collective, and for which other rank, and what NCCL's RAS
service says about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.analysis.diagnose.finding import Finding
from labkit.analysis.diagnose.looks import surplus_calls
from labkit.common.text import visible_line
from labkit.common.units import counted, ranks_in_words, some_ranks
from labkit.record.events import CutOff, Error
from labkit.record.ranks import PEER_GONE
from labkit.record.stacks import place

if TYPE_CHECKING:
    from labkit.record.documents import Failure
    from labkit.record.events import (
        CallKind,
        Collective,
        Communicator,
        Ras,
        RasAlike,
        RasRank,
        Silent,
        Waiting,
    )
    from labkit.record.events import Sequence as Calls
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState


# ---- what ranks wait for


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
    compute for long."""
    return {number: event for number, event in held(state).items() if _is_in_collective(event)}


def held(state: RunState) -> dict[int, Waiting]:
    """By rank the newest `waiting` event of each rank that has made no progress since, even if it computes; also where
    a rank was that has not waited long enough to report itself, if it needs one of those that have."""
    if state.status.state == "finished":
        return {}
    ranks = {number: rank for number, rank in sorted(state.ranks.items()) if rank.exit_code != 0}
    found = {
        number: rank.waiting for number, rank in ranks.items() if rank.waiting and not _went_on(rank, rank.waiting)
    }
    before = -1
    while before < len(found):
        before = len(found)
        for number, rank in ranks.items():
            if number not in found and rank.called and not _went_on(rank, rank.called) and _needs(rank.called, found):
                found[number] = rank.called
    return dict(sorted(found.items()))


def _needs(event: Waiting, others: Mapping[int, Waiting]) -> bool:
    """Whether a rank is in a message or collective that cannot complete while one of the others waits elsewhere."""
    message, op = message_of(event), first_pending(event)
    if message is not None:
        return message.peer in others
    return op is not None and any(rank in others and not _has_called(others[rank], op) for rank in op.ranks)


def _has_called(event: Waiting, op: Call) -> bool:
    calls = (call for call in operations(event) if group_of(call) == group_of(op))
    return any(call.seq > op.seq or same(call, op) for call in calls)


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


def _went_on(rank: RankState, event: Waiting) -> bool:
    return event.step is not None and rank.steps_done > event.step


def _is_in_collective(event: Waiting) -> bool:
    computed = event.computed
    return (
        first_pending(event) is not None or message_of(event) is not None or (computed is not None and computed < IDLE)
    )


# ---- collectives


class Call(NamedTuple):
    """A collective that a rank has called: `Collective` with defaults for missing fields."""

    op: str
    over: bool
    group: str
    id: str | None
    ranks: tuple[int, ...]
    seq: int
    sizes: list[list[int]]

    @property
    def name(self) -> str:
        """`all_reduce #10`."""
        return f"{self.op} #{self.seq}"

    @property
    def words(self) -> str:
        """`all_reduce #10 (4×4)`, with the shapes of the rank's inputs."""
        return self.name + (f" ({_shapes_in_words(self.sizes)})" if self.sizes else "")


def _shapes_in_words(sizes: Iterable[Sequence[int]]) -> str:
    return " and ".join("×".join(map(str, shape)) or "scalar" for shape in sizes)


def operations(event: Waiting | Error) -> list[Call]:
    """The collectives of an event; those without a group or number are left out."""
    return [
        Call(op.op, op.over, group, op.id, tuple(op.ranks or ()), seq, op.sizes or [])
        for op in event.ops or ()
        if (seq := op.seq) is not None and (group := op.group)
    ]


def message_of(event: Waiting | Error) -> Collective | None:
    """The send or receive that a rank waits for; None if it waits for none, or receives from any rank."""
    return next((op for op in event.ops or () if op.peer is not None and not op.over), None)


def messages_of(events: Mapping[int, Waiting]) -> dict[int, Collective]:
    """By rank the send or receive that it waits for; other ranks are left out."""
    return {number: op for number, event in events.items() if (op := message_of(event)) is not None}


def place_of(event: Waiting | Error) -> str:
    """The line at which a rank waits or failed; empty if unknown."""
    return place(event.traceback if isinstance(event, Error) else event.stack)


def first_pending(event: Waiting | Error) -> Call | None:
    """The oldest collective that has not completed on this rank."""
    return next((op for op in operations(event) if not op.over), None)


def failed_in(event: Error) -> Call | None:
    """The collective that raised an error: the newest one, because an error completes it too; None if a send or receive
    failed."""
    ops = operations(event)
    if not ops or _POINT_TO_POINT.search(event.traceback):
        return None
    return first_pending(event) or ops[-1]


def group_of(op: Call) -> tuple[Any, ...]:
    """What identifies a group on all of its ranks; two groups may have the same description and the same ranks."""
    return op.group, op.id, op.ranks


def same(call: Call, other: Call) -> bool:
    """Whether two ranks are in the same collective."""
    return group_of(call) == group_of(other) and (call.seq, call.op) == (other.seq, other.op)


def group_in_words(description: str, number: str | None, ranks: Iterable[int]) -> str:
    """`the default group`, `group "tp" of ranks 0, 1`; a group without a description has its number."""
    if description == "default_pg":
        return "the default group"
    name = f"#{number}" if description in _UNNAMED and number is not None else f'"{description}"'
    return f"group {name} of ranks {', '.join(map(str, ranks))}"


def where(event: Waiting, op: Call | None) -> str:
    """`in all_reduce #10 (4) at train.py:88 in step, 12 steps done`."""
    at = place(event.stack) or event.phase or "an unknown line"
    if (message := message_of(event)) is not None:
        return f"waits to {_message_in_words(message)} at {at}, {event.step} steps done"
    return (f"in {op.words} at {at}" if op else f"in no collective, at {at}") + f", {event.step} steps done"


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
        return f"its process exited after {rank.steps_done} steps"
    return f"still {'evaluating' if rank.activity == 'evaluating' else 'running'}, {rank.steps_done} steps done"


def pending_operations(events: Mapping[int, Waiting]) -> dict[int, Call]:
    """By rank the collective that it is in; ranks in no collective are left out."""
    return {number: op for number, event in events.items() if (op := first_pending(event)) is not None}


def crossing(events: Mapping[int, Waiting]) -> list[int]:
    """Ranks that wait for each other in a circle, each in a collective of a different group than the next, or for a
    message; empty if there are none.

    A rank in a collective waits for those of its ranks that wait for something else and have not completed this one. A
    rank that sends or receives waits for its peer, unless the peer does the opposite.
    """
    messages = messages_of(events)
    pending = {number: op for number, op in pending_operations(events).items() if number not in messages}
    completed = {number: [op for op in operations(event) if op.over] for number, event in events.items()}

    def has_completed(other: int, op: Call) -> bool:
        return any(group_of(call) == group_of(op) and call.seq >= op.seq for call in completed[other])

    def is_elsewhere(other: int, op: Call) -> bool:
        return other in messages or (other in pending and group_of(pending[other]) != group_of(op))

    def waits_for(number: int) -> list[int]:
        if number in messages:
            peer = messages[number].peer
            waits = peer in pending or (peer in messages and not meet(messages, number))
            return [peer] if peer is not None and waits else []
        op = pending[number]
        return [other for other in op.ranks if is_elsewhere(other, op) and not has_completed(other, op)]

    return _circle({number: waits_for(number) for number in sorted({*messages, *pending})})


def meet(messages: Mapping[int, Collective], number: int) -> bool:
    """Whether the peer of a rank's message does the opposite: one sends to the other, which receives from it."""
    message = messages[number]
    other = messages.get(-1 if message.peer is None else message.peer)
    return other is not None and other.peer == number and other.op != message.op


def _circle(waits_for: Mapping[int, list[int]]) -> list[int]:
    """Ranks of which each waits for the next and the last for the first, two if possible; empty if there are none."""
    for number, others in waits_for.items():
        for other in others:
            if number in waits_for[other]:
                return [number, other]
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        named_twice: list[int] = error.args[1]  # each before the one that waits for it, and the first one again
        circle = named_twice[:0:-1]
        first = circle.index(min(circle))
        return circle[first:] + circle[:first]
    return []


# ---- sequences of collectives


ALIKE = ("all_reduce", "reduce", "broadcast")  # operations whose input has the same shape on every rank


@dataclass(frozen=True)
class Apart:
    """The first call of a group that differs between ranks: its `number` there, what it was `by_rank`, the ranks that
    differ from the majority (`odd`; all of them if there is none), and `how` they differ: a key of `APART`."""

    number: int
    group: str
    by_rank: dict[int, CallKind]
    odd: tuple[int, ...]
    how: str

    @property
    def in_words(self) -> str:
        """`call 3 of the default group: rank 0 broadcast (4, Float), rank 1 all_reduce (4, Float)`."""
        calls: dict[str, list[int]] = {}
        for rank, kind in self.by_rank.items():
            calls.setdefault(_kind_in_words(kind), []).append(rank)
        each = (f"{ranks_in_words(ranks)} {words}" for words, ranks in calls.items())
        return f"call {self.number} of {self.group}: {', '.join(each)}"


# Cause and fix of sequences that part, by how they do.
APART = {
    "thread": (
        "another thread of the ranks also uses this group, such as that of async_save, and the calls of two threads"
        " have no common order",
        "give the thread a process group of its own, as in async_save(…, process_group=dist.new_group(backend='gloo'))",
    ),
    "dtype": (
        "the ranks called the same operation with tensors of different dtypes, whose bytes are then read as another"
        " type",
        "convert the tensor to one dtype on every rank before that line: look for autocast, .half() or an integer on"
        " one of the ranks",
    ),
    "size": (
        "the ranks called the same operation with tensors of different sizes",
        "give the tensor one size on every rank: drop or pad a smaller last batch, or exchange sizes with all_gather"
        " first and pad",
    ),
    "order": (
        "the ranks made the same calls in a different order; calls are matched only by their order",
        "make these calls in one order on every rank: look for a branch on the rank, or for a set, a dict or a list of"
        " files whose order differs; sort it",
    ),
    "extra": (
        "one side made a call that the other side did not make, and every later call was matched with the wrong one",
        "make that call on every rank or on none: look for an `if rank ==`, a shorter loop or a caught exception around"
        " it",
    ),
    "branch": (
        "calls are matched only by their order: the ranks took different branches before this one",
        "make the same calls on every rank: look for what depends on the rank before these lines",
    ),
}


def apart(state: RunState) -> Apart | None:
    """Where the sequences of the ranks part first, of the group that was in use longest; None if they agree as far as
    they are known. Later calls change nothing about it."""
    groups: dict[tuple[Any, ...], dict[int, Calls]] = {}
    for number, rank in sorted(state.ranks.items()):
        for sequence in rank.called.groups if rank.called else ():
            groups.setdefault((sequence.group, sequence.id, tuple(sequence.ranks)), {})[number] = sequence
    partings = (_parts(ranks) for ranks in groups.values() if len(ranks) > 1)
    return next((parting for parting in partings if parting is not None), None)


def _parts(sequences: Mapping[int, Calls]) -> Apart | None:
    begin = max(sequence.first for sequence in sequences.values())
    for number in range(begin, max(sequence.first + len(sequence.calls) for sequence in sequences.values())):
        kinds = {rank: kind for rank, sequence in sequences.items() if (kind := _call(sequence, number)) is not None}
        common = [
            rank
            for rank, kind in kinds.items()
            if sum(_alike(kind, other) for other in kinds.values()) * 2 > len(kinds)
        ]
        if len(common) == len(kinds):
            continue
        odd = tuple(rank for rank in kinds if rank not in common)
        first = next(iter(sequences.values()))
        words = group_in_words(first.group, first.id, first.ranks)
        return Apart(number, words, kinds, odd, _how(sequences, kinds, number))
    return None


def _how(sequences: Mapping[int, Calls], kinds: Mapping[int, CallKind], number: int) -> str:
    first = min(kinds)
    other = next(rank for rank in kinds if not _alike(kinds[rank], kinds[first]))
    ours, theirs = kinds[first], kinds[other]
    if len({kind.thread for kind in kinds.values()}) > 1:
        return "thread"
    later, earlier = _call(sequences[first], number + 1), _call(sequences[other], number + 1)
    skips = later is not None and _alike(later, theirs), earlier is not None and _alike(earlier, ours)
    rest = range(number + 1, number + 1 + max(map(len, (sequence.calls for sequence in sequences.values()))))
    after = ((_call(sequences[first], position), _call(sequences[other], position)) for position in rest)
    if ours.op == theirs.op and all(left is None or right is None or _alike(left, right) for left, right in after):
        return "size" if ours.dtypes == theirs.dtypes else "dtype"
    return "order" if all(skips) else "extra" if any(skips) else "branch"


def _call(sequence: Calls, number: int) -> CallKind | None:
    index = number - sequence.first
    return sequence.kinds[sequence.calls[index]] if 0 <= index < len(sequence.calls) else None


def _alike(kind: CallKind, other: CallKind) -> bool:
    alike = kind.op not in ALIKE or (kind.sizes == other.sizes and kind.dtypes == other.dtypes)
    return kind.op == other.op and alike


def _kind_in_words(kind: CallKind) -> str:
    inside = ", ".join(filter(None, (_shapes_in_words(kind.sizes), " and ".join(dict.fromkeys(kind.dtypes)))))
    return kind.op + (f" ({inside})" if inside else "")


# ---- runs that make no progress


def hang(state: RunState) -> Iterator[Finding]:
    """No progress: which rank waits in which collective, which never reached it, and where that rank is instead."""
    failure = state.failure
    if failure is not None and failure.traceback and not blames_peers(failure):
        return
    found = _silent(state) or _parted(state) or _crossed(state) or _unanswered(state) or _waits(state)
    if found is not None:
        yield _with_ras(state, _with_earlier_cause(state, found))


def _with_ras(state: RunState, found: Finding) -> Finding:
    """The finding with what NCCL's RAS service said since the ranks wait."""
    waits: list[Waiting | Silent] = [*waiting(state).values(), *silent(state).values()]
    since = min((event.since for event in waits), default=0.0)
    said = answer_in_words(state.ras) if state.ras is not None and state.ras.t >= since else ""
    return replace(found, evidence=f"{found.evidence}; {said}") if said else found


def _with_earlier_cause(state: RunState, found: Finding) -> Finding:
    """The finding with the collective that only some ranks called long before, if there was one."""
    surplus, parts = surplus_calls(state), apart(state)
    if surplus is None or silent(state) or (parts is not None and parts.how not in ("extra", "branch")):
        return found
    return replace(
        found,
        evidence=f"{surplus.in_words}; {found.evidence}",
        cause=surplus.cause,
        fix="stop the run; " + surplus.fix,
    )


def cut_off(state: RunState) -> Iterator[Finding]:
    """Nodes that the others could not reach any more, also if the run has continued since."""
    events = [event for event in state.nodes if isinstance(event, CutOff)]
    ranks = {rank: host for event in events for rank, host in event.hosts.items()}
    if ranks:
        last = events[-1]
        yield Finding(
            name="cut_off",
            title=f"{ranks_in_words(ranks)} on {', '.join(dict.fromkeys(ranks.values()))} did not answer",
            evidence=f"the node of rank {last.rank} had no answer for {last.seconds:g} s"
            + (f", {len(events)} times" if len(events) > 1 else ""),
            cause="the node was cut off from the network or switched off, or its first rank was stopped",
            fix="check that the hosts reach each other, then start the run again; with --max-restarts N the ranks start"
            " again by themselves when the nodes meet; if the node was only busy, raise --hang-after",
            ranks=tuple(sorted(ranks)),
        )


def _silent(state: RunState) -> Finding | None:
    """Ranks that are stopped, or inside a C call that holds the GIL, and the ranks that wait for them."""
    found = silent(state)
    others = {number: event for number, event in waiting(state).items() if number not in found}
    unheard = {
        number: event
        for number, event in found.items()
        if event.process in STOPPED
        or others
        or (event.computed or 0.0) < IDLE  # a long computation alone is not a hang
    }
    if not unheard:
        return None
    number, event = next(iter(sorted(unheard.items())))
    is_stopped, at = event.process in STOPPED, place(event.stack)
    those = [rank for rank, report in unheard.items() if (report.process in STOPPED) is is_stopped]
    verb = "has" if len(those) == 1 else "have"
    lasts = f"for {_seconds(unheard.values()):.0f} s"
    if is_stopped:
        title = f"{ranks_in_words(those)} {verb} been stopped {lasts}" + (f", last seen at {at}" if at else "")
    else:
        title = f"{ranks_in_words(those)} {verb} been inside a C call that holds the GIL {lasts}" + (
            f", at {at}" if at else ""
        )
    pid = state.ranks[number].pid
    return Finding(
        name="hang",
        title=title + _others_wait(others),
        evidence="; ".join(
            [*(_silent_in_words(state, rank, report) for rank, report in sorted(unheard.items())), *_described(others)]
        ),
        cause=(
            "a signal stopped the process (SIGSTOP, Ctrl-Z, a debugger, a batch system): it keeps its memory but "
            "runs no code"
            if is_stopped
            else "no other Python thread of the process can run while a C call holds the GIL"
        ),
        fix=(
            f"resume the process with kill -CONT {pid or 'PID'}, or stop the run"
            if is_stopped
            else (
                "stop the run; at that line, give the call a timeout, release the GIL in it, or move it to another "
                "process"
            )
        ),
        ranks=(*those, *(rank for rank in others if rank not in those)),
    )


def _silent_in_words(state: RunState, number: int, event: Silent) -> str:
    pid, computed = state.ranks[number].pid, event.computed
    share = (
        f", on the CPU for {computed:.0%} of the time" if computed is not None and event.process not in STOPPED else ""
    )
    doing = "stopped, last seen" if event.process in STOPPED else "in a C call that holds the GIL,"
    at = place(event.stack) or "an unknown line"
    done = state.ranks[number].steps_done
    return f"rank {number}: {doing} at {at}, {done} steps done (process {pid or 'unknown'}: {event.process}{share})"


def _others_wait(others: Mapping[int, Waiting]) -> str:
    """`; rank 0 waits in all_reduce #10 (train.py:88 in step)`."""
    if not others:
        return ""
    pending = pending_operations(others)
    first = min(pending or others)
    at = place(others[first].stack)
    op = pending.get(first)
    inside = " in " + op.name if op else ""
    return f"; {ranks_in_words(others)} wait{'s' if len(others) == 1 else ''}{inside}" + (f" ({at})" if at else "")


def _crossed(state: RunState) -> Finding | None:
    """Ranks that use several process groups in different orders, so that each waits for another one."""
    held_up = waiting(state)
    circle = crossing(held_up)
    if not circle:
        return None
    messages = messages_of(held_up)
    pending = pending_operations(held_up)
    if all(number in messages for number in circle):
        title = _chain(circle, messages) + _common_place(held_up[number] for number in circle)
        cause, fix = _ONLY_SEND if all(messages[number].op == "send" for number in circle) else _RING
    else:
        inside = [
            f"rank {number} waits to {_message_in_words(messages[number])}"
            if number in messages
            else f"rank {number} is in {pending[number].name} of {group_in_words(*group_of(pending[number]))}"
            for number in circle
        ]
        title = ", ".join(inside) + ("; each waits for the other" if len(circle) == 2 else "; each waits for the next")
        cause, fix = _CROSSED if not messages.keys() & set(circle) else _MESSAGE_AND_COLLECTIVE
    return Finding(
        name="hang",
        title=title,
        evidence=f"no progress for {_seconds(held_up.values()):.0f} s; " + "; ".join(_described(held_up)),
        cause=cause,
        fix=fix,
        ranks=(*circle, *(number for number in held_up if number not in circle)),
    )


def _chain(circle: Iterable[int], messages: Mapping[int, Collective]) -> str:
    """`rank 0 waits to send to 1, 1 to 2, 2 to 0`; the operation is repeated where it changes."""
    words: list[str] = []
    before = ""
    for number in circle:
        op = messages[number]
        doing = "" if op.op == before else ("send " if op.op == "send" else "receive ")
        start = f"rank {number} waits to" if not words else f"{number}"
        words.append(f"{start} {doing}{'to' if op.op == 'send' else 'from'} {op.peer}")
        before = op.op
    return ", ".join(words)


def _message_in_words(op: Collective) -> str:
    way = "send to" if op.op == "send" else "receive from"
    return f"{way} rank {op.peer}" + (f" with tag {op.tag}" if op.tag else "")


def _parted(state: RunState) -> Finding | None:
    """Ranks that wait because earlier collectives did not match, which paired silently."""
    held_up = waiting(state)
    parts = apart(state) if held_up else None
    newest = [op.seq for op in pending_operations(held_up).values()]
    if parts is None or (newest and parts.number >= min(newest) and parts.how in ("extra", "branch")):
        return None  # the collective in which they wait is the first that differs
    cause, fix = APART[parts.how]
    others = (rank for rank in (*parts.by_rank, *held_up) if rank not in parts.odd)
    return Finding(
        name="hang",
        title=f"the ranks' collectives do not match since {parts.in_words}",
        evidence=f"no progress for {_seconds(held_up.values()):.0f} s; " + "; ".join(_described(held_up)),
        cause=cause,
        fix="stop the run; " + fix,
        ranks=(*parts.odd, *dict.fromkeys(others)),
    )


def _unanswered(state: RunState) -> Finding | None:
    """A message whose peer does not take part: it is elsewhere, or gives another tag."""
    held_up = waiting(state)
    messages = messages_of(held_up)
    apart = [
        number
        for number, op in messages.items()
        if op.peer not in held_up
        or (op.peer not in messages and first_pending(held_up[op.peer]) is None)
        or (meet(messages, number) and op.tag != messages[op.peer].tag)
    ]
    if not apart:
        return None
    number = apart[0]
    op = messages[number]
    peer = int(op.peer or 0)
    other = messages.get(peer)
    title = (
        f"rank {number} has waited for {_seconds([held_up[number]]):.0f} s to {_message_in_words(op)}"
        f"{_common_place([held_up[number]])}; "
    )
    if other is not None:
        title += f"rank {peer} waits to {_message_in_words(other)}"
        cause = "a send and a receive meet only if both name each other and the same tag"
        fix = "stop the run; give both calls the same tag, and call them in the same order on both ranks"
    else:
        opposite = "received" if op.op == "send" else "sent"
        title += f"rank {peer}{on_hosts(state, [peer])} has not {opposite} it"
        cause = f"a {op.op} blocks until its peer has {opposite}: rank {peer} has not reached that call"
        at = place_of(held_up[peer]) if peer in held_up else ""
        fix = (
            f"stop the run; see why rank {peer} does not come to its {'recv' if op.op == 'send' else 'send'}"
            + (f" (it is at {at})" if at else "")
            + ": a loop of another length, a branch on the rank, or a wrong peer in one of the two calls"
        )
    away = [] if peer in held_up else [f"rank {peer}: {last_seen(state, peer)}"]
    return Finding(
        name="hang",
        title=title,
        evidence="; ".join([*_described(held_up), *away]),
        cause=cause,
        fix=fix,
        ranks=(peer, *(rank for rank in held_up if rank != peer)),
    )


# Cause and fix of ranks that wait.
_ONLY_SEND = (
    "each of these ranks sends before it receives: a send blocks until its peer receives, and nobody receives",
    "stop the run; pass the sends and receives of one exchange together to torch.distributed.batch_isend_irecv and wait"
    " for all of them, or let even ranks send first and odd ranks receive first",
)
_RING = (
    "each of these ranks waits for a message of the next before it makes the call that the one before waits for",
    "stop the run; pass the sends and receives of one exchange together to torch.distributed.batch_isend_irecv and wait"
    " for all of them, or let even ranks send first and odd ranks receive first, so that each send meets a receive",
)
_CROSSED = (
    "these ranks call collectives of several process groups in different orders: a collective completes only when every"
    " rank in its group calls it, and each of these ranks is blocked in another group first",
    "stop the run; call the collectives of these groups in the same order on every rank",
)
_MESSAGE_AND_COLLECTIVE = (
    "one rank waits in a collective, another for a message, and each needs the other one to go on first",
    "stop the run; move the message to the same side of the collective on both ranks: both before it, or both after it",
)
_NOT_CALLED = (
    "a collective completes only when every rank in its group calls it: a rank that takes a different branch blocks the"
    " others",
    "stop the run; call the collective on every rank: look for an `if rank ==`, a shorter loader or a caught exception",
)
_INTERLEAVED = (
    "the ranks are at the same line, in different collectives of one group: another thread of each rank also uses the"
    " group, such as that of async_save, and the calls of two threads have no common order",
    "stop the run; give the thread a process group of its own, as in async_save(…,"
    " process_group=dist.new_group(backend='gloo')); without such a thread, look for ranks whose models differ",
)
_SHARDED = (
    "a forward or backward of a sharded model gathers its parameters from every rank: these ranks call the model"
    " different numbers of times, such as for answers of different lengths in a generation",
    "stop the run; call the model equally often on every rank: go on with a dummy input until all ranks are done"
    " (generate(…, synced_gpus=True)), or gather the parameters once before the loop (summon_full_params, unshard)",
)
_ALL_THERE = (
    "every rank of the group has called it, with the same operation, and it does not complete: the ranks do not reach"
    " each other, or a device does not answer",
    "stop the run; run again with NCCL_DEBUG=INFO, or TORCH_DISTRIBUTED_DEBUG=INFO on gloo; check the interface that is"
    " used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and the firewall; on one machine try NCCL_P2P_DISABLE=1",
)
_NOT_STARTED = (
    "a collective completes only when every rank of its group calls it, and a rank has not started",
    "stop the run; read the log of that rank, and check that as many processes are started as WORLD_SIZE says",
)
_EVALUATES = (
    "a collective completes only when every rank of its group calls it, and a rank still evaluates",
    "stop the run; evaluate on every rank, each on its part, or let all ranks wait for the evaluation with"
    " dist.barrier() and a timeout= of init_process_group that is longer than it",
)
_ELSEWHERE = (
    "a collective completes only when every rank of its group calls it, and a rank is in no collective: it waits for"
    " something else at its line, such as data, a file, a lock or a process",
    "stop the run; look at the line of that rank: let it not wait there, or let all ranks wait there",
)
_STILL_RUNS = (
    "a collective completes only when every rank of its group calls it, and a rank still computes or trains: it has"
    " more or slower work, or took a branch without this call",
    "if that rank only needs longer, wait, and give it equal work or raise --hang-after; otherwise stop the run and"
    " call the collective on every rank",
)
_DATA = (
    "the rank waits for its next batch: a worker of the DataLoader is stuck or has died, or storage does not answer",
    "stop the run; try num_workers=0, which shows the error of a worker, or a timeout= of the DataLoader",
)
_MEETING = (
    "the ranks have not met: init_process_group waits until WORLD_SIZE processes have connected to rank 0",
    "stop the run; start every rank, with one MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and call init_process_group on"
    " each; on several hosts check that they reach the address of rank 0",
)
_NOTHING_PENDING = (
    "no collective is pending: the rank waits for data, a file, a lock, a message from another stage, or ranks that did"
    " not start",
    "stop the run, and check what the rank waits for at that line",
)


def _interleaved(held_up: Mapping[int, Waiting]) -> bool:
    """Whether ranks at one line of the script are in different collectives of one group that have the same number."""
    calls: dict[tuple[object, ...], set[str]] = {}
    for number, op in pending_operations(held_up).items():
        at = place(held_up[number].stack)
        calls.setdefault((group_of(op), op.seq, at), set()).add(op.op)
    return any(len(ops) > 1 and key[-1] for key, ops in calls.items())


def _waits(state: RunState) -> Finding | None:
    """Ranks that wait, and the ranks that they wait for."""
    held_up = waiting(state)
    if not held_up:
        return None
    pending = pending_operations(held_up)
    lasts = _seconds(held_up.values())
    if not pending:
        title = f"{ranks_in_words(held_up)} made no progress for {lasts:.0f} s{_common_place(held_up.values())}"
        absent: tuple[int, ...] = tuple(rank for rank in range(state.world_size) if rank not in held_up)
    else:
        first, absent = _awaited(pending)
        inside = [number for number, op in pending.items() if same(op, first)]
        title = f"{ranks_in_words(inside)} waited for {lasts:.0f} s in {first.words}"
        title += _common_place(held_up[number] for number in inside)
        everyone = "; all ranks of its group have reached it" if first.ranks else ""
        missing = f"; {ranks_in_words(absent)}{on_hosts(state, absent)} never reached it"
        title += missing if absent else everyone
    cause, fix = _nothing_pending(held_up.values()) if not pending else _not_reached(state, held_up, absent)
    described = [
        *_described(held_up),
        *(f"rank {number}: {last_seen(state, number)}" for number in absent if number not in held_up),
    ]
    return Finding(
        name="hang",
        title=title,
        evidence="; ".join(described),
        cause=cause,
        fix=fix,
        ranks=(*absent, *(number for number in held_up if number not in absent)),
    )


def _nothing_pending(events: Iterable[Waiting]) -> tuple[str, str]:
    """Cause and fix of ranks that wait outside of collectives, by where they are."""
    if all("in init_process_group" in event.stack or "in rendezvous" in event.stack for event in events):
        return _MEETING
    return _DATA if all(event.phase == "data" for event in events) else _NOTHING_PENDING


def _not_reached(state: RunState, held_up: Mapping[int, Waiting], absent: Iterable[int]) -> tuple[str, str]:
    """Cause and fix of ranks that wait in a collective, by where the `absent` ranks are."""
    away = [number for number in absent if number not in held_up]
    parts = apart(state)
    if _interleaved(held_up) and (parts is None or parts.how == "thread"):
        return _INTERLEAVED
    if is_sharded(held_up):
        return _SHARDED
    if not absent:
        return _ALL_THERE if all(first_pending(event) for event in held_up.values()) else _NOT_CALLED
    if any(number not in state.ranks for number in away):
        return _NOT_STARTED if not on_hosts(state, away) else _NOT_CALLED
    if away:
        return _EVALUATES if all(state.ranks[rank].activity == "evaluating" for rank in away) else _STILL_RUNS
    return _NOT_CALLED if all(first_pending(held_up[number]) for number in absent) else _ELSEWHERE


def is_sharded(held_up: Mapping[int, Waiting]) -> bool:
    """Whether ranks wait in different collectives, and one of them in a gathering or reduction of a sharded model."""
    pending = pending_operations(held_up)
    differ = len({(group_of(op), op.op, op.seq) for op in pending.values()}) > 1
    return differ and any("/distributed/fsdp/" in held_up[number].stack for number in pending)


def _awaited(pending: Mapping[int, Call]) -> tuple[Call, tuple[int, ...]]:
    """The collective that blocks the others, and its ranks that are not in it; preferably one that waits for a rank in
    no collective."""
    absent = {
        number: tuple(rank for rank in op.ranks if rank not in pending or not same(pending[rank], op))
        for number, op in pending.items()
    }
    inside = {number: sum(same(op, other) for other in pending.values()) for number, op in pending.items()}
    best = min(pending, key=lambda number: (all(rank in pending for rank in absent[number]), -inside[number]))
    return pending[best], absent[best]


def _described(events: Mapping[int, Waiting]) -> list[str]:
    pending = pending_operations(events)
    return [f"rank {number}: {where(event, pending.get(number))}" for number, event in sorted(events.items())]


def _common_place(events: Iterable[Waiting]) -> str:
    """` at train.py:88 in step` if these ranks are all at one line; empty otherwise."""
    places = {place(event.stack) for event in events}
    return f" at {places.pop()}" if len(places) == 1 and "" not in places else ""


def _seconds(events: Iterable[Waiting | Silent]) -> float:
    return max(float(event.t - event.since) for event in events)


# ---- what NCCL's RAS service says about a communicator: ranks that did not answer, that report an error, or that
# launched fewer collectives than the others

_SHOWN = 8  # ranks or values in one sentence
STATUS = "status"  # the `what` of ranks that differ in their status


def answer_in_words(event: Ras) -> str:
    """`NCCL RAS: rank 1 has launched 56 AllReduce, ranks 0, 2, 3 57`; empty if all ranks answered and are alike."""
    sentences = list(dict.fromkeys(sentence for about in event.communicators for sentence in _sentences(about)))
    if not sentences:
        return ""
    more = [f"{len(sentences) - _SHOWN} more in {event.saved}"] if len(sentences) > _SHOWN else []
    return "NCCL RAS: " + "; ".join([*sentences[:_SHOWN], *more])


def _sentences(about: Communicator) -> Iterator[str]:
    within = "" if about.of_run else f" (ranks of {title_of(about)})"
    for ranks in (about.missing, about.failed):
        if ranks:
            yield ranks_say(ranks) + within
    for parts in differing(about):
        yield part_in_words(parts) + within


def title_of(about: Communicator) -> str:
    """`communicator 27a079b828ff1a75 of 32 ranks`."""
    return f"communicator {visible_line(about.name)} of {counted(about.size, 'rank')}"


def ranks_say(ranks: Sequence[RasRank]) -> str:
    """`rank 1 did not answer and is considered dead (process 42 on 10.0.0.2, GPU 1)`, of ranks that say the same."""
    by_word: dict[str, list[RasRank]] = {}
    for rank in ranks:
        by_word.setdefault(rank.says, []).append(rank)
    sentences = []
    for says, those in by_word.items():
        processes = [process for rank in those[:_SHOWN] if (process := process_of(rank))]
        named = f" ({'; '.join(processes)})" if processes else ""
        sentences.append(f"{some_ranks([rank.rank for rank in those])} {visible_line(says)}{named}")
    return "; ".join(sentences)


def process_of(rank: RasRank) -> str:
    """`process 42 on 10.0.0.2, GPU 1`; empty if unknown."""
    host = f" on {visible_line(rank.host)}" if rank.host else ""
    gpu = f", GPU {visible_line(rank.gpu)}" if rank.gpu else ""
    return f"process {rank.pid}{host}{gpu}" if rank.pid else ""


def differing(about: Communicator) -> list[list[RasAlike]]:
    """What is not equal on all ranks, one list for each: the ranks with fewer calls first, or the rarer status."""
    by_what: dict[str, list[RasAlike]] = {}
    for part in about.differ:
        by_what.setdefault(part.what, []).append(part)
    return [
        sorted(parts, key=lambda part: part.count if what == STATUS else launched(part))
        for what, parts in by_what.items()
    ]


def launched(part: RasAlike) -> int:
    """How often ranks launched a collective."""
    return int(part.value) if part.value.isdecimal() and part.value.isascii() else 0


def part_in_words(parts: Sequence[RasAlike]) -> str:
    """`rank 1 has launched 56 AllReduce, ranks 0, 2, 3 57`."""
    words = []
    for part in parts[:_SHOWN]:
        who, value, what = members(part), visible_line(part.value), visible_line(part.what)
        verb = "has" if part.count == 1 else "have"
        if part.what == STATUS:
            words.append(f"{who} {verb} status {value}")
        else:
            words.append(f"{who} {value}" if words else f"{who} {verb} launched {value} {what}")
    return ", ".join(words) + (f" and {len(parts) - _SHOWN} more groups" if len(parts) > _SHOWN else "")


def members(part: RasAlike) -> str:
    """`ranks 0, 2`; `26 ranks` if the report does not name all of them."""
    return some_ranks(part.ranks) if len(part.ranks) == part.count else counted(part.count, "rank")
