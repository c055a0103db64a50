"""Which ranks read the same samples, so that each sample counts once in samples per second.

It is known for the lab's own strategies. For any other script it is inferred from what the probe recorded in the first
steps of each rank: digests of the model's inputs and of the batches from a data loader. Ranks with the same digests of
both read the same samples, as under tensor parallelism; a rank whose model is called with activations is a later
pipeline stage and reads no samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from labkit.record.columns import RankState

_ENOUGH = 2  # steps that must agree: in a single step, batches may coincide by chance, such as zeros in a warm-up


def inferred(ranks: Mapping[int, RankState]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """For a script that is not the lab's: groups of two or more ranks that read the same samples, and later pipeline
    stages.
    """
    inputs = {number: _digests(rank, "input") for number, rank in sorted(ranks.items())}
    later = tuple(number for number, seen in inputs.items() if seen and not any(seen.values()))
    first = {number: seen for number, seen in inputs.items() if number not in later and any(seen.values())}
    if not first:
        return [], ()  # no rank reads samples visibly, so activations do not identify the stages
    steps = set.intersection(*(set(seen) for seen in first.values()))
    if len(steps) < _ENOUGH:
        return [], later
    groups: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for number, seen in first.items():
        groups[tuple(seen[step] for step in sorted(steps))].append(number)
    return [part for numbers in groups.values() for part in _by_batches(ranks, numbers) if len(part) > 1], later


def inferred_note(ranks: Mapping[int, RankState]) -> str:
    """The inference in words; empty if every rank reads different samples."""
    same, later = inferred(ranks)
    parts = [f"{_named(numbers)} read the same samples, so each sample counts once" for numbers in same]
    if later:
        parts.append(
            f"{_named(later)} {'receive' if len(later) > 1 else 'receives'} activations, so no samples count there"
        )
    return f"samples/s inferred from the first batches: {'; '.join(parts)}" if parts else ""


def _named(ranks: tuple[int, ...]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _by_batches(ranks: Mapping[int, RankState], numbers: list[int]) -> list[tuple[int, ...]]:
    """Splits ranks with the same model inputs by the batches of their loaders; a rank without a loader receives its
    batches.
    """
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
    return {one["step"]: one.get("digest") for one in rank.seen(what)}
