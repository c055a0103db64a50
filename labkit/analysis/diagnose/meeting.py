"""Ranks that do not call the same collectives: different batches, evaluations, operations or shapes, and ranks that left early."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose.advice import one_of
from labkit.analysis.diagnose.finding import Finding, shorter, texts
from labkit.analysis.diagnose.waits import (
    MISMATCH,
    failed_in,
    first_pending,
    gone,
    group_of,
    in_words,
    operations,
    pending_operations,
    steps_done,
    unmet,
    waiting,
)
from labkit.common.units import ranks_in_words
from labkit.record.stacks import place

if TYPE_CHECKING:
    from labkit.record.columns import RankState
    from labkit.record.state import RunState

_ALIKE = ("all_reduce", "reduce", "broadcast")  # operations to which every rank brings the same shape


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
        fix=f"give each rank equally many samples (DistributedSampler pads); or {one_of(state, 'join') or 'use ddp with join=true'}",
        ranks=short,
    )


def evaluation_on_one_rank(state: RunState) -> Iterator[Finding]:
    """A rank that evaluates while others do not, and is stuck in it."""
    if not _stuck(state) or next(uneven_inputs(state), None):
        return
    waits = waiting(state)
    held = set(waits) if state.failure is None else set(state.ranks)
    alone = tuple(rank.rank for rank in state.ranks.values() if rank.activity == "evaluating" and rank.exit_code != 0 and rank.rank in held)
    others = tuple(rank.rank for rank in state.ranks.values() if rank.activity == "training")
    if not alone or not others or len(alone) > len(others):
        return
    stood = state.ranks[alone[0]].error or waits.get(alone[0]) or {}
    where = place(stood.get("traceback") or stood.get("stack"))
    gone = [rank for rank in others if state.ranks[rank].exit_code == 0]
    yield Finding(
        name="evaluation_on_one_rank",
        kind="wrong",
        title=f"{ranks_in_words(alone)} evaluated, and {ranks_in_words(others)} did not",
        evidence=(f"it stood at {where}; " if where else "")
        + (f"{ranks_in_words(gone)} had left" if gone else f"{ranks_in_words(others)} went on training"),
        cause="an evaluation with a sharded model, or with a sum over ranks, is a collective: every rank must come to it",
        fix="let every rank evaluate a share of the test set, and print on rank 0 alone",
        ranks=alone + others,
    )


def mismatch(state: RunState) -> Iterator[Finding]:
    """A collective that the ranks did not agree on: it failed, or all of them are held in it by shapes that are unlike."""
    failed, waits = state.failure is not None, waiting(state)
    if not failed and not waits:
        return
    said = next(((rank, text) for rank, text in texts(state) if MISMATCH.search(text)), None)
    stood = {rank.rank: rank.error or waits.get(rank.rank) or {} for rank in state.ranks.values()}
    apart = _apart({number: operations(event) for number, event in stood.items()}, unlike=failed)
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
        fix="look for what depends on the rank there: a shape, an `if rank ==`, a last batch; TORCH_DISTRIBUTED_DEBUG=DETAIL helps",
        ranks=tuple(sorted(state.ranks)),
    )


def left_early(state: RunState) -> Iterator[Finding]:
    """A rank whose script ended without an error while others still wait for it, or have failed because it was gone."""
    failure, waits = state.failure, waiting(state)
    if failure is None:
        pending = pending_operations(waits)
        ended = [rank.rank for rank in state.ranks.values() if rank.exit_code == 0] + list(gone(state))
        held_up = [number for number in waits if number not in pending or set(pending[number]["ranks"]) & set(ended)]
    else:
        ended, held_up = failure["left"], failure["alike"]
    if not ended or not held_up or any(True for rule in (uneven_inputs, evaluation_on_one_rank) for _ in rule(state)):
        return
    first = state.ranks[held_up[0]]
    event = first.error if failure is not None else waits[first.rank]
    stood = place((event or {}).get("traceback") or (event or {}).get("stack"))
    op = failed_in(event or {}) if failure is not None else first_pending(event or {})
    doing = (" in " + in_words({**op, "sizes": []}) if op else "") + (f" ({stood})" if stood else "")
    waited = f"{ranks_in_words(held_up)} {'waited' if failure is not None else 'wait' if len(held_up) > 1 else 'waits'}"
    verb = "its script" if len(ended) == 1 else "their scripts"
    code = " with exit code 0" if all(state.ranks[number].exit_code == 0 for number in ended) else ""
    yield Finding(
        name="left_early",
        kind="wrong",
        title=f"{ranks_in_words(ended)} ended {verb}{code} after {steps_done(state.ranks[ended[0]])} steps, while {waited}{doing}",
        evidence="; ".join(_ended(state.ranks[number]) for number in ended)
        + (f"; rank {first.rank}: {shorter(failure['type'] + ': ' + failure['message'])}" if failure is not None else ""),
        cause="a collective completes only when every rank in its group calls it, and the process of a rank that has ended is gone",
        fix="let all ranks leave at the same step: base a `return`, `break` or `sys.exit()` on a value that every rank has, such as "
        "a flag that rank 0 broadcasts",
        ranks=(*ended, *held_up),
    )


def _ended(rank: RankState) -> str:
    at = place(rank.left_at)
    return (
        f"rank {rank.rank}: " + (f"ended by the call at {at}" if at else "its script came to its end") + f", {steps_done(rank)} steps done"
    )


def _stuck(state: RunState) -> bool:
    """Whether ranks did not meet: one waits, or has failed with words that say so."""
    failure = state.failure
    return unmet(failure) if failure is not None else bool(waiting(state))


def _apart(ops: Mapping[int, list[dict[str, Any]]], unlike: bool) -> str | None:
    """Two ranks' different ideas of the same number in the same group, in words: of its shape, or, if `unlike`, of the operation too."""
    known: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    for rank, those in sorted(ops.items()):
        for op in those:
            before, first = known.setdefault((*group_of(op), op["seq"]), (rank, op))
            same = first["op"] == op["op"]
            if (same and op["op"] in _ALIKE and first["sizes"] != op["sizes"]) or (unlike and not same):
                return f"rank {before} was in {in_words(first)}, rank {rank} in {in_words(op)}"
    return None
