"""What changed between two runs of the same job, from their profiled steps: which part of a step, on which rank, in
which step, and which collectives and kernels take longer or shorter. Of two runs made from dumps of the flight
recorder, which collectives take longer or shorter, and from which call on they are others.

Times are means over the typical profiled steps (`profiled.usual`) of the ranks that both runs have, in seconds per step
and rank. Kernels are known only for runs that were made from profiles (`labkit explain --keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from typing import Any, TypeAlias

import msgspec

from labkit.analysis.diagnose.finding import shorter
from labkit.analysis.foreign import Table
from labkit.analysis.foreign.trace import short_name
from labkit.analysis.metrics import median, step_times
from labkit.analysis.profiled import parts, usual
from labkit.common.units import counted, milliseconds
from labkit.record.events import Call, Timeline
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState

STEP = "step"
_MOST = 10  # rows of a table
_LEAST = 0.01  # share of a step from which parts explain its change
_LEAST_CHANGE = 0.001  # share of a time from which it is another one


@dataclass(frozen=True)
class Change:
    """Seconds per step of one thing in both runs, and how often it happened per step, if it is counted."""

    name: str
    before: float
    after: float
    count_before: float | None = None
    count_after: float | None = None

    @property
    def seconds(self) -> float:
        """By how much it takes longer; negative if it takes shorter."""
        return self.after - self.before

    @property
    def is_one(self) -> bool:
        """Whether it takes longer or shorter by more than a tenth of a percent."""
        return abs(self.seconds) > _LEAST_CHANGE * max(self.before, self.after)

    @property
    def words(self) -> str:
        """`+12.3 ms (+6 %)`."""
        if not self.is_one:
            return "none"
        share = f" ({100 * self.seconds / self.before:+.0f} %)" if self.before else ""
        return f"{'-' if self.seconds < 0 else '+'}{milliseconds(abs(self.seconds))}{share}"


@dataclass(frozen=True)
class Changes:
    """The names of two runs, the ranks that both have profiled steps of, and what changed: `parts` of a step, the whole
    step first; the step of each rank; steps that have the same number; collectives and kernels, those that changed most
    first. `of_rank` is the part that changed most on each rank, if parts are known; `what` are the steps."""

    before: str
    after: str
    ranks: Sequence[int]
    parts: Sequence[Change]
    by_rank: Sequence[Change]
    of_rank: Mapping[int, Change]
    steps: Sequence[Change]
    collectives: Sequence[Change]
    kernels: Sequence[Change]
    what: str = "profiled step"

    @property
    def sentence(self) -> str:
        """What changed, in words."""
        whole, *rest = self.parts
        said = f"A {self.what} takes {milliseconds(whole.after)} in {self.after}"
        said += f" and {milliseconds(whole.before)} in {self.before}: {whole.words}. "
        if abs(whole.seconds) < _LEAST * max(whole.before, whole.after):
            return f"{said}No part of it explains more than that." if rest else said.rstrip()
        part = _most(rest) if rest else None
        said += f"Most of it is {part.name}: {part.words}" if part else "Of what it consists is not in these files"
        if len(self.by_rank) > 1:
            rank = _most(self.by_rank)
            said += f"; the step changed most on {rank.name}: {rank.words}"
        rows = self.kernels or self.collectives
        if rows and rows[0].seconds * whole.seconds > 0:
            said += f"; {shorter(short_name(rows[0].name), 60)}: {rows[0].words}"
        return f"{said}."

    @property
    def tables(self) -> list[Table]:
        """The changes as tables."""
        ranks = counted(len(self.ranks), "rank")
        found = [_table(f"A profiled step, mean of {ranks}", "part", self.parts if len(self.parts) > 1 else ())]
        if len(self.ranks) > 1 and not self.of_rank:
            found.append(_table("The step of each rank, median", "rank", self.by_rank))
        elif len(self.ranks) > 1:
            rows = [(*_cells(change), self.of_rank[rank].name) for rank, change in zip(self.ranks, self.by_rank)]
            heads = ("rank", "before", "after", "change", "mostly in")
            found.append(Table("The step of each rank", heads, tuple(rows[:_MOST]), words=("mostly in",)))
        if len(self.steps) > 1:
            found.append(_table(f"Each step, mean of {ranks}", "step", self.steps))
        found.append(_table("Collectives, per step and rank; includes waiting", "collective", self.collectives))
        found.append(_table("Kernels that changed most, per step and rank", "kernel", self.kernels))
        return [table for table in found if table.rows]

    def to_json(self) -> dict[str, Any]:
        """As plain values, in seconds per step."""
        lists = {name: _plain(getattr(self, name)) for name in ("parts", "by_rank", "steps", "collectives", "kernels")}
        return {"before": self.before, "after": self.after, "ranks": [*self.ranks], "sentence": self.sentence} | lists


@dataclass(frozen=True)
class CallChanges:
    """What changed between the collectives that two jobs had recorded when they were dumped, on the `ranks` that both
    have. `operations` are seconds from the call to its end, by operation and group, and `single` those of calls with
    the same number in their group, both without calls that did not end, those that changed most first. `gap` is from
    one call of a rank to its next one. `moved` says which call is the first to be another one, empty if none is."""

    before: str
    after: str
    ranks: Sequence[int]
    operations: Sequence[Change]
    single: Sequence[Change]
    gap: Change
    moved: str

    @property
    def sentence(self) -> str:
        """What changed, in words."""
        said = f"From one collective to the next, a rank takes {milliseconds(self.gap.after)} in {self.after}"
        said += f" and {milliseconds(self.gap.before)} in {self.before}: {self.gap.words}. "
        both = [change for change in self.operations if change.before and change.after]
        if both:
            said += f"From its call to its end, {both[0].name} changed most: {both[0].words}. "
        elif not any(change.before or change.after for change in self.operations):
            said += "When calls ended is not in these dumps. "
        return said + (self.moved or "Calls with the same number are of the same operation in both.")

    @property
    def tables(self) -> list[Table]:
        """The changes as tables."""
        ranks = counted(len(self.ranks), "rank")
        found = [
            _table(f"Collectives from call to end, mean of {ranks}; includes waiting", "collective", self.operations),
            _table(f"The calls that changed most, mean of {ranks}", "call", self.single),
        ]
        return [table for table in found if table.rows]

    def to_json(self) -> dict[str, Any]:
        """As plain values, in seconds."""
        lists = {"operations": _plain(self.operations), "calls": _plain(self.single), "gap": _plain([self.gap])}
        return {"before": self.before, "after": self.after, "ranks": [*self.ranks], "sentence": self.sentence} | lists


@dataclass(frozen=True)
class NotCompared:
    """Why it is not known what changed between two runs made from files of other jobs."""

    before: str
    after: str
    why: str

    @property
    def sentence(self) -> str:
        """Why, in words."""
        return f"What changed from {self.before} to {self.after} is not known: {self.why}."

    @property
    def tables(self) -> list[Table]:
        """None."""
        return []

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"before": self.before, "after": self.after, "sentence": self.sentence}


def _plain(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [asdict(change) | {"change": change.seconds} for change in changes]


Difference: TypeAlias = "Changes | CallChanges | NotCompared"


def of_folders(before: RunFolder, after: RunFolder) -> Difference | None:
    """What changed between two recorded runs, see `changes`."""
    followers = Follower(before), Follower(after)
    for follower in followers:
        follower.poll()
    old, new = (follower.state for follower in followers)
    names = [name_of(old, before.name), name_of(new, after.name)]
    names = names if len(set(names)) == 2 else [before.name, after.name]
    return changes(names[0], old, names[1], new)


def name_of(state: RunState, run: str) -> str:
    """What a run without a strategy is called: an imported one by the name that it was given."""
    return state.spec.script if state.imported and state.spec.script else run


def changes(before: str, old: RunState, after: str, new: RunState) -> Difference | None:
    """What changed from one run to another. If they are not of the same kind of job (script or strategy, and number of
    ranks), or have recorded no steps or calls of the same ranks, None, and of two imported runs why."""
    imported = bool(old.imported and new.imported)
    if (old.spec.strategy, old.world_size) != (new.spec.strategy, new.world_size):
        sizes = f"one is of {counted(old.world_size, 'rank')} and the other one of {new.world_size}"
        return NotCompared(before, after, sizes) if imported else None
    ranks = [number for number in old.ranks if number in new.ranks]
    ranks = [number for number in ranks if usual(old.ranks[number]) and usual(new.ranks[number])]
    if ranks:
        return _step_changes(before, old, after, new, ranks)
    ranks = [number for number in old.ranks if _calls_of(old, number) and _calls_of(new, number)]
    if ranks:
        return _call_changes(before, old, after, new, ranks)
    ranks = [number for number in old.ranks if imported and _timed(old, number) and _timed(new, number)]
    if ranks:
        return _logged_changes(before, old, after, new, ranks)
    why = "no rank has profiled steps, collectives or times of steps in both; name files of the same kind of both jobs"
    return NotCompared(before, after, why) if imported else None


def _step_changes(before: str, old: RunState, after: str, new: RunState, ranks: Sequence[int]) -> Changes:
    of_old, of_new = ({rank: usual(state.ranks[rank]) for rank in ranks} for state in (old, new))
    by_rank = {rank: _compared(_parts, of_old[rank], of_new[rank]) for rank in ranks}
    all_old, all_new = ([*chain.from_iterable(of_run.values())] for of_run in (of_old, of_new))
    numbers = sorted({timeline.step for timeline in all_old} & {timeline.step for timeline in all_new})
    steps = []
    for number in numbers:
        then, now = (
            [timeline for timeline in timelines if timeline.step == number] for timelines in (all_old, all_new)
        )
        whole, *_ = _compared(_parts, then, now)
        steps.append(replace(whole, name=str(number)))
    return Changes(
        before=before,
        after=after,
        ranks=ranks,
        parts=_compared(_parts, all_old, all_new),
        by_rank=[Change(f"rank {rank}", found[0].before, found[0].after) for rank, found in by_rank.items()],
        of_rank={rank: _most(found[1:]) for rank, found in by_rank.items()},
        steps=steps,
        collectives=_sorted(_compared(_collectives, all_old, all_new)),
        kernels=[change for change in _sorted(_known_kernels(all_old, all_new)) if change.is_one],
    )


def _logged_changes(before: str, old: RunState, after: str, new: RunState, ranks: Sequence[int]) -> Changes:
    """Of steps whose time alone is known, the median."""
    by_rank = {rank: (_timed(old, rank), _timed(new, rank)) for rank in ranks}
    both = [[seconds for sides in by_rank.values() for seconds in sides[side].values()] for side in (0, 1)]
    steps = []
    for number in sorted(set.intersection(*({*side} for sides in by_rank.values() for side in sides))):
        times = [sum(sides[side][number] for sides in by_rank.values()) / len(ranks) for side in (0, 1)]
        steps.append(Change(str(number), *times))
    return Changes(
        before=before,
        after=after,
        ranks=ranks,
        parts=[Change(STEP, median(both[0]), median(both[1]))],
        by_rank=[
            Change(f"rank {rank}", median(then.values()), median(now.values())) for rank, (then, now) in by_rank.items()
        ],
        of_rank={},
        steps=[change for change in _sorted(steps)[:_MOST] if change.is_one],
        collectives=[],
        kernels=[],
        what="step",
    )


def _timed(state: RunState, number: int) -> dict[int, float]:
    """By its number the seconds of each step of a rank, if they are known."""
    rank = state.ranks.get(number)
    columns = zip(rank.steps.step[:], step_times(rank, slice(None))) if rank else ()
    return {int(step): float(seconds) for step, seconds in columns if seconds > 0}


def _call_changes(before: str, old: RunState, after: str, new: RunState, ranks: Sequence[int]) -> CallChanges:
    by_rank = {rank: (_calls_of(old, rank), _calls_of(new, rank)) for rank in ranks}
    then, now = (  # those that have ended, and of which the dump says when
        [call for sides in by_rank.values() for call in sides[side] if call.end > call.start] for side in (0, 1)
    )
    gaps = [median(gap for sides in by_rank.values() for gap in _gaps(sides[side])) for side in (0, 1)]
    single = _means_of_calls(then, now, _numbered, 1)
    return CallChanges(
        before=before,
        after=after,
        ranks=ranks,
        operations=_sorted(_means_of_calls(then, now, lambda call: f"{call.op} in {call.group}", len(ranks))),
        single=[change for change in _sorted(single) if change.before and change.after and change.is_one],
        gap=Change("gap", *gaps),
        moved=_moved(before, after, by_rank),
    )


def _calls_of(state: RunState, number: int) -> list[Call]:
    """The calls that a dump of this rank has, without times that reach its end because they did not end."""
    rank = state.ranks.get(number)
    dumps = [timeline for timeline in rank.timelines.values() if timeline.calls_only] if rank else []
    return [
        msgspec.structs.replace(call, end=call.start) if call.end >= dump.seconds else call
        for dump in dumps
        for call in dump.comm
    ]


def _gaps(calls: Sequence[Call]) -> list[float]:
    """Seconds from each call of a rank to its next one."""
    starts = sorted(call.start for call in calls)
    return [later - earlier for earlier, later in pairwise(starts)]


def _numbered(call: Call) -> str:
    return f"{call.op} #{call.seq} in {call.group}"


def _means_of_calls(
    then: Iterable[Call], now: Iterable[Call], named: Callable[[Call], str], ranks: int
) -> list[Change]:
    """By name, the mean seconds of some calls of both runs, and how many there are for each of `ranks`."""
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    for side, calls in enumerate((then, now)):
        for call in calls:
            seconds.setdefault(named(call), ([], []))[side].append(call.end - call.start)
    means = {name: [sum(those) / max(1, len(those)) for those in sides] for name, sides in seconds.items()}
    return [Change(name, *means[name], *(len(those) / ranks for those in seconds[name])) for name in seconds]


def _moved(before: str, after: str, by_rank: Mapping[int, tuple[Sequence[Call], Sequence[Call]]]) -> str:
    """Which call is the first to be another operation than the one with its number in the other run."""
    found: list[tuple[float, int, Call, Call]] = []
    alike = False
    for rank, sides in by_rank.items():
        then, now = ({(call.group, *(call.ranks or ()), call.seq): call for call in calls} for calls in sides)
        both = [(then[key], now[key]) for key in then if key in now and key[-1] is not None]
        alike = alike or bool(both)
        found += [(earlier.start, rank, earlier, later) for earlier, later in both if earlier.op != later.op][:1]
    if not alike:
        return "No call has the same number in both, so calls are not compared one by one."
    if not found:
        return ""
    _, rank, earlier, later = min(found, key=lambda row: row[:2])
    return (
        f"The first call that is another one is {_numbered(earlier)}, in whose place rank {rank} calls {later.op} in"
        f" {after}: from there on, {before} and {after} do not do the same."
    )


_Measured = Mapping[str, tuple[float, float]]  # by name: seconds, and how often


def _parts(timeline: Timeline) -> _Measured:
    return {name: (seconds, 0.0) for name, seconds in {STEP: timeline.seconds, **parts(timeline)}.items()}


def _collectives(timeline: Timeline) -> _Measured:
    found: dict[str, tuple[float, float]] = {}
    for call in timeline.comm:
        seconds, count = found.get(call.op, (0.0, 0.0))
        found[call.op] = seconds + call.end - call.start, count + 1
    return found


def _kernels(timeline: Timeline) -> _Measured:
    return {name: (seconds, float(count)) for name, count, seconds in timeline.kernels}


def _known_kernels(old: Sequence[Timeline], new: Sequence[Timeline]) -> list[Change]:
    """The kernels of both runs, if both know them. A run has those that take longest: of one that only one run has, it
    is not known how long it took in the other, unless the other one has fewer than that."""
    if not all(timeline.kernels for timeline in (*old, *new)):
        return []
    full = max(len(timeline.kernels) for timeline in (*old, *new))
    old_is_cut, new_is_cut = (any(len(timeline.kernels) == full for timeline in side) for side in (old, new))
    return [
        change
        for change in _compared(_kernels, old, new)
        if (change.before or not old_is_cut) and (change.after or not new_is_cut)
    ]


def _compared(
    measure: Callable[[Timeline], _Measured], old: Iterable[Timeline], new: Iterable[Timeline]
) -> list[Change]:
    """The means of what is measured in some steps of both runs."""
    means = [_mean([measure(timeline) for timeline in steps]) for steps in (old, new)]
    nothing = (0.0, 0.0)
    found = []
    for key in dict.fromkeys([*means[0], *means[1]]):
        (before, count_before), (after, count_after) = (mean.get(key, nothing) for mean in means)
        counts = (count_before, count_after) if count_before or count_after else (None, None)
        found.append(Change(key, before, after, *counts))
    return found


def _mean(measured: Sequence[_Measured]) -> dict[str, tuple[float, float]]:
    means = {}
    for name in dict.fromkeys(name for those in measured for name in those):
        seconds, counts = zip(*(those.get(name, (0.0, 0.0)) for those in measured))
        means[name] = sum(seconds) / len(measured), sum(counts) / len(measured)
    return means


def _most(found: Sequence[Change]) -> Change:
    return max(found, key=lambda change: abs(change.seconds))


def _sorted(found: Sequence[Change]) -> list[Change]:
    return sorted(found, key=lambda change: -abs(change.seconds))


def _table(title: str, what: str, found: Sequence[Change]) -> Table:
    counts = any(change.count_before is not None for change in found)
    heads = (what, "before", "after", "change", *(("count",) if counts else ()))
    rows = [(*_cells(change), *((_counts(change),) if counts else ())) for change in found[:_MOST]]
    return Table(title, heads, tuple(rows))


def _cells(change: Change) -> tuple[str, ...]:
    name = shorter(short_name(change.name), 44)
    return name, milliseconds(change.before), milliseconds(change.after), change.words


def _counts(change: Change) -> str:
    before, after = f"{change.count_before or 0:,.4g}", f"{change.count_after or 0:,.4g}"
    return before if before == after else f"{before} → {after}"
