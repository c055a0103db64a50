"""Incremental chart updates: tracks what a page has received and sends each chart whole once, then only its new
points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.figures.as_plotly import numbers, parts, words
from labkit.figures.model import Chart, Drawn, Extent
from labkit.record.state import RunState

WHOLE = 400  # points per line when a chart is sent whole
CAP = 1000  # maximum points per line in a page; beyond it the chart is downsampled and sent whole again


@dataclass
class _Page:
    """One chart as the page has it: per line, how many points of the state it covers and how many points it
    contains."""

    drawn: Drawn
    read: list[int]
    held: list[int]
    last_x: list[float]
    x: Extent
    y: Extent

    def lacks(self, chart: Chart) -> bool:
        """Whether `chart` must be sent whole because new points alone are not enough."""
        return chart.signature != self.drawn.chart.signature or max(self.held, default=0) >= CAP


class Feed:
    """Builds messages for the page from successive states of one run; call `restart` before another run."""

    def __init__(self, charts: Mapping[str, Callable[[RunState], Chart | None]]) -> None:
        self._charts = charts
        self._pages: dict[str, _Page] = {}

    def restart(self) -> None:
        """Makes the next message contain every chart whole."""
        self._pages.clear()

    def message(self, state: RunState) -> dict[str, Any] | None:
        """The names of the charts that the run has, and what has changed since the last message; None if nothing
        has."""
        charts = {name: chart for name, make in self._charts.items() if (chart := make(state)) is not None}
        updates = [update for name, chart in charts.items() if (update := self._update(name, chart))]
        return {"kind": "charts", "names": [*charts], "charts": updates} if updates else None

    def _update(self, name: str, chart: Chart) -> dict[str, Any] | None:
        page = self._pages.get(name)
        if page is None or page.lacks(chart):
            return {"name": name, "whole": self._whole(name, chart)}
        more = _more(page, chart)
        return {"name": name, "more": more} if more else None

    def _whole(self, name: str, chart: Chart) -> dict[str, Any]:
        drawn = chart.drawn(WHOLE)
        old = self._pages.get(name)
        if old is not None and old.drawn.chart.y == chart.y:  # downsampled again: keep the range of the axes
            drawn = Drawn(chart, drawn.points, old.x.or_(drawn.x), old.y.or_(drawn.y))
        self._pages[name] = _Page(
            drawn,
            read=[len(line) for line in chart.lines],
            held=[len(xs) for xs, _ in drawn.points],
            last_x=[xs[-1] if xs else 0.0 for xs, _ in drawn.points],
            x=drawn.x,
            y=drawn.y,
        )
        data, layout = parts(drawn)
        return {"label": chart.title, "data": data, "layout": layout}


def _more(page: _Page, chart: Chart) -> dict[str, Any] | None:
    """The new points of each line (reduced to one or two), new heights of bars, and axis ranges that have grown."""
    points = []
    before = page.drawn
    for index, line in enumerate(chart.lines):
        if len(line) == page.read[index]:
            continue
        xs, ys = line.points(page.read[index], limit=1)
        if xs[0] < page.last_x[index]:  # the rank was restarted
            xs, ys = [xs[0], *xs], [None, *ys]
        page.read[index], page.last_x[index] = len(line), xs[-1]
        page.held[index] += len(xs)
        page.x, page.y = page.x.with_(xs), page.y.with_(ys)
        points.append([index, numbers(xs), numbers(ys), words(chart.y, ys)])
    page.y = page.y.with_([chart.bar_height])
    page.drawn = Drawn(chart, (), page.x, page.y)
    more = {
        "points": points,
        "bars": (
            [[numbers(bars.values), words(chart.y, bars.values)] for bars in chart.bars]
            if chart.bars != before.chart.bars
            else []
        ),
        "x": None if page.drawn.x_span == before.x_span else list(page.drawn.x_span),
        "y": None if page.drawn.y_span == before.y_span else list(page.drawn.y_span),
    }
    return more if any(more.values()) else None
