"""What a page has of the charts, and so what it still lacks: the whole of a chart once, then its new points only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.figures.as_plotly import numbers, parts, words
from labkit.figures.model import Chart, Drawn, Extent
from labkit.record.state import RunState

WHOLE = 400  # points of a line when a chart is told as a whole
CAP = 1000  # points of a line that a page holds at the most: then it is told the whole again, thinned


@dataclass
class _Page:
    """One chart as the page has it: by line, how many of the state's points it stands for, and how many it holds."""

    drawn: Drawn
    read: list[int]
    held: list[int]
    last_x: list[float]
    x: Extent
    y: Extent

    def lacks(self, chart: Chart) -> bool:
        """Whether new points alone cannot carry the page from its picture to `chart`."""
        return chart.signature != self.drawn.chart.signature or max(self.held, default=0) >= CAP


class Feed:
    """Messages for the page, from one RunState after another of the same run; `restart` for another run."""

    def __init__(self, charts: Mapping[str, Callable[[RunState], Chart]]) -> None:
        self._charts = charts
        self._pages: dict[str, _Page] = {}

    def restart(self) -> None:
        """The next message tells everything."""
        self._pages.clear()

    def message(self, state: RunState) -> dict[str, Any] | None:
        """What the page lacks; None where it lacks nothing."""
        pieces = [piece for name, make in self._charts.items() if (piece := self._piece(name, make(state)))]
        return {"kind": "charts", "charts": pieces} if pieces else None

    def _piece(self, name: str, chart: Chart) -> dict[str, Any] | None:
        page = self._pages.get(name)
        if page is None or page.lacks(chart):
            return {"name": name, "whole": self._whole(name, chart)}
        more = _more(page, chart)
        return {"name": name, "more": more} if more else None

    def _whole(self, name: str, chart: Chart) -> dict[str, Any]:
        drawn = chart.drawn(WHOLE)
        old = self._pages.get(name)
        if old is not None and old.drawn.chart.y == chart.y:  # thinned again: what was seen stays in the picture's range
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
    """The new points of each line, as one or two, new heights of bars, and ranges that have grown."""
    points = []
    before = page.drawn
    for index, line in enumerate(chart.lines):
        if len(line) == page.read[index]:
            continue
        xs, ys = line.points(page.read[index], limit=1)
        if xs[0] < page.last_x[index]:  # the rank was started anew
            xs, ys = [xs[0], *xs], [None, *ys]
        page.read[index], page.last_x[index] = len(line), xs[-1]
        page.held[index] += len(xs)
        page.x, page.y = page.x.with_(xs), page.y.with_(ys)
        points.append([index, numbers(xs), numbers(ys), words(chart.y, ys)])
    page.y = page.y.with_([chart.bar_height])
    page.drawn = Drawn(chart, (), page.x, page.y)
    more = {
        "points": points,
        "bars": [[numbers(bars.values), words(chart.y, bars.values)] for bars in chart.bars] if chart.bars != before.chart.bars else [],
        "x": None if page.drawn.x_span == before.x_span else list(page.drawn.x_span),
        "y": None if page.drawn.y_span == before.y_span else list(page.drawn.y_span),
    }
    return more if any(more.values()) else None
