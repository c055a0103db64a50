"""What changed between two runs of the same job, from their profiled steps: which part of a step, on which rank, in
which step, and which collectives and kernels take longer or shorter.

Times are means over the typical profiled steps (`profiled.usual`) of the ranks that both runs have, in seconds per step
and rank. Kernels are known only for runs that were made from profiles (`labkit explain --keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from labkit.analysis.diagnose.finding import shorter
from labkit.analysis.foreign.breakdown import short_name
from labkit.analysis.foreign.page import Table
from labkit.analysis.profiled import parts, usual
from labkit.common.units import counted, milliseconds
from labkit.record.events import Timeline
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
    first. `of_rank` is the part that changed most on each rank."""

    before: str
    after: str
    ranks: Sequence[int]
    parts: Sequence[Change]
    by_rank: Sequence[Change]
    of_rank: Mapping[int, Change]
    steps: Sequence[Change]
    collectives: Sequence[Change]
    kernels: Sequence[Change]

    @property
    def sentence(self) -> str:
        """What changed, in words."""
        whole, *rest = self.parts
        said = f"A profiled step takes {milliseconds(whole.after)} in {self.after}"
        said += f" and {milliseconds(whole.before)} in {self.before}: {whole.words}. "
        if abs(whole.seconds) < _LEAST * max(whole.before, whole.after):
            return f"{said}No part of it explains more than that."
        part = _most(rest)
        said += f"Most of it is {part.name}: {part.words}"
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
        found = [_table(f"A profiled step, mean of {ranks}", "part", self.parts)]
        if len(self.ranks) > 1:
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
        lists = {
            name: [asdict(change) | {"change": change.seconds} for change in getattr(self, name)]
            for name in ("parts", "by_rank", "steps", "collectives", "kernels")
        }
        return {"before": self.before, "after": self.after, "ranks": [*self.ranks], "sentence": self.sentence} | lists


def of_folders(before: RunFolder, after: RunFolder) -> Changes | None:
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


def changes(before: str, old: RunState, after: str, new: RunState) -> Changes | None:
    """What changed from one run to another; None if they are not of the same kind of job (script or strategy, and
    number of ranks), or have no profiled steps of the same ranks."""
    if (old.spec.strategy, old.world_size) != (new.spec.strategy, new.world_size):
        return None
    ranks = [number for number, rank in old.ranks.items() if usual(rank) and _has_timelines(new, number)]
    if not ranks:
        return None
    of_old, of_new = ({rank: usual(state.ranks[rank]) for rank in ranks} for state in (old, new))
    by_rank = {rank: _compared(_parts, of_old[rank], of_new[rank]) for rank in ranks}
    all_old, all_new = ([one for timelines in of_run.values() for one in timelines] for of_run in (of_old, of_new))
    numbers = sorted({one.step for one in all_old} & {one.step for one in all_new})
    steps = []
    for number in numbers:
        then, now = ([one for one in timelines if one.step == number] for timelines in (all_old, all_new))
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


def _has_timelines(state: RunState, number: int) -> bool:
    return number in state.ranks and bool(usual(state.ranks[number]))


_Measured = Mapping[str, tuple[float, float]]  # by name: seconds, and how often


def _parts(one: Timeline) -> _Measured:
    return {name: (seconds, 0.0) for name, seconds in {STEP: one.seconds, **parts(one)}.items()}


def _collectives(one: Timeline) -> _Measured:
    found: dict[str, tuple[float, float]] = {}
    for call in one.comm:
        seconds, count = found.get(call.op, (0.0, 0.0))
        found[call.op] = seconds + call.end - call.start, count + 1
    return found


def _kernels(one: Timeline) -> _Measured:
    return {name: (seconds, float(count)) for name, count, seconds in one.kernels}


def _known_kernels(old: Sequence[Timeline], new: Sequence[Timeline]) -> list[Change]:
    """The kernels of both runs, if both know them. A run has those that take longest: of one that only one run has, it
    is not known how long it took in the other, unless the other one has fewer than that."""
    if not all(one.kernels for one in (*old, *new)):
        return []
    full = max(len(one.kernels) for one in (*old, *new))
    is_cut = {side: any(len(one.kernels) == full for one in side_of) for side, side_of in (("old", old), ("new", new))}
    return [
        change
        for change in _compared(_kernels, old, new)
        if (change.before or not is_cut["old"]) and (change.after or not is_cut["new"])
    ]


def _compared(
    measure: Callable[[Timeline], _Measured], old: Iterable[Timeline], new: Iterable[Timeline]
) -> list[Change]:
    """The means of what is measured in some steps of both runs."""
    means = [_mean([measure(one) for one in steps]) for steps in (old, new)]
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
