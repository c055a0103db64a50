"""What the profiles of all ranks of a job say: where the time went (`breakdown.py`), the kernels and collectives that
take longest, the rank that arrives last, and the stretches in which the GPU waits for the CPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from labkit.analysis.diagnose.finding import Finding, shorter
from labkit.analysis.foreign import critical_path
from labkit.analysis.foreign.breakdown import (
    COMMUNICATION,
    COMPUTATION,
    COPY,
    Analysed,
    Breakdown,
    Kernel,
    analyse,
    kernels,
    kind_of,
    message_bytes,
    operation,
    short_name,
)
from labkit.analysis.foreign.chrome import Call, Profile
from labkit.analysis.foreign.page import Page, Table
from labkit.analysis.foreign.profiled_steps import profile_events
from labkit.analysis.metrics import median
from labkit.analysis.nodes import MUTUAL
from labkit.analysis.theory.collectives import bus_factor
from labkit.common.units import counted, milliseconds, ranks_in_words, significant, size

_MOST_KERNELS = 10  # rows of the table of kernels
_MOST_RANKS = 16  # rows of the table of ranks
_FEW = 3  # collectives from which the rank that arrives last in most of them is not last by chance
_LARGE = 0.1  # share of a step from which something is a finding

# ---- collectives


@dataclass(frozen=True)
class Collectives:
    """The collectives of one operation in one group size, of all ranks: bytes per call as nccl-tests counts them, bus
    bandwidth in bytes per second; None if the files do not have them. Seconds include waiting for other ranks."""

    operation: str
    ranks: int | None
    count: int
    bytes: int | None
    seconds: float
    bus_bandwidth: float | None


def collectives(analysed: Sequence[Analysed]) -> list[Collectives]:
    """The collectives of all ranks, those that take longest first."""
    found: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for rank in analysed:
        for call in rank.calls:
            found[operation(call.op), call.ranks].append(call)
    rows = []
    for (op, ranks), calls in found.items():
        sizes = [message_bytes(op, call) for call in calls]
        seconds = sum(call.end - call.start for call in calls)
        known = all(sizes) and seconds > 0
        bandwidth = bus_factor(op, ranks) * sum(sizes) / seconds if known and ranks > 1 else None
        rows.append(Collectives(op, ranks or None, len(calls), sum(sizes) if known else None, seconds, bandwidth))
    return sorted(rows, key=lambda row: -row.seconds)


# ---- ranks that arrive late


@dataclass(frozen=True)
class Arrivals:
    """Of collectives that several files have: how many were `matched`, and by rank the seconds by which its clock is
    ahead of that of the first rank, in how many collectives it arrived `last`, and the seconds that it `waited` for the
    last rank."""

    matched: int
    ahead: Mapping[int, float]
    last: Mapping[int, int]
    waited: Mapping[int, float]


def arrivals(analysed: Sequence[Analysed]) -> Arrivals | None:
    """Compares when ranks started the same collectives; None if none can be matched.

    Ranks on one host have one clock. A collective such as all-reduce ends on all its ranks at about the same time, so
    the median difference of the ends is the difference of the clocks of two hosts.
    """
    matched = list(_matched(analysed))
    first = min((rank for calls in matched for rank in calls), default=None)
    if first is None:
        return None
    base = {rank.rank: rank.profile.base * 1e-9 for rank in analysed}
    hosts = {rank.rank: rank.profile.host for rank in analysed}
    ahead = {rank: 0.0 for rank, host in hosts.items() if rank == first or (host and host == hosts[first])}
    while linked := _linked(matched, ahead, base):
        ahead |= linked
    last = dict.fromkeys(ahead, 0)
    waited = dict.fromkeys(ahead, 0.0)
    for calls in matched:
        if ahead.keys() < calls.keys():
            continue
        starts = {rank: call.start + base[rank] - base[first] - ahead[rank] for rank, call in calls.items()}
        latest = max(starts, key=lambda rank: starts[rank])
        last[latest] += 1
        for rank, start in starts.items():
            waited[rank] += starts[latest] - start
    return Arrivals(len(matched), ahead, last, waited)


def _matched(analysed: Sequence[Analysed]) -> Iterator[dict[int, Call]]:
    """The calls of each collective by rank. They are matched by their order in a group and a step, in which all files
    must have the same operations with as many bytes. Where groups are not recorded, as on gloo, those of one operation
    and size are matched that every rank of the job has called equally often."""
    if any(rank.profile.sampled for rank in analysed) or len({rank.rank for rank in analysed}) < len(analysed):
        return
    complete = all(rank.profile.world_size == len(analysed) for rank in analysed)
    sequences: dict[tuple[Any, ...], dict[int, list[Call]]] = defaultdict(dict)
    for rank in analysed:
        for call in rank.calls:
            step = next((number for number, start, end in rank.steps if start <= call.launched < end), None)
            if (call.group or complete) and operation(call.op) in MUTUAL:
                key = (step, call.group) if call.group else (step, call.op, call.bytes_in)
                sequences[key].setdefault(rank.rank, []).append(call)
    for (_, *named), by_rank in sequences.items():
        same = len({tuple((call.op, call.bytes_in) for call in calls) for calls in by_rank.values()}) == 1
        if same and len(by_rank) > 1 and (len(named) == 1 or len(by_rank) == len(analysed)):
            yield from (dict(zip(by_rank, calls)) for calls in zip(*by_rank.values()))


def _linked(
    matched: Iterable[Mapping[int, Call]], ahead: Mapping[int, float], base: Mapping[int, float]
) -> dict[int, float]:
    """By how much further ranks are ahead that have a collective in common with one whose clock is known."""
    differences: dict[int, list[float]] = defaultdict(list)
    for calls in matched:
        for known in [rank for rank in calls if rank in ahead][:1]:
            for rank in calls.keys() - ahead.keys():
                between = calls[rank].end - calls[known].end + base[rank] - base[known]
                differences[rank].append(between + ahead[known])
    return {rank: median(values) for rank, values in differences.items()}


# ---- findings


def findings(analysed: Sequence[Analysed], late: Arrivals | None) -> list[Finding]:
    """What takes a large part of the time: a rank that arrives late, then the largest part first."""
    worst: dict[str, tuple[float, Analysed]] = {}
    for rank in analysed:
        if not rank.total.span:
            continue
        for name in ("exposed", "copies") if rank.profile.sampled else _WORDED:
            share = getattr(rank.total, name) / rank.total.span
            if share > max(_LARGE, worst.get(name, (0.0, rank))[0]):
                worst[name] = share, rank
    largest = sorted(worst.items(), key=lambda item: -item[1][0])
    return [*_late_rank(analysed, late), *(_WORDED[name](share, rank) for name, (share, rank) in largest)]


def _where(rank: Analysed) -> str:
    return f" on rank {rank.rank}" if rank.rank >= 0 else ""


def _of_a_step(rank: Analysed) -> str:
    return "of a step" if rank.steps else "of the profiled time"


def _ranks(rank: Analysed) -> tuple[int, ...]:
    return (rank.rank,) if rank.rank >= 0 else ()


_OVERLAP = {
    "all_reduce": "accumulate gradients over several micro-batches and synchronize them only in the last one (DDP:"
    " model.no_sync()), or send them in 16 bits (fp16_compress_hook)",
    "all_gather": "prefetch parameters earlier (FSDP2: set_modules_to_forward_prefetch), or shard them within a node"
    " only (a 2D mesh for fully_shard)",
    "reduce_scatter": "use a larger micro-batch, or shard within a node only (a 2D mesh for fully_shard)",
    "all_to_all": "exchange earlier, while other layers compute, or use fewer ranks per group of the exchange",
}


def _exposed(share: float, rank: Analysed) -> Finding:
    total = rank.total
    longest = next((row.operation for row in collectives([rank])), "a kernel")
    overlapped = total.overlapped / total.communication
    return Finding(
        name="exposed_communication",
        kind="slow",
        title=f"communication that nothing overlaps takes {share:.0%} {_of_a_step(rank)}{_where(rank)}",
        evidence=f"{milliseconds(total.exposed / rank.count)} of {milliseconds(total.span / rank.count)} per step;"
        f" {overlapped:.0%} of communication overlaps with computation; {longest} takes longest",
        cause="no computation is left to run while these collectives run, or they wait for a rank that arrives late",
        fix=_OVERLAP.get(longest, "start the collective earlier (async_op=True), and wait where its result is needed"),
        ranks=_ranks(rank),
    )


def _launch_bound(share: float, rank: Analysed) -> Finding:
    typical = median((rank.spans.end - rank.spans.start).tolist())
    return Finding(
        name="launch_bound",
        kind="slow",
        title=f"the GPU waits {share:.0%} {_of_a_step(rank)} for the CPU to launch kernels{_where(rank)}",
        evidence=f"{milliseconds(rank.total.launch_bound / rank.count)} of {milliseconds(rank.total.span / rank.count)}"
        f" per step; {len(rank.spans) / rank.count:,.0f} kernels per step, {milliseconds(typical)} each in the median",
        cause="the kernels are shorter than the time that Python and torch take to launch the next one",
        fix='compile the model with torch.compile(model, mode="reduce-overhead"), use a larger batch per rank, or a'
        " fused optimizer (fused=True)",
        ranks=_ranks(rank),
    )


def _starved(share: float, rank: Analysed) -> Finding:
    what = "the GPU is idle and no operator runs" if len(rank.profile.gpu) else "no operator runs"
    return Finding(
        name="no_operator",
        kind="slow",
        title=f"{what} for {share:.0%} {_of_a_step(rank)}{_where(rank)}",
        evidence=f"{milliseconds(rank.total.starved / rank.count)} of {milliseconds(rank.total.span / rank.count)} per"
        " step",
        cause="the process waits for data, or runs Python code outside of torch",
        fix="load data in other processes (DataLoader(num_workers=2, pin_memory=True)); profile again with"
        " with_stack=True to see which line runs",
        ranks=_ranks(rank),
    )


def _copies(share: float, rank: Analysed) -> Finding:
    copies = [kernel for kernel in kernels([rank]) if kind_of(kernel.name) == COPY]
    return Finding(
        name="memory_copies",
        kind="slow",
        title=f"copies of memory take {share:.0%} {_of_a_step(rank)}{_where(rank)}",
        evidence=f"{milliseconds(rank.total.copies / rank.count)} of {milliseconds(rank.total.span / rank.count)} per"
        f" step; {shorter(short_name(copies[0].name), 60)} takes longest",
        cause="data moves between CPU and GPU, or within the GPU, during the step",
        fix="pin the memory of batches (DataLoader(pin_memory=True)) and copy with .to(device, non_blocking=True);"
        " remove .item() and .cpu() from the loop",
        ranks=_ranks(rank),
    )


_WORDED = {"exposed": _exposed, "launch_bound": _launch_bound, "starved": _starved, "copies": _copies}


def _late_rank(analysed: Sequence[Analysed], late: Arrivals | None) -> Iterator[Finding]:
    if late is None or late.matched < min(_FEW, len(late.last)):
        return
    rank = max(late.last, key=lambda number: late.last[number])
    others = {number: seconds for number, seconds in late.waited.items() if number != rank}
    waits = max(others.values())
    span = sum(profile.total.span for profile in analysed) / len(analysed)
    if late.last[rank] <= late.matched / 2 or waits < _LARGE * span:
        return
    yield Finding(
        name="late_rank",
        kind="slow",
        title=f"rank {rank} arrives last in {late.last[rank]} of {late.matched} collectives; the others wait for it",
        evidence=f"another rank waits {milliseconds(waits / analysed[0].count)} per step"
        f" ({waits / span:.0%} of the step), by the start of the same collectives on aligned clocks",
        cause=f"rank {rank} computes longer before it starts these collectives: more work, a slower device, or waiting"
        " for data",
        fix=f"compare the kernels of rank {rank} with those of another rank; give all ranks batches of equal work, and"
        " check the clock speed and data loading of its node",
        ranks=(rank,),
    )


# ---- the page


def explain(profiles: Sequence[Profile]) -> Page:
    """What the profiles of one job say, one per rank."""
    analysed = [analyse(profile) for profile in sorted(profiles, key=lambda profile: (profile.rank or 0, profile.path))]
    late = arrivals(analysed)
    time, found = kernels(analysed), collectives(analysed)
    tables = [_rank_table(analysed), _step_table(analysed[0]), _kernel_table(analysed, time)]
    path = _path(max(analysed, key=lambda rank: rank.total.span))
    tables += [_path_table(path), _collective_table(found), _group_table(analysed[0].profile)]
    if late is not None:
        tables.insert(0, _arrival_table(late))
    return Page(
        title=_title(analysed),
        findings=findings(analysed, late),
        tables=[table for table in tables if table.rows],
        notes=[*_notes(analysed, late, found)],
        figures=_figures(analysed, late, time, found, path),
        events=partial(profile_events, analysed),
        world_size=max((rank.profile.world_size or 0 for rank in analysed), default=0) or None,
    )


@dataclass(frozen=True)
class RankPath:
    """The critical path of a rank, and its parts in words, the longest first: seconds on it, and of a step without."""

    rank: Analysed
    seconds: float
    parts: list[tuple[str, float, float | None]]


_PARTS = {
    COMPUTATION: "computation",
    COMMUNICATION: "communication",
    COPY: "copies",
    critical_path.CPU: "the CPU: Python, operators, launches",
    critical_path.DELAY: "delays that the trace does not explain",
}


def _path(rank: Analysed) -> RankPath | None:
    """The critical path through the complete steps of a rank; None if its file does not have what is needed."""
    begin = min((start for _, start, _ in rank.steps), default=math.inf)
    chosen = rank.spans.origin >= begin
    if not len(rank.profile.gpu) or rank.profile.sampled or not rank.by_step:
        return None
    spans = rank.spans.where(chosen)
    found = critical_path.critical_path(spans, rank.kinds[chosen], COMMUNICATION, rank.profile.waits, rank.steps)
    if found is None:
        return None
    largest = sorted(found.by_part.items(), key=lambda part: -part[1])
    parts = [(_PARTS[part], seconds, found.without.get(part)) for part, seconds in largest if seconds]
    parts += [(short_name(rank.profile.names[name]), seconds, without) for name, seconds, without in found.kernels]
    return RankPath(rank, found.seconds, parts)


def _path_table(path: RankPath | None) -> Table:
    heads = ("on the path", "per step", "share", "a step without it")
    if path is None:
        return Table("", heads, ())
    rows = [
        (
            shorter(name, 60),
            milliseconds(seconds),
            _share(seconds, path.seconds),
            "–" if rest is None else milliseconds(rest),
        )
        for name, seconds, rest in path.parts
    ]
    return Table(
        f"Critical path{_where(path.rank)}, and what a step would take without a part (replayed, not measured)",
        heads,
        tuple(rows),
    )


def _title(analysed: Sequence[Analysed]) -> str:
    first = analysed[0].profile
    known = sorted({rank.rank for rank in analysed if rank.rank >= 0})
    parts = [f"{counted(len(analysed), 'profile')} of torch.profiler"]
    if known:
        parts.append(ranks_in_words(known[:_MOST_RANKS]) + (" …" if len(known) > _MOST_RANKS else ""))
        parts[-1] += f" of {first.world_size}" if first.world_size else ""
    on_gpu = [rank for rank in analysed if len(rank.profile.gpu)]
    parts += [first.device or "a GPU"] if on_gpu else ["CPU"]
    parts += [first.backend] if first.backend else []
    numbers = [number for number, _, _ in analysed[0].steps]
    steps = [f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"] if numbers else []
    return " · ".join(parts + steps)


def _share(seconds: float, span: float) -> str:
    return f"{seconds / span:.0%}" if span else "–"


_BREAKDOWN_HEADS = ("compute", "communication", "exposed", "copies", "idle", "launch-bound")


def _breakdown_cells(total: Breakdown, count: int) -> tuple[str, ...]:
    parts = (total.computation, total.communication, total.exposed, total.copies, total.idle, total.launch_bound)
    return (milliseconds(total.span / count), *(_share(part, total.span) for part in parts))


def _rank_table(analysed: Sequence[Analysed]) -> Table:
    rows = [
        (str(rank.rank) if rank.rank >= 0 else rank.profile.path.name, *_breakdown_cells(rank.total, rank.count))
        for rank in analysed[:_MOST_RANKS]
    ]
    return Table("Time by rank", ("rank", "per step", *_BREAKDOWN_HEADS), tuple(rows))


def _step_table(rank: Analysed) -> Table:
    rows = [(str(number), *_breakdown_cells(total, 1)) for number, total in rank.by_step.items()]
    return Table(f"Time by step{_where(rank)}", ("step", "time", *_BREAKDOWN_HEADS), tuple(rows[:_MOST_RANKS]))


def _kernel_table(analysed: Sequence[Analysed], time: Sequence[Kernel]) -> Table:
    on_gpu = any(len(rank.profile.gpu) for rank in analysed)
    total = sum(kernel.seconds for kernel in time)
    rows = [
        (
            shorter(short_name(kernel.name), 44),
            f"{kernel.count:,}",
            milliseconds(kernel.seconds),
            _share(kernel.seconds, total),
        )
        for kernel in time[:_MOST_KERNELS]
    ]
    what = "kernel" if on_gpu else "operator"
    title = "Kernels by time" if on_gpu else "Operators by time, without those that they call"
    return Table(title, (what, "count", "time", "share"), tuple(rows))


def _collective_table(found: Sequence[Collectives]) -> Table:
    rows = [
        (
            row.operation,
            f"{row.ranks or '–'}",
            f"{row.count:,}",
            "–" if row.bytes is None else size(row.bytes / row.count),
            milliseconds(row.seconds),
            "–" if row.bus_bandwidth is None else f"{significant(row.bus_bandwidth / 1e9)} GB/s",
        )
        for row in found
    ]
    heads = ("collective", "ranks", "count", "bytes each", "time", "bus bandwidth")
    return Table("Collectives by time, which includes waiting for other ranks", heads, tuple(rows[:_MOST_RANKS]))


def _group_table(profile: Profile) -> Table:
    rows = [(name, description or "–", str(ranks)) for name, description, ranks in profile.groups[:_MOST_RANKS]]
    return Table("Process groups", ("group", "description", "ranks"), tuple(rows))


def _arrival_table(late: Arrivals) -> Table:
    rows = [
        (
            str(rank),
            f"{late.last[rank]:,} of {late.matched:,}",
            milliseconds(late.waited[rank]),
            milliseconds(late.ahead[rank]),
        )
        for rank in sorted(late.ahead, key=lambda rank: (-late.last[rank], rank))[:_MOST_RANKS]
    ]
    return Table("Who arrives last", ("rank", "arrives last", "waits in total", "clock ahead"), tuple(rows))


def _notes(analysed: Sequence[Analysed], late: Arrivals | None, found: Sequence[Collectives]) -> Iterator[str]:
    """What the files cannot tell."""
    for rank in analysed[:_MOST_RANKS]:
        yield from rank.profile.notes
    first = analysed[0].profile
    if len(first.steps) > len(analysed[0].steps):
        yield f"Step {first.steps[-1][0]} is left out: it is the last one, whose kernels may be incomplete."
    elif not first.steps:
        yield "The profile has no steps; call profiler.step() at the end of each, so that times are per step."
    if not any(len(rank.profile.gpu) for rank in analysed):
        yield "Nothing ran on a GPU: operators of the CPU count as computation."
    world = first.world_size or 0
    if world > len(analysed):
        yield (
            f"{len(analysed)} of {world} ranks are here, so it is not known for which other ranks these wait; add the"
            " files of the others."
        )
    if found and len(analysed) > 1 and late is None:
        yield "The collectives of the files cannot be matched, so it is not known which rank arrives last."
    if any(row.bus_bandwidth is None for row in found):
        yield "Bus bandwidth needs the size of tensors and groups, which these files do not have for all collectives."


def _figures(
    analysed: Sequence[Analysed],
    late: Arrivals | None,
    time: Sequence[Kernel],
    found: Sequence[Collectives],
    path: RankPath | None,
) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank.profile.rank,
            "file": str(rank.profile.path),
            "world_size": rank.profile.world_size,
            "backend": rank.profile.backend,
            "device": rank.profile.device or None,
            "groups": [
                {"name": name, "description": description, "ranks": ranks}
                for name, description, ranks in rank.profile.groups
            ],
            "total": _breakdown_json(rank.total),
            "steps": [{"step": number, **_breakdown_json(total)} for number, total in rank.by_step.items()],
        }
        for rank in analysed
    ]
    return {
        "kind": "profile",
        "ranks": ranks,
        "kernels": [asdict(kernel) for kernel in time[:100]],
        "collectives": [asdict(row) for row in found],
        "arrivals": None if late is None else asdict(late),
        "critical_path": None if path is None else _path_json(path),
    }


def _path_json(path: RankPath) -> dict[str, Any]:
    parts = [{"part": name, "seconds": seconds, "without_seconds": rest} for name, seconds, rest in path.parts]
    return {"rank": path.rank.profile.rank, "step_seconds": path.seconds, "parts": parts}


def _breakdown_json(total: Breakdown) -> dict[str, float]:
    return {f"{name}_seconds": seconds for name, seconds in (asdict(total) | {"overlapped": total.overlapped}).items()}
