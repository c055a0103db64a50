"""Which ranks of a run do the same work, so that only one of them needs a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.analysis.theory import States, states
from labkit.plan.spec import Spec

MOST = 16  # classes that are traced


def classes(spec: Spec) -> list[list[int]]:
    """The ranks of a Spec with a known number of ranks, grouped by pipeline stage and by the bytes that they store.

    Shards of unequal size are separate classes. With more than `MOST` classes, those of a stage that store the
    least join the one that stores the most, whose memory is then an upper bound. The first rank of a class represents
    it. Which ranks of a script of the user's own are alike is not known: each is a class, or with more than `MOST`
    stands for those up to the next one.
    """
    if spec.strategy is None:
        return _evenly(spec.processes)
    stages = spec.strategy_row.constants(spec).get("STAGES", ())
    pipes = spec.options.get("pp_size", spec.processes) if stages else 1
    held = states(spec) or (None,) * spec.processes
    found: list[list[int]] = []
    for stage in range(pipes):
        each = spec.processes // pipes
        alike: dict[States | None, list[int]] = {}
        for rank in range(stage * each, (stage + 1) * each):
            alike.setdefault(held[rank], []).append(rank)
        largest, *others = sorted(alike.values(), key=lambda ranks: -_bytes(held[ranks[0]]))
        traced = max(0, MOST // pipes - 1)
        found += [largest + [rank for ranks in others[traced:] for rank in ranks], *others[:traced]]
    return found


def joined(groups: Sequence[list[int]], traces: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Classes whose traces turned out to be equal become one."""
    found: list[list[int]] = []
    for ranks in groups:
        same = next((each for each in found if traces[each[0]] == traces[ranks[0]]), None)
        if same is None:
            found.append([*ranks])
        else:
            same += ranks
    return found


def _evenly(ranks: int) -> list[list[int]]:
    """Rank 0, the last one, and others between them, each with those up to the next one."""
    count = min(ranks, MOST)
    firsts = [number * (ranks - 1) // (count - 1) for number in range(count)] if count > 1 else [0]
    return [[*range(first, end)] for first, end in zip(firsts, [*firsts[1:], ranks])]


def _bytes(held: States | None) -> float:
    return held.total if held else 0
