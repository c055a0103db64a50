"""What the profiles of all ranks of a job say: where the time went (`trace.py`), the kernels and collectives that
take longest, the rank that arrives last, and the stretches in which the GPU waits for the CPU; and their steps as
events of a run, so that everything that shows runs shows them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from labkit.analysis.diagnose.finding import Finding, shorter
from labkit.analysis.foreign import Page, Table, numbered
from labkit.analysis.foreign.trace import (
    COMMUNICATION,
    COMPUTATION,
    COPY,
    CPU,
    DELAY,
    Analysed,
    Breakdown,
    Call,
    Kernel,
    Numbers,
    Profile,
    Spans,
    analyse,
    common,
    critical_path,
    kernels,
    kernels_of,
    kind_of,
    length,
    merge,
    message_bytes,
    operation,
    short_name,
)
from labkit.analysis.metrics import median
from labkit.analysis.profiled import MUTUAL, seconds_by_phase
from labkit.analysis.theory.collectives import bus_factor
from labkit.common.units import counted, milliseconds, ranks_in_words, significant, size
from labkit.record import events
from labkit.record.events import RANKS
from labkit.record.writer import sent

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
        known = next((rank for rank in calls if rank in ahead), None)
        if known is None:
            continue
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


def _per_step(seconds: float, rank: Analysed) -> str:
    return f"{milliseconds(seconds / rank.count)} of {milliseconds(rank.total.span / rank.count)} per step"


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
        evidence=f"{_per_step(total.exposed, rank)}; {overlapped:.0%} of communication overlaps with computation;"
        f" {longest} takes longest",
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
        evidence=f"{_per_step(rank.total.launch_bound, rank)}; {len(rank.spans) / rank.count:,.0f} kernels per step,"
        f" {milliseconds(typical)} each in the median",
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
        evidence=_per_step(rank.total.starved, rank),
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
        evidence=f"{_per_step(rank.total.copies, rank)}; {shorter(short_name(copies[0].name), 60)} takes longest",
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
    CPU: "the CPU: Python, operators, launches",
    DELAY: "delays that the trace does not explain",
}


def _path(rank: Analysed) -> RankPath | None:
    """The critical path of a rank in words; None if its file does not have what is needed."""
    found = critical_path(rank)
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


# ---- the profiled steps as events of a run
#
# The time of a step is that of its `Breakdown`: from the start of its first kernel to the end of its last. Its phases
# are told apart by what torch annotates: `DataLoader` and `Optimizer.step` by their own names, and backward from the
# first to the last operator of autograd. A phase begins with the first kernel that was launched in it.

_MOST = 600  # busy intervals of a step, as many as the probe records
_MOST_CALLS = 5_000  # of a step
_MOST_STORED = 100  # of a step, those that take longest
_MOST_STEPS = 20  # with a timeline: as many as a state stores
_FIRST_DAY = 1_451_606_400.0  # 2016, the year of torch's first release: an earlier time counts from a computer's start
_RINGS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")  # whose traffic is known
_OTHER = "other"


def profile_events(analysed: Sequence[Analysed]) -> Iterator[events.OfRank]:
    """The events of all ranks, each with its start first. Raises `ForeignError` if two files are of one rank."""
    ranks = numbered([rank.profile.rank for rank in analysed], [rank.profile.path.name for rank in analysed])
    for number, rank in zip(ranks, analysed):
        yield from _of_rank(number, rank)


def _of_rank(number: int, rank: Analysed) -> Iterator[events.OfRank]:
    profile = rank.profile
    base = profile.base * 1e-9
    base = base if base >= _FIRST_DAY else 0.0
    steps = {step: (start, end) for step, start, end in rank.steps if _chosen(rank, start, end).any()}
    totals = rank.by_step
    if not steps and rank.total.span:  # without steps, the whole time is shown as one
        steps, totals = {1: (-np.inf, np.inf)}, {1: rank.total}
    begun = min((float(rank.spans.start[_chosen(rank, *step)][0]) for step in steps.values()), default=0.0)
    on_gpu = len(profile.gpu) > 0
    yield events.Start(
        t=base + begun,
        rank=number,
        device="cuda" if on_gpu else "cpu",
        device_name=_clean(re.sub(r"^\d+ × ", "", profile.device)) if on_gpu else "",
        host=_clean(profile.host) or None,
        steady=True,
    )
    for index, (step, span) in enumerate(sorted(steps.items(), key=lambda item: item[1])):
        total, chosen = totals[step], _chosen(rank, *span)
        spans = rank.spans.where(chosen)
        calls = [call for call in rank.calls if span[0] == -np.inf or span[0] <= call.launched < span[1]]
        begin = float(spans.start[0])
        phases = _phases(rank, spans, total.span, *span)
        seconds = {"step": total.span}
        if len(phases) > 1:
            seconds |= seconds_by_phase(phases)
        yield events.Step(
            t=base + begin + total.span,
            rank=number,
            step=step,
            seconds=events.StepSeconds(**seconds),
        )
        if index >= len(steps) - _MOST_STEPS:
            event = _timeline(rank, total, spans, rank.kinds[chosen], calls, phases)
            yield structs.replace(event, t=base + begin + total.span, t0=base + begin, rank=number, step=step)
    if steps and (traffic := _traffic(calls)) and not profile.sampled:
        yield events.Traffic(t=base + begin + total.span, rank=number, step=step, ops=traffic)


def _chosen(rank: Analysed, start: float, end: float) -> NDArray[np.bool_]:
    """Which spans belong to a step: those that were launched in it."""
    if start == -np.inf:
        return np.ones(len(rank.spans), bool)
    return (rank.spans.origin >= start) & (rank.spans.origin < end)


def _timeline(
    rank: Analysed,
    total: Breakdown,
    spans: Spans,
    kinds: NDArray[np.int64],
    calls: Sequence[Call],
    phases: Sequence[events.Span],
) -> events.Timeline:
    """One step, which begins at 0."""
    begin = float(spans.start[0])
    computing, sending = (
        merge(spans.start[kinds == kind] - begin, spans.end[kinds == kind] - begin)
        for kind in (COMPUTATION, COMMUNICATION)
    )
    exposed: dict[str, float] = {}
    for name, start, end in phases:
        within = _clipped(sending, start, end)
        alone = length(*within) - common(within, _clipped(computing, start, end))
        if alone > 0:
            exposed[name] = exposed.get(name, 0.0) + alone
    kernels = kernels_of([(rank.profile, spans)])[:_MOST_STORED]
    return events.Timeline(
        t=0.0,
        rank=0,
        step=0,
        t0=0.0,
        seconds=total.span,
        phases=[*phases],
        comm=_numbered(calls[:_MOST_CALLS], begin, rank.profile.sampled),
        marks=[],
        busy=_fewer(*computing),
        exposed=exposed,
        device="cuda" if len(rank.profile.gpu) else "cpu",
        backend=_clean(rank.profile.backend or ""),
        left_out=max(0, len(calls) - _MOST_CALLS),
        computed=total.computation,
        copies=total.copies,
        idle=total.idle,
        kernels=[(_clean(kernel.name), kernel.count, kernel.seconds) for kernel in kernels],
    )


def _clipped(spans: tuple[Numbers, Numbers], start: float, end: float) -> tuple[Numbers, Numbers]:
    """The parts of merged intervals between two times."""
    inside = (spans[1] > start) & (spans[0] < end)
    return np.maximum(spans[0][inside], start), np.minimum(spans[1][inside], end)


def _fewer(start: Numbers, end: Numbers) -> list[tuple[float, float]]:
    """At most `_MOST` intervals: the shortest gaps between them count as part of them."""
    if len(start) > _MOST:
        gaps = start[1:] - end[:-1]
        kept = np.sort(np.argsort(gaps, kind="stable")[len(gaps) - _MOST + 1 :])
        start, end = start[np.concatenate(([0], kept + 1))], end[np.concatenate((kept, [len(end) - 1]))]
    return [*zip(start.tolist(), end.tolist())]


def _phases(rank: Analysed, spans: Spans, seconds: float, start: float, end: float) -> list[events.Span]:
    """The phases of a step, in seconds since its first kernel; one that is called other if they are not known."""
    begins = [] if rank.profile.sampled else sorted(_begins(rank, start, end))
    found: list[events.Span] = []
    for moment, name in begins:
        later = spans.start[spans.origin >= moment]
        if not len(later):
            break
        at = float(later.min() - spans.start[0])
        if found and found[-1][1] >= at:
            found.pop()
        if found and found[-1][0] == name:
            continue
        found.append((name, at, seconds))
    if not found:
        return [(_OTHER, 0.0, seconds)]
    ends = [at for _, at, _ in found[1:]] + [seconds]
    whole = [(name, at, last) for (name, at, _), last in zip(found, ends)]
    return [(_OTHER, 0.0, found[0][1]), *whole] if found[0][1] > 0 else whole


def _begins(rank: Analysed, start: float, end: float) -> Iterator[tuple[float, str]]:
    """When the CPU began each phase of a step; nothing if it did not train."""
    profile = rank.profile
    backward = [name.startswith("autograd::engine::evaluate_function") for name in profile.names] + [False] * 2
    chosen = np.array(backward)[profile.cpu.name] & (profile.cpu.start >= start) & (profile.cpu.start < end)
    if not chosen.any():
        return
    begun, ended = float(profile.cpu.start[chosen].min()), float(profile.cpu.end[chosen].max())
    yield start, "forward"
    yield begun, "backward"
    after = ended
    for name, first, last in profile.phases:
        if start <= first < end:
            yield first, name
            if name == "data" and last < begun:
                yield last, "forward"
            after = max(after, last)
    yield after, _OTHER


def _numbered(calls: Sequence[Call], begin: float, sampled: bool) -> list[events.Call]:
    """The calls, with their number in their group if the file has all of them."""
    counts: Counter[str] = Counter()
    found = []
    for call in calls:
        counts[call.group] += 1
        found.append(_call(call, begin, counts[call.group] if call.group and not sampled else None))
    return found


def _call(call: Call, begin: float, number: int | None) -> events.Call:
    op = operation(call.op)
    group, _, listed = call.group.partition(" ")
    ranks = [int(text) for text in re.findall(r"\d{1,8}", listed)] if re.fullmatch(r"\[[\d, ]*\]", listed) else []
    known = len(ranks) == call.ranks and all(rank < RANKS for rank in ranks)
    return events.Call(
        op=op,
        start=call.start - begin,
        end=call.end - begin,
        bytes=message_bytes(op, call) or None,
        group=_clean(group) or None,
        ranks=ranks if ranks and known else None,
        seq=number,
    )


def _traffic(calls: Sequence[Call]) -> dict[str, events.Operation]:
    """The traffic of a step, if the file has the bytes and the group of every call; otherwise empty."""
    found: dict[str, events.Operation] = {}
    for call in calls:
        op = operation(call.op)
        count = message_bytes(op, call)
        if op not in _RINGS or not count or call.ranks < 1:
            return {}
        before = found.get(op) or events.Operation(0.0, 0.0, 0.0)
        goes = before.sent + sent(op, count, call.ranks)
        found[op] = events.Operation(before.calls + 1, before.bytes + count, goes)
    return found


def _clean(text: str) -> str:
    """A text of a file as a run may hold it."""
    return text.replace("\0", "�")
