"""The load of experts: how often a mixture of experts chose each of them, from what the ranks logged last."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from labkit.record.state import per_revision

if TYPE_CHECKING:
    from labkit.record.state import RunState

_NAME = re.compile(r"(?:experts\.)?expert (\d{1,4})")  # the metrics of the event `experts`


@per_revision
def expert_loads(state: RunState) -> tuple[int, dict[int, dict[int, float]]]:
    """The newest step that every rank with experts has logged, and in it the choices of each expert by rank and number
    of the expert, over all layers; (0, {}) if none was logged."""
    found: dict[int, dict[int, dict[int, float]]] = {}  # by step, rank and expert
    for metric in state.metrics:
        match = _NAME.fullmatch(str(metric.name))
        step, rank, value = metric.step, metric.rank, metric.value
        if match and isinstance(value, (int, float)) and step is not None and rank is not None and value >= 0:
            found.setdefault(int(step), {}).setdefault(rank, {})[int(match[1])] = float(value)
    most = max((len(ranks) for ranks in found.values()), default=0)
    step = max((step for step, ranks in found.items() if len(ranks) == most), default=0)
    return step, found.get(step, {})


def summed(loads: dict[int, dict[int, float]]) -> dict[int, float]:
    """The choices of each expert by all ranks, by number of the expert."""
    numbers = sorted({number for experts in loads.values() for number in experts})
    return {number: sum(experts.get(number, 0.0) for experts in loads.values()) for number in numbers}
