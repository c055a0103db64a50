"""The data of a chart: titles, axes, and lines, bars or spans. Lines read the columns of RunState only when they are
drawn.

One Chart has three outputs: a plotly figure, a live chart (which asks each line only for its new points) and inline
SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy

from labkit.common.units import scale, size

_HEADROOM = 1.15  # so that the name of a mark is below the title
_REACH = 2.0  # a mark above this many times the tallest bar is drawn at the edge, so that it does not flatten the bars
LIMIT = 1000  # points per line in a complete figure
_ENDS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_SPARSE = (1.0, 2.0, 5.0, 10.0)  # of an axis with an end, so that it is reached in few steps
_TICKS = (1.0, 2.0, 2.5, 5.0, 10.0)

Points = tuple[list[float], list[float | None]]


@dataclass(frozen=True)
class Derived:
    """A column of `length` numbers that is computed when it is read: `values(first, last)` returns a slice."""

    length: int
    values: Callable[[int, int], Sequence[float] | numpy.ndarray]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice | int) -> Any:
        if isinstance(part, int):
            return self.values(part, part + 1)[0]
        first, last, _ = part.indices(self.length)
        return self.values(first, last)


@dataclass(frozen=True)
class Line:
    """One line. `key` identifies it across redraws; `colour` None is the text colour of the page.

    `x` and `y` are columns of RunState; `x - x_zero` and `y / y_unit` are drawn. `keep` says how points are thinned: to
    the "extremes" of each bin (so that no spike is lost) or to its "last" point.
    """

    key: str
    name: str
    x: Sequence[float] | Derived
    y: Sequence[float] | Derived
    colour: str | None = None
    width: float = 1.5
    dash: str = "solid"
    keep: str = "last"
    x_zero: float = 0.0
    y_unit: float = 1.0
    in_legend: bool = True
    stacked: bool = False  # an area on top of the stacked lines before it, constant until the next point
    is_level: bool = False  # a value for the whole axis, however long it is

    def __len__(self) -> int:
        return min(len(self.x), len(self.y))

    def points(self, first: int = 0, limit: int = LIMIT) -> Points:
        """At most `limit` points from index `first` on; None is a gap (an unknown value, or a restart)."""
        kept = thin(self.y, first, len(self), limit, self.keep)
        xs, ys = _at(self.x, kept) - self.x_zero, _at(self.y, kept) / self.y_unit
        known = [y if is_known else None for y, is_known in zip(ys.tolist(), numpy.isfinite(ys))]
        return _broken_where_x_goes_back(xs.tolist(), known)


@dataclass(frozen=True)
class Bars:
    """One layer of stacked bars: a value for each of the chart's categories."""

    name: str
    colour: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Marks:
    """A level across the bars of each of the chart's categories; None: the category has none."""

    name: str
    colour: str
    values: tuple[float | None, ...]


Stretch = tuple[int, float, float, str]  # its lane (an index into the categories of the y axis), start, end, hover text


@dataclass(frozen=True)
class Spans:
    """Stretches of time of one kind."""

    name: str
    colour: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Axis:
    """An axis: its title with the unit, a fixed `end` (which it reaches in steps if it `grows`), or a `least` end.

    `bytes_each` is the number of bytes in one unit, for an axis of bytes; 0 otherwise. `labels` stand below the bars of
    categories whose names are too long for one line; a line break begins another line.
    """

    title: str
    end: float | None = None
    least: float = 1.0
    grows: bool = False
    categories: tuple[str, ...] = ()
    bytes_each: float = 0.0
    labels: tuple[str, ...] = ()

    @classmethod
    def of_bytes(cls, largest: float) -> Axis:
        """An axis of bytes up to `largest`, in the unit that suits it."""
        each, name = scale(largest)
        return cls(name, bytes_each=each)

    def in_words(self, value: float | None) -> str:
        """A value on an axis of bytes, in the unit that suits the value."""
        return "unknown" if value is None else size(value * self.bytes_each)

    def span(self, low: float, high: float) -> tuple[float, float]:
        """The range that shows zero and `low` to `high`; it grows in steps, so that it seldom changes."""
        if self.end is not None and high <= self.end:
            reached = max(ceiling(high, _SPARSE), self.least) if self.grows else math.inf
            return 0.0, min(float(self.end), reached)
        return (-ceiling(-low) if low < 0 else 0.0), max(ceiling(high), self.least)


@dataclass(frozen=True)
class Chart:
    """A chart of a run. It has `lines`, `bars` over the categories of its x axis, or `spans` over those of its y axis.

    `bands` mark stretches of the x axis behind the lines: name, start, end, colour. `marks` are levels across the bars.
    """

    name: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    bars: tuple[Bars, ...] = ()
    spans: tuple[Spans, ...] = ()
    bands: tuple[tuple[str, float, float, str], ...] = ()
    marks: tuple[Marks, ...] = ()
    note: str = ""

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be unchanged for a drawn chart to be continued with new points only."""
        lines = tuple((line.key, line.x_zero, line.y_unit) for line in self.lines)
        edge = self.y.span(0.0, self.bar_height)[1] if any(map(self.is_beyond, self._levels)) else None
        return self.title, self.note, self.x, self.y, self.spans, self.bands, self.marks, lines, edge

    @property
    def _levels(self) -> list[float]:
        return [value for marks in self.marks for value in marks.values if value is not None]

    @property
    def _tallest(self) -> float:
        """The height of the tallest stack of bars."""
        return max((sum(layer) for layer in zip(*(bars.values for bars in self.bars))), default=0.0)

    def is_beyond(self, level: float) -> bool:
        """Whether a mark is so far above all bars that it is drawn at the edge of the plot."""
        return 0 < _REACH * self._tallest < level

    @property
    def bar_height(self) -> float:
        """The height of the tallest stack, or of the highest mark with its name that is not at the edge."""
        tallest = self._tallest
        if any(map(self.is_beyond, self._levels)):
            tallest *= _HEADROOM**2  # room for the marks at the edge
        return max([tallest, *(_HEADROOM * level for level in self._levels if not self.is_beyond(level))])

    def drawn(self, limit: int = LIMIT) -> Drawn:
        """The chart with at most `limit` points read per line."""
        points = tuple(
            line.points(limit=LIMIT if line.stacked else limit) for line in self.lines
        )  # so that no peak of a stack is lost
        x, y = Extent(high=self.last_moment), Extent(high=max(self.bar_height, self.stack_height(points)))
        for line, (xs, ys) in zip(self.lines, points):
            x, y = x if line.is_level else x.with_(xs), y.with_(ys)
        return Drawn(self, points, x, y)

    @property
    def last_moment(self) -> float:
        """The end of the last span or band."""
        ends = [end for spans in self.spans for _, _, end, _ in spans.stretches] + [end for _, _, end, _ in self.bands]
        return max(ends, default=0.0)

    def stack_height(self, points: tuple[Points, ...]) -> float:
        """The height of the tallest stack of areas; stacked lines have the same x values."""
        columns = [ys for line, (_, ys) in zip(self.lines, points) if line.stacked]
        return max((sum(value or 0.0 for value in row) for row in zip(*columns)), default=0.0)


@dataclass(frozen=True)
class Extent:
    """The range of some values, always including zero."""

    low: float = 0.0
    high: float = 0.0

    def with_(self, values: Sequence[float | None]) -> Extent:
        """The extent that also includes these values."""
        known = [value for value in values if value is not None]
        return Extent(min(self.low, *known), max(self.high, *known)) if known else self

    def or_(self, other: Extent) -> Extent:
        return Extent(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class Drawn:
    """A chart with the points of each line, and their extents."""

    chart: Chart
    points: tuple[Points, ...]
    x: Extent
    y: Extent

    def height_of(self, level: float) -> float:
        """Where a mark is drawn: at its level, or at the edge of the plot if it is far beyond."""
        return self.y_span[1] / _HEADROOM if self.chart.is_beyond(level) else level

    def mark_in_words(self, level: float) -> str:
        """The level of a mark with its unit."""
        y = self.chart.y
        number = f"{level:,.0f}" if level >= 100 else f"{level:.3g}"
        return y.in_words(level) if y.bytes_each else f"{number} {y.title.split(' ')[0]}"

    @property
    def x_span(self) -> tuple[float, float]:
        return self.chart.x.span(self.x.low, self.x.high)

    @property
    def y_span(self) -> tuple[float, float]:
        return self.chart.y.span(self.y.low, self.y.high)


def ceiling(value: float, rounds: Sequence[float] = _ENDS) -> float:
    """The first round number (one of `rounds` times a power of ten) that is not less than `value`; 0 for 0."""
    if value <= 0 or not math.isfinite(value):
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    step = next((step for step in rounds if step * power >= value * (1 - 1e-9)), 10.0)
    return float(f"{step * power:.3g}")


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About `about` round numbers from `low` to `high`."""
    step = ceiling((high - low) / about, _TICKS) or 1.0
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(ys: Sequence[float] | Derived, first: int, last: int, limit: int, keep: str) -> Sequence[int]:
    """At most `limit` indices (at least two for "extremes") that represent `first` to `last`, by bins of equal size."""
    size = last - first
    if size <= limit:
        return range(first, last)
    bins = max(1, limit // 2) if keep == "extremes" else limit
    edges = [first + number * size // bins for number in range(bins + 1)]
    if keep == "extremes":
        return [index for begin, end in pairwise(edges) for index in _extremes(ys[begin:end], begin)]
    return [end - 1 for end in edges[1:]]


def _extremes(values: Sequence[float] | numpy.ndarray, begin: int) -> list[int]:
    """The indices (counted from `begin`) of the smallest and largest value, in order; the last index if no value is
    finite.
    """
    numbers = numpy.asarray(values, float)
    (known,) = numpy.isfinite(numbers).nonzero()
    if not len(known):
        return [begin + len(numbers) - 1]
    return [begin + int(index) for index in sorted({known[numbers[known].argmin()], known[numbers[known].argmax()]})]


def _at(column: Sequence[float] | Derived, kept: Sequence[int]) -> numpy.ndarray:
    """The values of a column at some indices."""
    if not kept:
        return numpy.empty(0)
    if isinstance(kept, range):
        return numpy.asarray(column[kept.start : kept.stop], float)
    return numpy.array([column[index] for index in kept], float)


def _broken_where_x_goes_back(xs: list[float], ys: list[float | None]) -> Points:
    """Gaps where x decreases, because a restarted rank counts from an earlier step: no line is drawn back to it."""
    back = [index for index in range(1, len(xs)) if xs[index] < xs[index - 1]]
    for index in reversed(back):
        xs.insert(index, xs[index])
        ys.insert(index, None)
    return xs, ys
