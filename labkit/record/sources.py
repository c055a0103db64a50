"""Which ranks read the same samples, so that each sample counts once in samples per second.

The lab's own strategies say so. For any other script it is inferred from what the probe saw in the first steps of each rank: digests of
what the model was called with, and of the batches from a loader. Ranks in which both are the same read the same samples, as under tensor
parallelism; a rank whose model is called with activations is a later stage of a pipeline and reads none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from labkit.record.columns import RankState

_ENOUGH = 2  # steps that must agree: in one step, ranks may be the same by chance, such as in a warm-up with zeros


def inferred(ranks: Mapping[int, RankState]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Of a script that is not the lab's: the groups of ranks (of two or more) that read the same samples, and the later pipeline stages."""
    inputs = {number: _digests(rank, "input") for number, rank in sorted(ranks.items())}
    later = tuple(number for number, seen in inputs.items() if seen and not any(seen.values()))
    first = {number: seen for number, seen in inputs.items() if number not in later and any(seen.values())}
    if not first:
        return [], ()  # nobody reads samples that can be seen: activations then do not tell the stages apart
    steps = set.intersection(*(set(seen) for seen in first.values()))
    if len(steps) < _ENOUGH:
        return [], later
    groups: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for number, seen in first.items():
        groups[tuple(seen[step] for step in sorted(steps))].append(number)
    return [part for numbers in groups.values() for part in _by_batches(ranks, numbers) if len(part) > 1], later


def inferred_note(ranks: Mapping[int, RankState]) -> str:
    """What was inferred, in words; empty where every rank reads samples of its own."""
    same, later = inferred(ranks)
    parts = [f"{_named(numbers)} read the same samples, so each sample counts once" for numbers in same]
    if later:
        parts.append(f"{_named(later)} {'receive' if len(later) > 1 else 'receives'} activations, so no samples count there")
    return f"samples/s inferred from the first batches: {'; '.join(parts)}" if parts else ""


def _named(ranks: tuple[int, ...]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _by_batches(ranks: Mapping[int, RankState], numbers: list[int]) -> list[tuple[int, ...]]:
    """Ranks whose models have the same inputs, apart by what their loaders gave; a rank without a loader is given its batches."""
    batches = {number: _digests(ranks[number], "batch") for number in numbers}
    steps = set.intersection(*(set(seen) for seen in batches.values() if seen)) if any(batches.values()) else set()
    parts: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for number in (number for number in numbers if batches[number]):
        parts[tuple(batches[number][step] for step in sorted(steps))].append(number)
    given = [number for number in numbers if not batches[number]]
    if len(parts) > 1:
        return [tuple(part) for part in parts.values()]
    return [tuple(sorted([*next(iter(parts.values()), []), *given]))]


def _digests(rank: RankState, what: str) -> dict[int, str | None]:
    return {one["step"]: one["digest"] for one in rank.seen(what)}
