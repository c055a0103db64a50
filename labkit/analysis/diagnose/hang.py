"""Runs that make no progress: which rank waits in which collective, and for which other rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from labkit.analysis.diagnose.finding import Finding
from labkit.analysis.diagnose.waits import (
    IDLE,
    STOPPED,
    Call,
    blames_peers,
    crossing,
    group_in_words,
    in_words,
    last_seen,
    on_hosts,
    pending_operations,
    same,
    silent,
    steps_done,
    waiting,
    where,
)
from labkit.common.units import ranks_in_words
from labkit.record.events import CutOff
from labkit.record.stacks import place

if TYPE_CHECKING:
    from labkit.record.events import Silent, Waiting
    from labkit.record.state import RunState


def hang(state: RunState) -> Iterator[Finding]:
    """No progress: which rank waits in which collective, which never reached it, and where that rank is instead."""
    failure = state.failure
    if failure is not None and failure.traceback and not blames_peers(failure):
        return
    found = _silent(state) or _crossed(state) or _waits(state)
    if found is not None:
        yield found


def cut_off(state: RunState) -> Iterator[Finding]:
    """Nodes that the others could not reach any more, also if the run has continued since."""
    events = [event for event in state.nodes if isinstance(event, CutOff)]
    ranks = {rank: host for event in events for rank, host in event.hosts.items()}
    if ranks:
        last = events[-1]
        yield Finding(
            name="cut_off",
            kind="wrong",
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
    those = [one for one, each in unheard.items() if (each.process in STOPPED) is is_stopped]
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
        kind="wrong",
        title=title + _others_wait(others),
        evidence="; ".join(
            [*(_silent_in_words(state, one, each) for one, each in sorted(unheard.items())), *_described(others)]
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
        ranks=(*those, *(one for one in others if one not in those)),
    )


def _silent_in_words(state: RunState, number: int, event: Silent) -> str:
    pid, computed = state.ranks[number].pid, event.computed
    share = (
        f", on the CPU for {computed:.0%} of the time" if computed is not None and event.process not in STOPPED else ""
    )
    doing = "stopped, last seen" if event.process in STOPPED else "in a C call that holds the GIL,"
    at = place(event.stack) or "an unknown line"
    done = steps_done(state.ranks[number])
    return f"rank {number}: {doing} at {at}, {done} steps done (process {pid or 'unknown'}: {event.process}{share})"


def _others_wait(others: Mapping[int, Waiting]) -> str:
    """`; rank 0 waits in all_reduce #10 (train.py:88 in step)`."""
    if not others:
        return ""
    pending = pending_operations(others)
    first = min(pending or others)
    at = place(others[first].stack)
    op = pending.get(first)
    inside = " in " + in_words({**op, "sizes": []}) if op else ""
    return f"; {ranks_in_words(others)} wait{'s' if len(others) == 1 else ''}{inside}" + (f" ({at})" if at else "")


def _crossed(state: RunState) -> Finding | None:
    """Ranks that use several process groups in different orders, so that each waits for another one."""
    held_up = waiting(state)
    circle = crossing(held_up)
    if not circle:
        return None
    pending = pending_operations(held_up)
    inside = [
        f"rank {number} is in {in_words({**pending[number], 'sizes': []})} of {group_in_words(pending[number])}"
        for number in circle
    ]
    return Finding(
        name="hang",
        kind="wrong",
        title=", ".join(inside) + ("; each waits for the other" if len(circle) == 2 else "; each waits for the next"),
        evidence=f"no progress for {_seconds(held_up.values()):.0f} s; " + "; ".join(_described(held_up)),
        cause=(
            "these ranks call collectives of several process groups in different orders: a collective completes "
            "only when every rank in its group calls it, and each of these ranks is blocked in another group first"
        ),
        fix="stop the run; call the collectives of these groups in the same order on every rank",
        ranks=(*circle, *(number for number in held_up if number not in circle)),
    )


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
        inside = [number for number, one in pending.items() if same(one, first)]
        title = f"{ranks_in_words(inside)} waited for {lasts:.0f} s in {in_words(first)}"
        title += _common_place(held_up[number] for number in inside)
        everyone = "; all ranks of its group have reached it" if first["ranks"] else ""
        missing = f"; {ranks_in_words(absent)}{on_hosts(state, absent)} never reached it"
        title += missing if absent else everyone
    described = [
        *_described(held_up),
        *(f"rank {number}: {last_seen(state, number)}" for number in absent if number not in held_up),
    ]
    return Finding(
        name="hang",
        kind="wrong",
        title=title,
        evidence="; ".join(described),
        cause=(
            "a collective completes only when every rank in its group calls it: a rank that takes a different branch"
            " blocks the others"
            if pending
            else (
                "no collective is pending: the rank waits for data, a file, a lock, a message from another stage, or "
                "ranks that did not start"
            )
        ),
        fix=(
            "stop the run; call the collective on every rank: look for an `if rank ==`, a shorter loader or a caught "
            "exception"
            if pending
            else "stop the run, and check what the rank waits for at that line"
        ),
        ranks=(*absent, *(number for number in held_up if number not in absent)),
    )


def _awaited(pending: Mapping[int, Call]) -> tuple[Call, tuple[int, ...]]:
    """The collective that blocks the others, and its ranks that are not in it; preferably one that waits for a rank in
    no collective.
    """
    absent = {
        number: tuple(rank for rank in op["ranks"] if rank not in pending or not same(pending[rank], op))
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
