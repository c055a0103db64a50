"""How well estimates agree with published runs: errors, ranges, what fits, and the order of layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.analysis.metrics import median
from labkit.prediction.scale.atlas import Published, Refused, read
from labkit.prediction.scale.step import Estimate, estimate

FEWEST = 5  # layouts of a model on some GPUs that are ranked
_NINE_TENTHS = 0.9


@dataclass(frozen=True)
class Pair:
    """A published run and its estimate."""

    run: Published
    estimate: Estimate

    @property
    def speed(self) -> float | None:
        """Modelled / measured tokens per second; None if no speed was published."""
        measured = self.run.measured.tokens_per_second_per_gpu
        return self.estimate.tokens_per_second_per_gpu / measured if measured else None

    @property
    def memory(self) -> float | None:
        """Modelled / measured peak memory; None if no memory was published."""
        measured = self.run.measured.memory
        return self.estimate.memory_bytes / measured if measured else None

    @property
    def within(self) -> tuple[bool, ...]:
        """Whether the measured speed and the measured memory, of those that were published, are in their range."""
        measured, ranges = self.run.measured, self.estimate.ranges
        pairs = (
            (measured.tokens_per_second_per_gpu, ranges["tokens_per_second_per_gpu"]),
            (measured.memory, ranges["memory_bytes"]),
        )
        return tuple(least <= value <= most for value, (least, most) in pairs if value is not None)


@dataclass(frozen=True)
class Agreement:
    """The agreement of some rows. None: there is nothing to compare.

    - Errors are |modelled / measured − 1|: the median, and that which nine tenths of the rows do not exceed.
    - `within`: the part of the measured figures in their 80 % range. `fits`: the part of the rows that survived or
      failed as modelled.
    - `order`: Spearman's rank correlation of modelled and measured speed among the layouts of a model on some GPUs, the
      median of all such groups of at least `FEWEST`. `regret`: the measured speed of the layout that is ranked first,
      relative to the best measured one, the median and the worst of these groups.
    """

    name: str
    rows: int
    refused: int
    speed: tuple[float, float] | None
    memory: tuple[float, float] | None
    within_speed: float | None
    within_memory: float | None
    fits: float | None
    groups: int
    order: float | None
    regret: tuple[float, float] | None


@dataclass(frozen=True)
class Checked:
    """All rows of a file: the pairs, the rows that cannot be computed, and the agreement of each source and of some
    parts of all rows."""

    path: Path
    pairs: tuple[Pair, ...]
    refused: tuple[Refused, ...]
    agreements: tuple[Agreement, ...]


_PARTS: dict[str, Callable[[Pair], bool]] = {
    "all": lambda pair: True,
    "one GPU": lambda pair: pair.run.training.devices == 1,
    "2 to 64 GPUs, TP within a node": lambda pair: (
        2 <= pair.run.training.devices <= 64 and pair.run.layout.tensor <= pair.run.training.machine.per_node
    ),
    "2 to 64 GPUs, TP across nodes": lambda pair: (
        pair.run.training.devices <= 64 and pair.run.layout.tensor > pair.run.training.machine.per_node
    ),
    "65 to 256 GPUs": lambda pair: 64 < pair.run.training.devices <= 256,
    "more than 256 GPUs": lambda pair: pair.run.training.devices > 256,
    "up to 256 GPUs": lambda pair: pair.run.training.devices <= 256,
}


def check(path: Path) -> Checked:
    """Compares the rows of a file with their estimates. Raises as `read` does."""
    runs, refused = read(path)
    pairs: list[Pair] = []
    for run in runs:
        try:
            pairs.append(Pair(run, estimate(run.training, run.layout)))
        except LookupError as error:
            refused.append(Refused(run.line, run.source, run.title, str(error)))
    sources = sorted({published.source for published in (*runs, *refused)})
    by_source = (
        _agreement(
            source,
            [pair for pair in pairs if pair.run.source == source],
            sum(published.source == source for published in refused),
        )
        for source in sources
    )
    by_part = (
        _agreement(name, [pair for pair in pairs if holds(pair)], len(refused) if name == "all" else 0)
        for name, holds in _PARTS.items()
    )
    return Checked(path, tuple(pairs), tuple(refused), (*by_source, *by_part))


def _agreement(name: str, pairs: Sequence[Pair], refused: int) -> Agreement:
    """The agreement of some pairs, and the number of rows that could not be computed."""
    groups: dict[tuple[str, str, int], list[Pair]] = {}
    for pair in pairs:
        if pair.speed is not None:
            groups.setdefault((pair.run.source, pair.run.title, pair.run.training.devices), []).append(pair)
    ranked = [group for group in groups.values() if len(group) >= FEWEST]
    orders, regrets = [_order(group) for group in ranked], [_regret(group) for group in ranked]
    said = [pair for pair in pairs if pair.run.measured.fits is not None]
    return Agreement(
        name,
        len(pairs) + refused,
        refused,
        _errors(pair.speed for pair in pairs),
        _errors(pair.memory for pair in pairs),
        _part(
            _inside(pair, "tokens_per_second_per_gpu", pair.run.measured.tokens_per_second_per_gpu) for pair in pairs
        ),
        _part(_inside(pair, "memory_bytes", pair.run.measured.memory) for pair in pairs),
        _part(pair.estimate.fits == pair.run.measured.fits for pair in said),
        len(ranked),
        median(orders) if orders else None,
        (median(regrets), min(regrets)) if regrets else None,
    )


def _errors(ratios: Iterable[float | None]) -> tuple[float, float] | None:
    """The median and the 90th percentile of the errors."""
    errors = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None)
    return (median(errors), errors[math.ceil(_NINE_TENTHS * len(errors)) - 1]) if errors else None


def _inside(pair: Pair, figure: str, measured: float | None) -> bool | None:
    least, most = pair.estimate.ranges[figure]
    return None if measured is None else least <= measured <= most


def _part(answers: Iterable[bool | None]) -> float | None:
    known = [answer for answer in answers if answer is not None]
    return sum(known) / len(known) if known else None


def _order(group: Sequence[Pair]) -> float:
    """Spearman's rank correlation: the correlation of the ranks, equal values having the mean of their ranks."""
    modelled = _ranks([pair.estimate.tokens_per_second_per_gpu for pair in group])
    measured = _ranks([pair.run.measured.tokens_per_second_per_gpu or 0.0 for pair in group])
    middle = (len(group) - 1) / 2
    product = sum((estimated - middle) * (other - middle) for estimated, other in zip(modelled, measured))
    squares = (sum((rank - middle) ** 2 for rank in ranks) for ranks in (modelled, measured))
    size = math.sqrt(math.prod(squares))
    return product / size if size else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 0; equal values have the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def _regret(group: Sequence[Pair]) -> float:
    """The measured speed of what is modelled as the fastest, relative to the best measured one. Of runs with the same
    layout, the median counts."""
    speeds: dict[object, list[float]] = {}
    for pair in group:
        speeds.setdefault(pair.run.layout, []).append(pair.run.measured.tokens_per_second_per_gpu or 0.0)
    first = max(group, key=lambda pair: pair.estimate.tokens_per_second_per_gpu).run.layout
    return median(speeds[first]) / max(median(repeats) for repeats in speeds.values())
