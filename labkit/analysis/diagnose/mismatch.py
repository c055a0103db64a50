"""Ranks that do not call the same collectives: different batches, evaluations, operations or shapes, and ranks that
exited early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose.finding import Finding, one_of, shorter, texts
from labkit.analysis.diagnose.hang import (
    ALIKE,
    APART,
    MISMATCH,
    Call,
    apart,
    blames_peers,
    failed_in,
    first_pending,
    gone,
    group_of,
    in_words,
    operations,
    pending_operations,
    place_of,
    steps_done,
    waiting,
)
from labkit.analysis.diagnose.looks import surplus_calls
from labkit.common.units import ranks_in_words
from labkit.record.events import Loader
from labkit.record.stacks import place

if TYPE_CHECKING:
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState


def uneven_inputs(state: RunState) -> Iterator[Finding]:
    """Data loaders of different lengths, in a run that failed or hangs."""
    loaders = {rank.rank: rank.seen(Loader)[0] for rank in state.ranks.values() if rank.seen(Loader)}
    lengths = {rank: loader.batches for rank, loader in loaders.items() if loader.batches is not None}
    if (
        len(set(lengths.values())) < 2
        or len(lengths) < len(loaders)
        or not _stuck(state)
        or state.spec.options.get("join")
    ):
        return
    least = min(lengths.values())
    short = tuple(rank for rank, length in sorted(lengths.items()) if length == least)
    yield Finding(
        name="uneven_inputs",
        kind="wrong",
        title=(
            f"{ranks_in_words(short)} had only {least} batches per epoch; other ranks had up to {max(lengths.values())}"
        ),
        evidence="batches per epoch, by rank: "
        + ", ".join(f"{rank}: {length}" for rank, length in sorted(lengths.items())),
        cause=(
            "every step calls a collective; a rank without batches no longer calls it, so the others block or meet "
            "a different collective"
        ),
        fix="give each rank the same number of samples (DistributedSampler pads its shards); or "
        + (one_of(state, "join") or "use the strategy ddp with --option join=true"),
        ranks=short,
    )


def evaluation_on_one_rank(state: RunState) -> Iterator[Finding]:
    """A rank that evaluates while others do not, and cannot continue."""
    if not _stuck(state) or next(uneven_inputs(state), None):
        return
    waits = waiting(state)
    held = set(waits) if state.failure is None else set(state.ranks)
    alone = tuple(
        rank.rank
        for rank in state.ranks.values()
        if rank.activity == "evaluating" and rank.exit_code != 0 and rank.rank in held
    )
    others = tuple(rank.rank for rank in state.ranks.values() if rank.activity == "training")
    if not alone or not others or len(alone) > len(others):
        return
    event = state.ranks[alone[0]].error or waits.get(alone[0])
    where = place_of(event) if event else ""
    exited = [rank for rank in others if state.ranks[rank].exit_code == 0]
    yield Finding(
        name="evaluation_on_one_rank",
        kind="wrong",
        title=f"{ranks_in_words(alone)} evaluated while {ranks_in_words(others)} did not"
        + (f" ({where})" if where else ""),
        evidence=(f"rank {alone[0]} was at {where}; " if where else "")
        + (f"{ranks_in_words(exited)} had exited" if exited else f"{ranks_in_words(others)} continued training"),
        cause=(
            "evaluating a sharded model, or reducing a metric over ranks, calls collectives: every rank must take part"
        ),
        fix="evaluate on every rank, each on its shard of the test set, and print on rank 0 only",
        ranks=alone + others,
    )


_ANY = (
    "collectives are matched only by their order: operation, shape and dtype must be the same on every rank",
    "remove what depends on the rank at that line: a shape, an `if rank ==`, a smaller last batch; if none is visible,"
    " run again with TORCH_DISTRIBUTED_DEBUG=DETAIL, which reports the first mismatch",
)
_IN_A_THREAD = APART["thread"]


def _in_a_thread(state: RunState) -> bool:
    """Whether a rank died while another thread than the one that trains was in a collective."""
    return any(failed.beside for failed in (state.status.failures or {}).values())


def mismatch(state: RunState) -> Iterator[Finding]:
    """Collectives that do not match: one failed, or all ranks block in it because their shapes differ."""
    failed, waits = state.failure is not None, waiting(state)
    if (not failed and not waits) or surplus_calls(state):
        return
    reported = next(((rank, text) for rank, text in texts(state) if MISMATCH.search(text)), None)
    events = {
        rank.rank: event for rank in state.ranks.values() if (event := rank.error or waits.get(rank.rank)) is not None
    }
    differ = _difference({number: operations(event) for number, event in events.items()}, different_ops=failed)
    if reported is None and differ is None:
        return
    parts = apart(state)
    cause, fix = APART[parts.how] if parts else _IN_A_THREAD if _in_a_thread(state) else _ANY
    where = next(filter(None, map(place_of, events.values())), "")
    yield Finding(
        name="mismatch",
        kind="wrong",
        title="the ranks called mismatched collectives" + (f" at {where}" if where else ""),
        evidence="; ".join(
            filter(None, (parts.in_words if parts else differ, shorter(reported[1]) if reported else ""))
        ),
        cause=cause,
        fix=fix,
        ranks=tuple(sorted(state.ranks)),
    )


def left_early(state: RunState) -> Iterator[Finding]:
    """A rank whose script ended without an error while others wait for it, or failed because it was gone."""
    failure, waits = state.failure, waiting(state)
    if surplus_calls(state):
        return
    if failure is None:
        pending = pending_operations(waits)
        ended = [rank.rank for rank in state.ranks.values() if rank.exit_code == 0] + list(gone(state))
        held_up = [number for number in waits if number not in pending or set(pending[number]["ranks"]) & set(ended)]
    else:
        ended, held_up = failure.left, failure.alike
    if not ended or not held_up or any(True for rule in (uneven_inputs, evaluation_on_one_rank) for _ in rule(state)):
        return
    first = state.ranks[held_up[0]]
    if failure is None:
        where, op = place_of(waits[first.rank]), first_pending(waits[first.rank])
    else:
        where, op = (place_of(first.error), failed_in(first.error)) if first.error else ("", None)
    doing = (" in " + in_words({**op, "sizes": []}) if op else "") + (f" ({where})" if where else "")
    waited = f"{ranks_in_words(held_up)} {'waited' if failure is not None else 'wait' if len(held_up) > 1 else 'waits'}"
    code = " with code 0" if all(state.ranks[number].exit_code == 0 for number in ended) else ""
    yield Finding(
        name="left_early",
        kind="wrong",
        title=(
            f"{ranks_in_words(ended)} exited{code} after {steps_done(state.ranks[ended[0]])} steps while "
            f"{waited}{doing}"
        ),
        evidence="; ".join(_ended(state.ranks[number]) for number in ended)
        + (f"; rank {first.rank}: {shorter(failure.type + ': ' + failure.message)}" if failure is not None else ""),
        cause="a collective completes only when every rank in its group calls it; a rank that has exited never does",
        fix=(
            "make the same steps on all ranks: base a `return`, `break` or `sys.exit()`, and an `if` around backward, "
            "on a value that all ranks share, such as a flag broadcast from rank 0"
        ),
        ranks=(*ended, *held_up),
    )


def _ended(rank: RankState) -> str:
    at = place(rank.left_at)
    return (
        f"rank {rank.rank}: {f'exited at {at}' if at else 'reached the end of its script'}, {steps_done(rank)} steps"
        " done"
    )


def _stuck(state: RunState) -> bool:
    """Whether a rank waits for others, or failed with an error that blames them."""
    failure = state.failure
    return blames_peers(failure) if failure is not None else bool(waiting(state))


def _difference(ops: Mapping[int, list[Call]], different_ops: bool) -> str | None:
    """Two ranks whose collectives of one number in one group differ: in shape, or, with `different_ops`, also in the
    operation.
    """
    known: dict[tuple[Any, ...], tuple[int, Call]] = {}
    for rank, those in sorted(ops.items()):
        for op in those:
            before, first = known.setdefault((*group_of(op), op["seq"]), (rank, op))
            same = first["op"] == op["op"]
            if (same and op["op"] in ALIKE and first["sizes"] != op["sizes"]) or (different_ops and not same):
                return f"rank {before} was in {in_words(first)}, rank {rank} in {in_words(op)}"
    return None
