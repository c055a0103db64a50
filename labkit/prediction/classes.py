"""Which ranks of a run do the same work, so that only one of them needs a trace."""

from __future__ import annotations

from labkit.analysis.theory import States, states
from labkit.plan.spec import Spec

MOST = 16  # classes that are traced


def classes(spec: Spec) -> list[list[int]]:
    """The ranks of a Spec with a known number of ranks, grouped by pipeline stage and by the bytes that they store.

    Shards of unequal size are separate classes. With more than `MOST` classes, those of a stage that store the
    least join the one that stores the most, whose memory is then an upper bound. The first rank of a class represents
    it.
    """
    stages = spec.strategy_row.constants(spec.request).get("STAGES", ())
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


def _bytes(held: States | None) -> float:
    return held.total if held else 0
