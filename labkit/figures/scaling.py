"""Strong and weak scaling as text, HTML tables and charts; all figures are modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.common.text import escape, visible
from labkit.figures import colours
from labkit.figures.as_svg import drawing
from labkit.figures.model import Axis, Chart, Line
from labkit.figures.prediction import table_html
from labkit.prediction.scale.scaling import MODES, Mode, Series, efficiency
from labkit.prediction.scale.step import Estimate

if TYPE_CHECKING:
    import plotly.graph_objects

TABLES: dict[str, Callable[[Estimate], str]] = {  # what the cells of a table show
    "efficiency": lambda one: f"{efficiency(one):.0%}",
    "exposed communication": lambda one: f"{one.exposed / one.seconds:.0%}",
    "time per step": lambda one: in_seconds(one.seconds),
}
_CHARTS: dict[str, tuple[str, Callable[[Estimate], float]]] = {
    "efficiency": ("% of perfect scaling", lambda one: 100 * efficiency(one)),
    "exposed communication": ("% of a step", lambda one: 100 * one.exposed / one.seconds),
}
_BOUND = "communication-bound from"


class Scaled:
    """Strong and weak scaling of several strategies; displays itself as tables in a notebook, as text elsewhere."""

    def __init__(self, series: Sequence[Series]):
        self.series = tuple(series)

    @property
    def title(self) -> str:
        """What is scaled."""
        known = [one for each in self.series for one in each.estimates if one]
        what = "".join(f"{one.training.model.title} on {one.training.accelerator.name}: " for one in known[:1])
        return f"{what}efficiency = time of the computation, divided evenly / time of the step; modelled"

    def tables(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """The heads and the rows of each table: for each mode the efficiency, the exposed communication and the time of
        each strategy, by the number of devices; a dash if nothing fits or the batch is too small."""
        devices = tuple(f"{number:,}" for number in next(one.devices for one in self.series))
        for mode in MODES:
            for what, words in TABLES.items():
                heads = (f"{mode} scaling: {what}", *devices, _BOUND)
                yield heads, [_cells(one, words) for one in self.series if one.mode == mode and any(one.estimates)]

    def charts(self) -> tuple[Chart, ...]:
        """Efficiency and exposed communication over the number of devices, for each mode."""
        return tuple(self._chart(mode, what) for what in _CHARTS for mode in MODES)

    def _chart(self, mode: Mode, what: str) -> Chart:
        unit, value = _CHARTS[what]
        drawn = [one for one in self.series if one.mode == mode and any(one.estimates)]
        lines = tuple(line for number, one in enumerate(drawn) for line in _lines(one, number, value))
        devices = next(one.devices for one in self.series)
        x = Axis("devices", end=len(devices) - 1, categories=tuple(f"{number:,}" for number in devices))
        title = f"{mode.capitalize()} scaling: {what}"
        note = "modelled; dotted: communication-bound"
        return Chart(f"{mode}-{what.split()[0]}", title, x, Axis(unit, end=100.0), lines, note=note)

    def figure(self) -> plotly.graph_objects.Figure:
        """All charts as one plotly figure, two by two."""
        from labkit.figures.as_plotly import as_figure, grid

        return as_figure(*grid([chart.drawn() for chart in self.charts()]))

    def svg(self, width: int = 560, height: int = 240) -> str:
        """All charts as inline SVG elements, with no script."""
        return "".join(drawing(chart.drawn(), width, height) for chart in self.charts())

    def to_json(self) -> dict[str, Any]:
        """The series as a dict that can be written as JSON; None where nothing fits."""
        return {"source": "modelled", "series": [_series_json(one) for one in self.series]}

    def __repr__(self) -> str:
        return visible("\n\n".join([self.title, *(table_text(*table) for table in self.tables())]))

    def _repr_html_(self) -> str:
        tables = "".join(table_html(*table) for table in self.tables())
        return f'<div class="labkit-notes"><p>{escape(self.title)}</p></div>{tables}'


def _cells(one: Series, words: Callable[[Estimate], str]) -> tuple[str, ...]:
    bound = "–" if one.bound_from is None else f"{one.bound_from:,}"
    return one.kind, *("–" if each is None else words(each) for each in one.estimates), bound


def table_text(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text: names in the first column, figures in the others."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (heads, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def in_seconds(seconds: float) -> str:
    """`12.3 s`, `45 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _lines(one: Series, number: int, value: Callable[[Estimate], float]) -> list[Line]:
    """A line up to the point from which communication takes longer than computation, and a dotted one after it."""
    ys = [float("nan") if each is None else value(each) for each in one.estimates]
    at = len(ys) - 1 if one.bound_from is None else one.devices.index(one.bound_from)
    xs = [*map(float, range(len(ys)))]
    colour = colours.rank_colour(number)
    lines = [Line(f"series{number}", one.kind, xs[: at + 1], ys[: at + 1], colour=colour, width=2.0)]
    if at < len(ys) - 1:
        lines.append(Line(f"series{number}-bound", one.kind, xs[at:], ys[at:], colour, 2.0, "dot", in_legend=False))
    return lines


def _series_json(one: Series) -> dict[str, Any]:
    return {
        "strategy": one.kind,
        "scaling": one.mode,
        "communication_bound_from": one.bound_from,
        "points": [
            {"devices": devices}
            if each is None
            else {
                "devices": devices,
                "title": each.layout.title,
                "batch": each.training.batch,
                "seconds_per_step": each.seconds,
                "tokens_per_second": each.tokens_per_second,
                "efficiency": efficiency(each),
                "exposed_seconds": each.exposed,
                "peak_memory_bytes": each.memory.total,
            }
            for devices, each in zip(one.devices, one.estimates)
        ],
    }
