"""Mixtures of experts whose load is uneven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.analysis.diagnose.advice import one_of
from labkit.analysis.diagnose.finding import Finding
from labkit.analysis.experts import expert_loads, summed

if TYPE_CHECKING:
    from labkit.record.state import RunState

_UNEVEN = 2.0  # times the mean load, for the busiest expert
_BALANCED = 20  # steps before the load is judged: a new router needs some to balance it


def uneven_experts(state: RunState) -> Iterator[Finding]:
    """A mixture of experts whose busiest expert is chosen at least twice as often as the mean."""
    step, loads = expert_loads(state)
    total = summed(loads)
    mean = sum(total.values()) / max(len(total), 1)
    if step < _BALANCED or not mean:
        return
    busiest = max(total, key=total.__getitem__)
    idle = sum(load < mean / _UNEVEN for load in total.values())
    if total[busiest] >= _UNEVEN * mean:
        yield Finding(
            name="uneven_experts",
            kind="slow",
            title=f"expert {busiest} is chosen {total[busiest] / mean:.1f} times as often as the mean of the experts",
            evidence=(
                f"step {step}, all layers and ranks: {total[busiest]:,.0f} choices of expert {busiest}, {mean:,.0f} per"
                f" expert on average; {idle} of {len(total)} experts are chosen less than half as often as the mean"
            ),
            cause=(
                "an expert that is chosen more often is trained more and chosen even more often; choices beyond its"
                " slots are dropped, and without a limit the other ranks would wait for its rank"
            ),
            fix=one_of(state, "balance experts", "more slots"),
        )
