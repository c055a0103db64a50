"""Snapshots of CUDA memory (`torch.cuda.memory._dump_snapshot`, or `torch.cuda.memory._snapshot()` as JSON): which
lines hold the memory at its peak, what grows from iteration to iteration, how fragmented the segments are, and what
held the memory when it ran out. `memory_events.py` reads a file and follows its events.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from labkit.analysis.diagnose.finding import Finding
from labkit.analysis.foreign import Page, Table, numbered
from labkit.analysis.foreign.memory_events import (
    UNKNOWN,
    Device,
    Free,
    Growth,
    Held,
    Moment,
    OutOfMemory,
    Snapshot,
)
from labkit.common.units import counted, listed, ranks_in_words, significant, size
from labkit.record.events import Memory, MemoryStep, OfRank, Start
from labkit.record.writer import OWNERS

# ---- findings

_MOST_NAMED = 3  # lines in a sentence
_LEAST_APART = 256 << 20  # bytes between ranks, or between reserved and used memory, that are worth a finding
_EXPANDABLE = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the job starts"


@dataclass(frozen=True)
class Unit:
    """One device of one snapshot: `name` is its rank, if the file's name has it, or the name of the file; the number of
    the device if there is only one file."""

    name: str
    rank: int | None
    snapshot: Snapshot
    device: Device

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its rank, as a finding has it."""
        return () if self.rank is None else (self.rank,)


def _found(units: Sequence[Unit]) -> Iterator[Finding]:
    yield from _once((unit, unit.device.ooms[-1].line, _out_of_memory(unit)) for unit in units if unit.device.ooms)
    growing = [(unit, unit.device.growth) for unit in units if unit.device.growth]
    yield from _once((unit, growth.lines[0].line, _grows(unit, growth)) for unit, growth in growing)
    whole = [unit for unit in units if not any(oom.fragmented for oom in unit.device.ooms)]
    yield from _once((unit, "", finding) for unit in whole for finding in _reserved(unit))
    yield from _unequal([unit for unit in units if unit.device.history and unit.rank is not None])


def _once(found: Iterable[tuple[Unit, str, Finding]]) -> Iterator[Finding]:
    """The findings, but those of several ranks about one line as one, with the figures of the first rank."""
    alike: dict[tuple[str, str], list[tuple[Unit, Finding]]] = defaultdict(list)
    for unit, line, finding in found:
        alike[finding.name, line].append((unit, finding))
    for members in alike.values():
        (_, first), others = members[0], [unit for unit, _ in members[1:]]
        if others:
            evidence = f"{first.evidence}; the same happens on {_names(others)}"
            first = replace(first, evidence=evidence, ranks=tuple(rank for unit, _ in members for rank in unit.ranks))
        yield first


def _out_of_memory(unit: Unit) -> Finding:
    newest = unit.device.ooms[-1]
    if newest.fragmented and not _is_full_of(unit.device.growth, newest.moment):
        return _fragmented(unit, newest)
    return _full(unit, newest)


def _fragmented(unit: Unit, oom: OutOfMemory) -> Finding:
    moment, free = oom.moment, oom.moment.free or Free(0, 0, 0)
    return Finding(
        name="out_of_memory_fragmented",
        title=f"{unit.name} ran out of memory because of fragmentation ({oom.line}):"
        f" {size(oom.requested)} requested, {size(free.bytes + oom.device_free)} free, but not in one piece",
        evidence=f"{size(moment.reserved)} reserved: {size(moment.active)} in use and {size(free.bytes)} free in pieces"
        f" of at most {size(free.largest)}; {size(oom.device_free)} free on the device; in use: {_lines(moment.held)}",
        cause="the free pieces lie between blocks in use, so their segments cannot be returned to the device and used"
        " for a larger request",
        fix=f"{_EXPANDABLE}; allocate what lives long before what varies in size",
        ranks=unit.ranks,
    )


def _full(unit: Unit, oom: OutOfMemory) -> Finding:
    moment = oom.moment
    cause, fix = _held_by(moment, unit.device.growth)
    return Finding(
        name="out_of_memory",
        title=f"{unit.name} ran out of memory ({oom.line}): {size(oom.requested)} requested,"
        f" {size(oom.device_free)} free on the device",
        evidence=f"{size(moment.active)} in use of {size(moment.reserved)} reserved: {_lines(moment.held)}"
        + (
            f"; {counted(unit.device.oom_count, 'failed request')}, this was the last"
            if unit.device.oom_count > 1
            else ""
        ),
        cause=cause,
        fix=fix,
        ranks=unit.ranks,
    )


def _is_full_of(growth: Growth | None, moment: Moment) -> bool:
    """Whether what grows holds a large part of the memory in use."""
    return growth is not None and growth.bytes * growth.iterations > moment.active / 4


def _held_by(moment: Moment, growth: Growth | None) -> tuple[str, str]:
    """Cause and fix for memory that is full, by the phase that holds most of it."""
    if _is_full_of(growth, moment):
        return "every iteration keeps memory that none frees (see below)", "free it, as described below"
    phases = moment.phases
    activations = phases.get("forward", 0) + phases.get("recomputation", 0)
    state = sum(phases.get(phase, 0) for phase in ("model", "backward", "optimizer"))
    if activations > moment.active / 2:
        return (
            f"activations of the forward pass hold {activations / moment.active:.0%} of the memory in use",
            "use a smaller batch per rank and accumulate gradients, or recompute activations:"
            " torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        )
    if state > moment.active / 2:
        return (
            f"parameters, gradients and optimizer state hold {state / moment.active:.0%} of the memory in use",
            "shard them over more ranks: torch.distributed.fsdp.fully_shard",
        )
    line = moment.held[0].line if moment.held else UNKNOWN
    return (
        f"the memory in use leaves no room for the request; most of it: {line}",
        "delete (`del`) what was allocated there before more is requested, or allocate less there",
    )


def _grows(unit: Unit, growth: Growth) -> Finding:
    iterations = growth.iterations
    lines = [
        line._replace(bytes=line.bytes // iterations, blocks=-(-line.blocks // iterations)) for line in growth.lines
    ]
    forward = any(line.phase == "forward" for line in growth.lines)
    return Finding(
        name="memory_growth",
        kind="memory",
        title=f"memory of {unit.name} grows by {size(growth.bytes)} per iteration ({growth.lines[0].line})",
        evidence=f"in {counted(iterations, 'iteration')} of {growth.loop}, memory in use grew from"
        f" {size(growth.first)} to {size(growth.last)}; never freed, per iteration: {_lines(lines)}",
        cause="tensors of earlier iterations are still referenced: a list of losses or outputs keeps the graph of"
        " each, with all its activations"
        if forward
        else "tensors of earlier iterations are still referenced, such as by a list or a cache that is never emptied",
        fix="store numbers instead of tensors that have a graph: losses.append(loss.item()), or loss.detach()"
        if forward
        else "remove old entries, limit the size of the cache, or move what must be kept to the CPU",
        ranks=unit.ranks,
    )


def _reserved(unit: Unit) -> Iterator[Finding]:
    """A device whose allocator reserved far more than was ever in use, because what was free did not fit."""
    device, moment = unit.device, unit.device.split
    apart = device.reserved - device.peak.active
    if moment is None or moment.free is None or apart < max(_LEAST_APART, device.reserved / 5):
        return
    yield Finding(
        name="memory_fragmented",
        kind="memory",
        title=f"{unit.name} reserves {size(apart)} more than it ever uses",
        evidence=f"{size(device.reserved)} reserved, at most {size(device.peak.active)} in use at a time; when the most"
        f" was reserved, {size(moment.free.bytes)} was free, {size(moment.free.blocked)} of it between blocks in use",
        cause="free pieces were too small for the requests that followed, as with batches or sequences of varying"
        " length",
        fix=f"{_EXPANDABLE}; pad batches to a few fixed sizes",
        ranks=unit.ranks,
    )


def _unequal(units: Sequence[Unit]) -> Iterator[Finding]:
    """The rank with the highest and the one with the lowest peak, if they are far apart."""
    if len(units) < 2:
        return
    most, least = (choose(units, key=lambda unit: unit.device.peak.active) for choose in (max, min))
    high, low = most.device.peak, least.device.peak
    if high.active - low.active < max(_LEAST_APART, high.active / 5):
        return
    amounts = [{held.line: 0 for held in (*high.held, *low.held)} for _ in range(2)]
    for amount, moment in zip(amounts, (high, low)):
        for held in moment.held:
            amount[held.line] += held.bytes
    line = max(amounts[0], key=lambda line: amounts[0][line] - amounts[1][line])
    yield Finding(
        name="memory_differs_between_ranks",
        kind="memory",
        title=f"{most.name} uses {size(high.active)} at its peak, {least.name} only {size(low.active)}",
        evidence=f"the largest difference is at {line}: {size(amounts[0][line])} on {most.name},"
        f" {size(amounts[1][line])} on {least.name}",
        cause="the ranks do not hold the same: pipeline stages, shards or batches of different size, or data that only"
        " one rank loads or gathers",
        fix="balance the stages or batches; load checkpoints with torch.load(path, map_location='cpu'), and gather"
        " results on the CPU",
        ranks=(*most.ranks, *least.ranks),
    )


def _lines(held: Sequence[Held]) -> str:
    return ", ".join(f"{line.line} {size(line.bytes)}" for line in held[:_MOST_NAMED]) or "nothing"


# ---- the page

_MOST_ROWS = 16


def explain(snapshots: Sequence[Snapshot]) -> Page:
    """What the snapshots of one job say; several files are several ranks."""
    units = _units(snapshots)
    if not units:
        return Page(
            title=f"{counted(len(snapshots), 'memory snapshot')} without memory or events",
            findings=[],
            tables=[],
            notes=["Nothing was allocated on a GPU, or the snapshot is of a process without one."],
            figures={"kind": "memory_snapshot", "devices": []},
        )
    most = max(units, key=lambda unit: unit.device.peak.active)
    whose = f" of {most.name}" if len(units) > 1 else ""
    when = ("the peak" if most.device.history else "the end") + whose
    tables = [
        _table_of_units(units),
        _table_of_phases(most.device.peak, when),
        _table_of_lines(most.device.peak, when),
        _table_of_blocks(most.device.peak, when),
        _table_of_growth(units),
        _table_of_ooms(units),
        _table_of_pools(most.device, whose),
    ]
    return Page(
        title=_title(snapshots, units),
        findings=[*_found(units)],
        tables=[table for table in tables if table.rows],
        notes=[*_notes(units)],
        figures={"kind": "memory_snapshot", "devices": [*map(_figures, units)]},
        events=partial(_events, units),
    )


_OWNERS = {  # of the memory that was allocated in a phase
    "model": "parameters",
    "forward": "activations",
    "recomputation": "activations",
    "backward": "gradients",
    "optimizer": "optimizer",
    "communication": "communication",
}


def _events(units: Sequence[Unit]) -> Iterator[OfRank]:
    """The memory at the peak of each rank, by the owner that its phase suggests, as events of a run; of several devices
    of a rank, that with the highest peak."""
    fullest: dict[str | int, Unit] = {}
    for unit in units:
        key = unit.snapshot.path.name if unit.rank is None else unit.rank
        if key not in fullest or unit.device.peak.active > fullest[key].device.peak.active:
            fullest[key] = unit
    chosen = [*fullest.values()]
    ranks = numbered([unit.rank for unit in chosen], [unit.snapshot.path.name for unit in chosen])
    for rank, unit in zip(ranks, chosen):
        peak = unit.device.peak
        owners = dict.fromkeys(OWNERS, 0.0)
        for phase, held in peak.phases.items():
            owners[_OWNERS.get(phase, "other")] += held
        yield Start(t=0.0, rank=rank, device=f"cuda:{unit.device.index}", steady=True)
        yield Memory(t=0.0, rank=rank, owners=owners)
        yield MemoryStep(
            t=0.0,
            rank=rank,
            step=0,
            t0=0.0,
            seconds=0.0,
            phases=[],
            times=[0.0],
            owners={owner: [held] for owner, held in owners.items()},
            peak=peak.active,
            at_peak=owners,
        )


def _units(snapshots: Sequence[Snapshot]) -> list[Unit]:
    """The devices of all files by rank. Numbers at the end of the names are ranks if they are 0, 1, 2 and so on."""
    ranks = [snapshot.rank for snapshot in snapshots]
    if None in ranks and len(snapshots) > 1:
        ends = [re.search(r"(\d{1,6})\.\w+(?:\.gz)?$", snapshot.path.name) for snapshot in snapshots]
        numbers = [int(end[1]) for end in ends if end]
        if sorted(numbers) == [*range(len(snapshots))]:
            ranks = [*numbers]
    if None in ranks or len(set(ranks)) < len(ranks):
        ranks = [None] * len(snapshots)
    units = []
    names = Counter(snapshot.path.name for snapshot in snapshots)
    for rank, snapshot in zip(ranks, snapshots):
        path = snapshot.path
        file = path.name if names[path.name] == 1 else f"{path.parent.name}/{path.name}"
        for device in snapshot.devices:
            name = file if rank is None else f"rank {rank}"
            if rank is None and len(snapshots) == 1:
                name = f"device {device.index}"
            elif len(snapshot.devices) > 1:
                name += f", device {device.index}"
            units.append(Unit(name, rank, snapshot, device))
    return sorted(units, key=lambda unit: -1 if unit.rank is None else unit.rank)


def _title(snapshots: Sequence[Snapshot], units: Sequence[Unit]) -> str:
    parts = [counted(len(snapshots), "memory snapshot")]
    ranks = sorted({unit.rank for unit in units if unit.rank is not None})
    if ranks:
        parts.append(ranks_in_words(ranks))
    devices = sorted({unit.device.index for unit in units})
    parts.append(("device " if len(devices) == 1 else "devices ") + ", ".join(map(str, devices)))
    peaks = sorted(unit.device.peak.active for unit in units)
    between = " to ".join(dict.fromkeys((size(peaks[0]), size(peaks[-1]))))
    parts.append(("peak " if all(unit.device.history for unit in units) else "in use ") + between)
    parts.append(f"reserved {size(max(unit.device.reserved for unit in units))}")
    settings = sorted({unit.snapshot.settings for unit in units if unit.snapshot.settings})
    return " · ".join([*parts, *settings])


def _table_of_units(units: Sequence[Unit]) -> Table:
    rows = []
    for unit in units[: 4 * _MOST_ROWS]:
        device = unit.device
        allocated, free = (
            sum(amounts) for amounts in zip(*((pool.allocated, pool.free.bytes) for pool in device.pools), (0, 0))
        )
        rows.append(
            (
                unit.name,
                size(device.peak.active) if device.history else "–",
                size(device.reserved),
                size(allocated),
                size(free),
                device.peak.held[0].line if device.peak.held else "–",
            )
        )
    heads = (_first_head(units), "peak", "reserved", "allocated at the end", "free at the end")
    return Table("Memory", (*heads, "largest line at the peak"), tuple(rows), ("largest line at the peak",))


def _first_head(units: Sequence[Unit]) -> str:
    if units[0].rank is not None:
        return "rank"
    return "file" if len({unit.snapshot.path for unit in units}) > 1 else "device"


def _share(part: int, whole: int) -> str:
    if not whole:
        return "–"
    return "<1%" if 0 < part < whole / 200 else f"{part / whole:.0%}"


def _table_of_phases(peak: Moment, when: str) -> Table:
    rows = [(phase or "not known", size(held), _share(held, peak.active)) for phase, held in peak.phases.items()]
    title, heads = f"Memory at {when}, by the phase that allocated it", ("phase", "memory", "share")
    return Table(title, heads, tuple(rows) if len(rows) > 1 else ())


def _table_of_lines(peak: Moment, when: str) -> Table:
    rows = [
        (held.line, held.phase or "–", size(held.bytes), _share(held.bytes, peak.active), f"{held.blocks:,}")
        for held in peak.held[:_MOST_ROWS]
    ]
    heads = ("line", "phase", "memory", "share", "blocks")
    return Table(f"Memory at {when}, by line", heads, tuple(rows), ("phase",))


def _table_of_blocks(peak: Moment, when: str) -> Table:
    rows = [(block.line, block.phase or "–", size(block.bytes), f"{block.blocks:,}") for block in peak.largest]
    return Table(f"Largest blocks at {when}", ("line", "phase", "each", "blocks"), tuple(rows), ("phase",))


def _table_of_growth(units: Sequence[Unit]) -> Table:
    rows = [
        (
            unit.name,
            line.line,
            line.phase or "–",
            size(line.bytes / growth.iterations),
            significant(line.blocks / growth.iterations),
        )
        for unit in units
        if (growth := unit.device.growth)
        for line in growth.lines[:_MOST_ROWS]
    ]
    heads = (_first_head(units), "line", "phase", "per iteration", "blocks per iteration")
    return Table("Memory that is not freed", heads, tuple(rows[: 2 * _MOST_ROWS]), ("line", "phase"))


def _table_of_ooms(units: Sequence[Unit]) -> Table:
    rows = [
        (
            unit.name,
            oom.line,
            size(oom.requested),
            size(oom.device_free),
            size(oom.moment.active),
            size(oom.moment.reserved),
            size(oom.moment.free.bytes) if oom.moment.free else "–",
            size(oom.moment.free.largest) if oom.moment.free else "–",
        )
        for unit in units
        for oom in unit.device.ooms
    ]
    heads = ("requested", "free on the device", "in use", "reserved", "free in segments", "largest piece")
    return Table("Requests that failed", (_first_head(units), "line", *heads), tuple(rows[: 2 * _MOST_ROWS]), ("line",))


def _table_of_pools(device: Device, whose: str) -> Table:
    rows = [
        (
            pool.name,
            f"{pool.segments:,}",
            size(pool.reserved),
            size(pool.allocated),
            size(pool.free.bytes),
            size(pool.free.blocked),
            size(pool.free.largest),
        )
        for pool in device.pools[:_MOST_ROWS]
    ]
    heads = ("pool", "segments", "reserved", "allocated", "free", "free between blocks in use", "largest free block")
    return Table(f"Segments at the end{whose}, by pool", heads, tuple(rows))


def _notes(units: Sequence[Unit]) -> Iterator[str]:
    without = [unit for unit in units if unit.device.history is None]
    if without:
        yield (
            f"The history of {_names(without)} is not recorded, so what is shown is the memory at the end, not at the"
            " peak: call torch.cuda.memory._record_memory_history() before the model is built."
        )
    histories = [(unit, unit.device.history) for unit in units if unit.device.history is not None]
    overwritten = [unit for unit, history in histories if history.overwritten]
    if overwritten:
        yield (
            f"The history of {_names(overwritten)} has lost its beginning, so an earlier peak is not known:"
            " set a larger max_entries in _record_memory_history."
        )
    late = [history.before for unit, history in histories if history.before and not history.overwritten]
    if late:
        yield (
            f"Up to {size(max(late))} was allocated before the history begins, so its lines are not known: call"
            " _record_memory_history() before the model is built."
        )
    contradicting = [unit for unit, history in histories if history.unmatched > history.events / 100]
    if contradicting:
        yield (
            f"The history of {_names(contradicting)} lacks events (skip_actions, or recording was interrupted), so its"
            " peak may be wrong."
        )
    if any(not history.stacks for _, history in histories):
        yield "No stacks are recorded, so lines are not known: record with context='alloc'."
    elif any(_of_line(unit.device.peak, UNKNOWN) > unit.device.peak.active / 20 for unit, _ in histories):
        yield (
            f"Memory with {UNKNOWN} was allocated by threads of C++, usually by the backward pass; record with"
            " stacks='all' to see its operators."
        )
    if any(unit.device.expandable for unit in units):
        yield "Segments are expandable, so fragmentation is not examined."


def _of_line(moment: Moment, line: str) -> int:
    return sum(held.bytes for held in moment.held if held.line == line)


def _names(units: Sequence[Unit]) -> str:
    return listed([unit.name for unit in units], 8)


_MOST_FIGURES = 200


def _figures(unit: Unit) -> dict[str, Any]:
    device, history, growth = unit.device, unit.device.history, unit.device.growth
    return {
        "file": str(unit.snapshot.path),
        "rank": unit.rank,
        "device": device.index,
        "settings": unit.snapshot.settings or None,
        "history": asdict(history) if history else None,
        "peak": device.peak.active if history else None,
        "reserved": device.reserved,
        "at_peak": _held_figures(device.peak.held) if history else None,
        "end": device.end.active,
        "at_end": _held_figures(device.end.held),
        "pools": [{**pool._asdict(), "free": pool.free._asdict()} for pool in device.pools],
        "ooms": [
            {
                "requested": oom.requested,
                "device_free": oom.device_free,
                "line": oom.line,
                "active": oom.moment.active,
                "reserved": oom.moment.reserved,
                "free": oom.moment.free._asdict() if oom.moment.free else None,
                "fragmented": oom.fragmented,
                "held": _held_figures(oom.moment.held),
            }
            for oom in device.ooms
        ],
        "growth": growth._asdict() | {"per_iteration": growth.bytes, "lines": _held_figures(growth.lines)}
        if growth
        else None,
    }


def _held_figures(held: Iterable[Held]) -> list[dict[str, Any]]:
    return [line._asdict() for line in list(held)[:_MOST_FIGURES]]
