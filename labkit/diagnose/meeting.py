"""Ranks that do not meet: who waits in which collective, who never came, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from labkit.diagnose.finding import Finding, place, ranks_in_words, shorter, texts
from labkit.state import PEER_GONE

if TYPE_CHECKING:
    from labkit.columns import RankState
    from labkit.state import RunState

_MISMATCH = re.compile(r"collective mismatch|data size doesn't match|preamble\.length|Detected mismatch between collectives", re.IGNORECASE)
_ALIKE = ("all_reduce", "reduce", "broadcast")  # operations to which every rank brings the same shape
_IDLE = 0.05  # share of the time that a rank may compute and still be said to wait


def uneven_inputs(state: RunState) -> Iterator[Finding]:
    """Loaders of different lengths, in a run that did not come to its end."""
    lengths = {rank.rank: rank.seen("loader")[0]["batches"] for rank in state.ranks.values() if rank.seen("loader")}
    if len(set(lengths.values())) < 2 or None in lengths.values() or not _stuck(state) or (state.spec.get("options") or {}).get("join"):
        return
    least = min(lengths.values())
    short = tuple(rank for rank, length in sorted(lengths.items()) if length == least)
    yield Finding(
        name="uneven_inputs",
        kind="wrong",
        title=f"{ranks_in_words(short)} had {least} batches, and others up to {max(lengths.values())}",
        evidence="batches of an epoch, by rank: " + ", ".join(f"{rank}: {length}" for rank, length in sorted(lengths.items())),
        cause="every step has a collective; who has no batch left does not come to it, and the others wait or meet another one",
        way_out="give each rank as many samples (DistributedSampler fills up), or train inside model.join() (option join=true of ddp)",
        ranks=short,
    )


def evaluation_on_one_rank(state: RunState) -> Iterator[Finding]:
    """A rank that evaluates while others do not, and is stuck in it."""
    if not _stuck(state) or next(uneven_inputs(state), None):
        return
    waiting = _waiting(state)
    held = set(waiting) if state.failure is None else set(state.ranks)
    alone = tuple(rank.rank for rank in state.ranks.values() if rank.activity == "evaluating" and rank.exit_code != 0 and rank.rank in held)
    others = tuple(rank.rank for rank in state.ranks.values() if rank.activity == "training")
    if not alone or not others or len(alone) > len(others):
        return
    stood = state.ranks[alone[0]].error or waiting.get(alone[0]) or {}
    where = place(stood.get("traceback") or stood.get("stack"))
    gone = [rank for rank in others if state.ranks[rank].exit_code == 0]
    yield Finding(
        name="evaluation_on_one_rank",
        kind="wrong",
        title=f"{ranks_in_words(alone)} evaluated, and {ranks_in_words(others)} did not",
        evidence=(f"it stood at {where}; " if where else "")
        + (f"{ranks_in_words(gone)} had left" if gone else f"{ranks_in_words(others)} went on training"),
        cause="an evaluation with a sharded model, or with a sum over ranks, is a collective: every rank must come to it",
        way_out="let every rank evaluate a share of the test set, and print on rank 0 alone",
        ranks=alone + others,
    )


def mismatch(state: RunState) -> Iterator[Finding]:
    """A collective that the ranks did not agree on: it failed, or all of them are held in it by shapes that are unlike."""
    failed, waiting = state.failure is not None, _waiting(state)
    if not failed and not waiting:
        return
    said = next(((rank, text) for rank, text in texts(state) if _MISMATCH.search(text)), None)
    stood = {rank.rank: rank.error or waiting.get(rank.rank) or {} for rank in state.ranks.values()}
    apart = _apart({number: _ops(event) for number, event in stood.items()}, unlike=failed)
    if said is None and apart is None:
        return
    places = (place(event.get("traceback") or event.get("stack")) for event in stood.values())
    where = next(filter(None, places), "")
    yield Finding(
        name="mismatch",
        kind="wrong",
        title="the ranks did not agree on a collective" + (f" at {where}" if where else ""),
        evidence="; ".join(filter(None, (apart, shorter(said[1]) if said else ""))),
        cause="collectives meet by their order alone: op, shape and type must be the same on every rank",
        way_out="look for what depends on the rank there: a shape, an `if rank ==`, a last batch; TORCH_DISTRIBUTED_DEBUG=DETAIL helps",
        ranks=tuple(sorted(state.ranks)),
    )


def hang(state: RunState) -> Iterator[Finding]:
    """No progress: which rank waits in which collective, which never came, and where it is instead."""
    waiting, failure = _waiting(state), state.failure
    if not waiting or (failure is not None and failure["traceback"] and not _unmet(failure)):
        return
    pending = {number: op for number, event in waiting.items() if (op := _first_pending(event))}
    seconds = max(event["t"] - event["since"] for event in waiting.values())
    if not pending:
        title = f"{ranks_in_words(waiting)} made no progress for {seconds:.0f} s"
        absent: tuple[int, ...] = tuple(rank for rank in range(state.world_size) if rank not in waiting)
    else:
        first, absent = _awaited(pending)
        inside = [number for number, one in pending.items() if _same(one, first)]
        title = f"{ranks_in_words(inside)} waited for {seconds:.0f} s in {_op(first)}"
        title += f"; {ranks_in_words(absent)} never came" if absent else ", where all of its ranks are" if first["ranks"] else ""
    told = [f"rank {number}: {_where(event, pending.get(number))}" for number, event in sorted(waiting.items())]
    told += [f"rank {number}: {_last_seen(state, number)}" for number in absent if number not in waiting]
    yield Finding(
        name="hang",
        kind="wrong",
        title=title,
        evidence="; ".join(told),
        cause="a collective ends when every rank of its group has come to it; one that takes another way leaves the others waiting"
        if pending
        else "no collective is under way: it waits for data, a file, a lock, a message of another stage, or for ranks that have not begun",
        way_out="Stop ends it; look at the line of the rank that is elsewhere: an `if rank ==`, fewer batches, an error that was caught"
        if pending
        else "Stop ends it; look at the line where it stands",
        ranks=(*absent, *(number for number in waiting if number not in absent)),
    )


def _awaited(pending: Mapping[int, Mapping[str, Any]]) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """The collective that holds up the others, and its ranks that are not in it: one is best that waits for a rank that is in none."""
    absent = {
        number: tuple(rank for rank in op["ranks"] if rank not in pending or not _same(pending[rank], op)) for number, op in pending.items()
    }
    inside = {number: sum(_same(op, other) for other in pending.values()) for number, op in pending.items()}
    best = min(pending, key=lambda number: (all(rank in pending for rank in absent[number]), -inside[number]))
    return pending[best], absent[best]


def _stuck(state: RunState) -> bool:
    """Whether ranks did not meet: one waits, or has failed with words that say so."""
    failure = state.failure
    return _unmet(failure) if failure is not None else bool(_waiting(state))


def _unmet(failure: Mapping[str, Any]) -> bool:
    """Whether an error tells of other ranks only: gone, too late, or in another collective."""
    said = f"{failure['type']}: {failure['message']}"
    return failure["type"] in ("SIGABRT", "SIGTERM") or bool(PEER_GONE.search(said) or _MISMATCH.search(said))


def _waiting(state: RunState) -> dict[int, Mapping[str, Any]]:
    """By rank where each stands that waits: not those that have gone on since, have ended well, or only compute for long."""
    if state.status.get("state") == "finished":
        return {}
    held = {rank.rank: rank.waiting for rank in state.ranks.values() if rank.waiting and rank.exit_code != 0 and not _went_on(rank)}
    return {number: event for number, event in held.items() if _waits(event)}


def _went_on(rank: RankState) -> bool:
    since = rank.waiting.get("step")
    return isinstance(since, int) and len(rank.steps) > rank.first_step and rank.steps.step[-1] > since


def _waits(event: Mapping[str, Any]) -> bool:
    computed = event.get("computed")
    return _first_pending(event) is not None or (computed is not None and computed < _IDLE)


def _ops(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The collectives that an event tells of, with all that is read of them; without those that have no group or number."""
    ops = [op for op in event.get("ops") or () if isinstance(op, Mapping) and isinstance(op.get("seq"), int) and op.get("group")]
    plain = {"op": "collective", "over": True}
    return [plain | dict(op) | {"ranks": tuple(op.get("ranks") or ()), "sizes": op.get("sizes") or []} for op in ops]


def _first_pending(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((op for op in _ops(event) if not op["over"]), None)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("group", "ranks", "seq", "op"))


def _op(op: Mapping[str, Any]) -> str:
    shapes = " and ".join("×".join(map(str, shape)) or "one number" for shape in op["sizes"])
    return f"{op['op']} number {op['seq']}" + (f" ({shapes})" if shapes else "")


def _where(event: Mapping[str, Any], op: Mapping[str, Any] | None) -> str:
    at = place(event["stack"]) or event.get("phase") or "a place that is not known"
    return (f"in {_op(op)} at {at}" if op else f"in no collective, at {at}") + f", {event.get('step', 0)} steps done"


def _last_seen(state: RunState, number: int) -> str:
    rank = state.ranks.get(number)
    if rank is None:
        return "has not begun"
    if rank.exit_code is not None:
        return f"has ended with exit code {rank.exit_code}"
    done = int(rank.steps.step[-1]) if len(rank.steps) > rank.first_step else 0
    return f"goes on{' evaluating' if rank.activity == 'evaluating' else ''}, {done} steps done"


def _apart(ops: Mapping[int, list[dict[str, Any]]], unlike: bool) -> str | None:
    """Two ranks' different ideas of the same number in the same group, in words: of its shape, or, if `unlike`, of the operation too."""
    known: dict[tuple[str, tuple[int, ...], int], tuple[int, dict[str, Any]]] = {}
    for rank, those in sorted(ops.items()):
        for op in those:
            before, first = known.setdefault((op["group"], op["ranks"], op["seq"]), (rank, op))
            same = first["op"] == op["op"]
            if (same and op["op"] in _ALIKE and first["sizes"] != op["sizes"]) or (unlike and not same):
                return f"rank {before} was in {_op(first)}, rank {rank} in {_op(op)}"
    return None
