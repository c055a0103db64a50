"""Runs that fail: errors recognised by their message, memory that ran out, the rank that failed first, and ranks that
do not call the same collectives: different batches, evaluations, operations or shapes, and ranks that exited early.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose.finding import Finding, one_of, shorter
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
    hang,
    on_hosts,
    operations,
    pending_operations,
    place_of,
    waiting,
)
from labkit.analysis.diagnose.known_errors import COLLECTIVE_TIMEOUT, KNOWN_ERRORS, KnownError
from labkit.analysis.diagnose.looks import surplus_calls
from labkit.common.units import counted, ranks_in_words, size
from labkit.record.events import Loader
from labkit.record.ranks import PEER_GONE
from labkit.record.stacks import place
from labkit.training.faults import FAULTS

if TYPE_CHECKING:
    from labkit.record.documents import Failure
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState


# Before torch says that memory ran out, it asks NVML who uses it, which fails on many MIG devices (pytorch issue
# 112377).
_MEMORY = re.compile(
    r"out of memory|can(?:'t|not) allocate memory|MemoryError|ALLOC_FAILED|NVML_SUCCESS == r .*CUDACachingAllocator",
    re.IGNORECASE,
)
_ASKED = re.compile(r"tried to allocate (?P<number>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def known_error(state: RunState) -> Iterator[Finding]:
    """The first error whose message identifies the cause, that of the rank that failed first before all others."""
    failure = state.failure
    for rank, text in _texts(state):
        known = next((known for known in KNOWN_ERRORS if _says(state, known, rank, text)), None)
        if known is not None:
            if failure is not None and rank in (None, failure.rank):
                raised, ranks = failure.alike, _involved(failure)
            else:
                raised = [] if rank is None else [rank]
                ranks = tuple(raised)
            whose = f"{ranks_in_words(raised, state.world_size)}: " if raised else ""
            where = _raised_at(state, ranks[0]) if ranks else ""
            evidence = _evidence(known, text)
            yield Finding(known.name, f"{whose}{known.title}{where}", evidence, known.cause, known.fix, ranks=ranks)
            return


def _texts(state: RunState) -> list[tuple[int | None, str]]:
    """Error messages with their rank, each text once: the first failure's, then the other ranks', then torchrun's."""
    rank_of: dict[str, int | None] = {}
    if state.failure is not None:
        rank_of[f"{state.failure.type}: {state.failure.message}"] = state.failure.rank
    for rank in state.ranks.values():
        if rank.error:
            rank_of.setdefault(f"{rank.error.type}: {rank.error.message}", rank.rank)
    for number, failed in (state.status.failures or {}).items():
        rank_of.setdefault(str(failed.message), int(number))
    rank_of.setdefault(str(state.status.message or ""), None)
    return [(rank, text) for text, rank in rank_of.items()]


def _says(state: RunState, known: KnownError, rank: int | None, text: str) -> bool:
    """Whether the text of a rank is this error, and not the consequence of another one."""
    if not re.search(known.pattern, text):
        return False
    if known.follows and state.failure is not None and rank != state.failure.rank:
        return False
    all_alike = state.failure is not None and len(state.failure.alike) == state.world_size
    if known.name == "nccl" and (_MEMORY.search(text) or (PEER_GONE.search(text) and not all_alike)):
        return False  # NCCL also reports that memory ran out, and that a peer is gone, which another rank explains
    return known.name != "collective_timeout" or next(hang(state), None) is None  # a hang has the line of each rank


def _evidence(known: KnownError, text: str) -> str:
    """The first line, the line with the error if it is another one, and what NCCL adds as its last error."""
    first, *more = text.strip().splitlines()
    line = next((line for line in (first, *more) if re.search(known.pattern, line)), first)
    line = "" if line is first else line
    _, found, last = "\n".join(more).rpartition("Last error:")
    last = last if found else ""
    return shorter(" ".join(filter(None, (first, line.strip(), last))))


def _raised_at(state: RunState, number: int) -> str:
    """` (train.py:12 in step)`: the line at which a rank raised its error; empty if it recorded none."""
    rank = state.ranks.get(number)
    line = place(rank.error.traceback) if rank is not None and rank.error else ""
    return f" ({line})" if line else ""


def out_of_memory(state: RunState) -> Iterator[Finding]:
    """Memory that ran out, what it was used for at that moment, and what would have fitted."""
    failure, kills = state.failure, state.status.oom_kills
    if failure is not None and failure.type == "SIGKILL" and kills:
        yield _killed_for_memory(state, failure, kills)
        return
    if failure is None or not _MEMORY.search(f"{failure.type}: {failure.message}"):
        return
    rank = state.ranks.get(failure.rank)
    asked = _asked(failure.message)
    owners = rank.error.owners if rank is not None and rank.error else {}
    held = {owner: count for owner, count in owners.items() if count}
    breakdown = ", ".join(f"{owner} {size(count)}" for owner, count in sorted(held.items(), key=lambda item: -item[1]))
    evidence = shorter(failure.message or failure.type) + (f"; memory in use: {breakdown}" if breakdown else "")
    where = place(failure.traceback)
    yield Finding(
        name="out_of_memory",
        title=f"{ranks_in_words(failure.alike, state.world_size)} ran out of memory"
        + (f" at {where}" if where else ""),
        evidence=evidence,
        cause=f"an allocation {f'of {size(asked)} ' if asked else ''}exceeded the free memory",
        fix=_what_fits(state, rank, asked or 0, held),
        ranks=_involved(failure),
    )


def _killed_for_memory(state: RunState, failure: Failure, kills: int) -> Finding:
    """A rank that the kernel killed because the memory of the host, or of its cgroup, ran out; `kills` processes of the
    cgroup were killed for that reason."""
    rank, where = failure.rank, place(failure.traceback)
    samples = state.system.ranks.get(rank)
    resident = (
        f"; last resident memory of the rank: {size(samples['rss'][-1])}" if samples and len(samples["rss"]) else ""
    )
    return Finding(
        name="out_of_memory",
        title=f"rank {rank} was killed by the kernel because memory ran out"
        + (f", last seen at {where}" if where else ""),
        evidence=(
            f"SIGKILL; the kernel killed {counted(kills, 'process', 'es')} of this cgroup for lack of memory{resident}"
        ),
        cause="the processes of the host or container exceeded its memory limit (host memory, not GPU memory)",
        fix="start the container or job with more memory; or load less data in each rank; or "
        f"{one_of(state, 'smaller batch')}",
        ranks=_involved(failure),
    )


def _involved(failure: Failure) -> tuple[int, ...]:
    """The ranks that a failure concerns, first the rank that failed first."""
    first = failure.rank
    return (first, *(rank for rank in failure.alike if rank != first), *failure.collateral)


def _asked(message: str) -> float | None:
    found = _ASKED.search(message)
    return float(found["number"]) * _UNITS[found["unit"].lower()] if found else None


def _what_fits(state: RunState, rank: RankState | None, asked: float, held: Mapping[str, float]) -> str:
    """The fix that follows from the breakdown: activations grow with the batch; sharding divides the rest by the number
    of ranks."""
    usual = one_of(state, "smaller batch", "accumulate for memory", "checkpoint activations", "shard")
    limit = state.device_memory(rank.rank) if rank is not None else None
    whole = limit or float(1 << 40)
    if asked > whole:
        return (
            f"allocate a smaller tensor at that line: {size(asked)} is more than the device has, so no setting would"
            " have fitted"
        )
    batch = state.asked.batch_per_rank if state.asked is not None else None
    fixed = sum(count for owner, count in held.items() if owner != "activations")
    profiled = rank.memory_step if rank is not None else None
    activations = profiled.at_peak.get("activations", 0) if profiled else held.get("activations", 0)
    if limit is None or not batch or not activations:
        return usual
    if fixed > 0.95 * limit:
        needed = f"parameters, gradients and optimizer state take {size(fixed)} of {size(limit)}"
        return f"use the strategy fsdp2: {needed}, and sharded over n ranks each rank stores 1/n of them"
    fits = int(batch * (0.95 * limit - fixed) / (activations + asked))
    return (
        f"reduce the batch per rank to {fits}, which fits by this breakdown; or {usual}" if 0 < fits < batch else usual
    )


def first_failure(state: RunState) -> Iterator[Finding]:
    """The rank that failed first, or those that failed in the same way, and the ranks that were terminated with
    them; nothing if another finding explains this failure."""
    failure = state.failure
    if failure is None or _is_explained(state, failure):
        return
    says = f"{failure.type}: {failure.message}" if failure.message else failure.type
    where = _where(failure)
    several = len(failure.alike) > 1
    those = ranks_in_words(failure.alike, state.world_size)
    alone = state.world_size == 1 or _lost_a_peer(state, failure)
    how = "in the same way" if several else "" if alone else "first"
    title = " ".join(filter(None, (those, "failed", how))) + f": {shorter(says, 120)}{where}"
    if failure.collateral:
        verb = "was" if len(failure.collateral) == 1 else "were"
        title += (
            f"; {ranks_in_words(failure.collateral)} {verb} terminated because {those if not several else 'they'}"
            " failed"
        )
    yield Finding(
        name="first_failure",
        title=title,
        evidence=shorter(says) + where,
        cause=_cause(state, failure),
        fix=f"read the end of the stderr of rank {failure.rank}"
        + ("; the errors of the other ranks follow from it" if failure.collateral else ""),
        ranks=_involved(failure),
    )


def _is_explained(state: RunState, failure: Failure) -> bool:
    """Whether the failure is an error that is known, memory that ran out, or follows from a rank that left or from
    collectives that do not match."""
    known = next(known_error(state), None)
    return (
        bool(failure.left)
        or (known is not None and failure.rank in known.ranks)
        or any(out_of_memory(state))
        or (MISMATCH.search(failure.message) is not None and any(mismatch(state)))
    )


def _where(failure: Failure) -> str:
    """` (train.py:12 in step)`; for a killed process, the last line it was seen at; empty if the message contains the
    line."""
    line = place(failure.traceback)
    if not line or f"{line.partition(':')[0]}, line" in failure.message:
        return ""
    return f" (last seen at {line})" if failure.last_seen else f" ({line})"


def _lost_a_peer(state: RunState, failure: Failure) -> bool:
    """Whether the first failure known so far only reports that another rank is gone; torchrun reports that rank at the
    end."""
    return not state.over and bool(PEER_GONE.search(f"{failure.type}: {failure.message}"))


def _cause(state: RunState, failure: Failure) -> str:
    others = [number for number in range(state.world_size) if number not in state.ranks]
    if others and state.expected < state.world_size and PEER_GONE.search(f"{failure.type}: {failure.message}"):
        return f"a rank of another node is gone, {ranks_in_words(others)}{on_hosts(state, others)}; read its run folder"
    if _lost_a_peer(state, failure):
        return "another rank is gone; torchrun reports which one, and why, when the run ends"
    injected = FAULTS.get(state.spec.fault or "")
    if failure.type == "SIGKILL" and injected and injected.finding == "first_failure":
        return f"the injected fault: {injected.title[0].lower()}{injected.title[1:]} in the script itself (fault_step)"
    if failure.type == "SIGKILL":
        unknown = (
            ", or by the kernel because memory ran out (dmesg shows that)" if state.status.oom_kills is None else ""
        )
        return f"the process was killed from outside: by a person or a scheduler{unknown}"
    if MISMATCH.search(failure.message):
        return "gloo ended the process, because it received data of another collective"
    if re.search(COLLECTIVE_TIMEOUT, failure.message):
        return "NCCL's watchdog ended the process, because a collective reached its timeout"
    if str(failure.type).startswith("SIG"):
        return "native code, such as a C extension or a driver, crashed the process"
    several = len(failure.alike) > 1
    what = "the same error on each of these ranks" if several else "this rank raised an exception or exited"
    return what + ("; the other ranks were terminated because they lost a peer" if failure.collateral else "")


# ---- ranks that do not call the same collectives


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
        title=(
            f"{ranks_in_words(short)} had only {least} batches per epoch; other ranks had up to {max(lengths.values())}"
        ),
        evidence="batches per epoch, by rank: "
        + ", ".join(f"{rank}: {length}" for rank, length in sorted(lengths.items())),
        cause="every step calls a collective; a rank without batches no longer calls it, so the others block or meet a "
        "different collective",
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


def mismatch(state: RunState) -> Iterator[Finding]:
    """Collectives that do not match: one failed, or all ranks block in it because their shapes differ."""
    failed, waits = state.failure is not None, waiting(state)
    if (not failed and not waits) or surplus_calls(state):
        return
    reported = next(((rank, text) for rank, text in _texts(state) if MISMATCH.search(text)), None)
    events = {
        rank.rank: event for rank in state.ranks.values() if (event := rank.error or waits.get(rank.rank)) is not None
    }
    differ = _difference({number: operations(event) for number, event in events.items()}, different_ops=failed)
    if reported is None and differ is None:
        return
    parts = apart(state)
    cause, fix = APART[parts.how] if parts else _ANY
    if parts is None and any(failed.beside for failed in (state.status.failures or {}).values()):
        cause, fix = APART["thread"]  # a rank died while another thread than the one that trains was in a collective
    where = next(filter(None, map(place_of, events.values())), "")
    yield Finding(
        name="mismatch",
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
        held_up = [number for number in waits if number not in pending or set(pending[number].ranks) & set(ended)]
    else:
        ended, held_up = failure.left, failure.alike
    if not ended or not held_up or any(True for rule in (uneven_inputs, evaluation_on_one_rank) for _ in rule(state)):
        return
    first = state.ranks[held_up[0]]
    if failure is None:
        where, op = place_of(waits[first.rank]), first_pending(waits[first.rank])
    else:
        where, op = (place_of(first.error), failed_in(first.error)) if first.error else ("", None)
    doing = (" in " + op.name if op else "") + (f" ({where})" if where else "")
    verb = "wait" if len(held_up) > 1 else "waits"
    waited = f"{ranks_in_words(held_up)} {verb if failure is None else 'waited'}"
    code = " with code 0" if all(state.ranks[number].exit_code == 0 for number in ended) else ""
    yield Finding(
        name="left_early",
        title=(
            f"{ranks_in_words(ended)} exited{code} after {state.ranks[ended[0]].steps_done} steps while {waited}{doing}"
        ),
        evidence="; ".join(_ended(state.ranks[number]) for number in ended)
        + (f"; rank {first.rank}: {shorter(failure.type + ': ' + failure.message)}" if failure is not None else ""),
        cause="a collective completes only when every rank in its group calls it; a rank that has exited never does",
        fix="make the same steps on all ranks: base a `return`, `break` or `sys.exit()`, and an `if` around backward, "
        "on a value that all ranks share, such as a flag broadcast from rank 0",
        ranks=(*ended, *held_up),
    )


def _ended(rank: RankState) -> str:
    at = place(rank.left_at)
    return (
        f"rank {rank.rank}: {f'exited at {at}' if at else 'reached the end of its script'}, {rank.steps_done} steps"
        " done"
    )


def _stuck(state: RunState) -> bool:
    """Whether a rank waits for others, or failed with an error that blames them."""
    failure = state.failure
    return blames_peers(failure) if failure is not None else bool(waiting(state))


def _difference(ops: Mapping[int, list[Call]], different_ops: bool) -> str | None:
    """Two ranks whose collectives of one number in one group differ: in shape, or, with `different_ops`, also in the
    operation."""
    known: dict[tuple[Any, ...], tuple[int, Call]] = {}
    for rank, those in sorted(ops.items()):
        for op in those:
            before, first = known.setdefault((*group_of(op), op.seq), (rank, op))
            same = first.op == op.op
            if (same and op.op in ALIKE and first.sizes != op.sizes) or (different_ops and not same):
                return f"rank {before} was in {first.words}, rank {rank} in {op.words}"
    return None
