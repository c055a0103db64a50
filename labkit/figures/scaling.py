"""Strong and weak scaling as text, HTML tables and charts; all figures are modelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_WORDS = {"weak": "weak scaling (constant batch per device)", "strong": "strong scaling (constant global batch)"}
_FIGURES: dict[str, tuple[str, Callable[[Estimate], float]]] = {
    "efficiency": ("% of perfect scaling", lambda one: 100 * efficiency(one)),
    "exposed": ("% of a step", lambda one: 100 * one.exposed / one.seconds),
}
_TITLES = {"efficiency": "efficiency", "exposed": "exposed communication"}


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

    def heads(self, mode: Mode) -> tuple[str, ...]:
        """The heads of the table of weak or strong scaling."""
        devices = next(one.devices for one in self.series)
        return (f"{mode}: devices", *(f"{number:,}" for number in devices), "communication-bound from")

    def rows(self, mode: Mode) -> list[tuple[str, ...]]:
        """The cells below `heads`: the efficiency of each strategy, a dash if it does not fit or the batch is too
        small."""
        return [
            (
                one.kind,
                *("–" if each is None else f"{efficiency(each):.0%}" for each in one.estimates),
                "–" if one.bound_from is None else f"{one.bound_from:,}",
            )
            for one in self.series
            if one.mode == mode and any(one.estimates)
        ]

    def charts(self) -> tuple[Chart, ...]:
        """Efficiency and exposed communication over the number of devices, for each mode."""
        return tuple(self._chart(mode, figure) for figure in _FIGURES for mode in MODES)

    def _chart(self, mode: Mode, figure: str) -> Chart:
        unit, value = _FIGURES[figure]
        drawn = [one for one in self.series if one.mode == mode and any(one.estimates)]
        lines = tuple(line for number, one in enumerate(drawn) for line in _lines(one, number, value))
        devices = next(one.devices for one in self.series)
        x = Axis("devices", end=len(devices) - 1, categories=tuple(f"{number:,}" for number in devices))
        title = f"{mode.capitalize()} scaling: {_TITLES[figure]}"
        note = "modelled; dotted: communication-bound"
        return Chart(f"{mode}-{figure}", title, x, Axis(unit, end=100.0), lines, note=note)

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
        parts = [self.title]
        for mode in MODES:
            rows = [self.heads(mode), *self.rows(mode)]
            widths = [max(map(len, column)) for column in zip(*rows)]
            parts.append("\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows))
        return visible("\n\n".join(parts))

    def _repr_html_(self) -> str:
        tables = "".join(
            f"<p>{escape(_WORDS[mode])}</p>{table_html(self.heads(mode), self.rows(mode))}" for mode in MODES
        )
        return f'<div class="labkit-notes"><p>{escape(self.title)}</p></div>{tables}'


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
