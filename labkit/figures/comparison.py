"""The charts of a comparison: one pure function each, from its rows to a bar chart with one bar per strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.figures import colours
from labkit.figures.as_svg import drawing
from labkit.figures.model import Axis, Bars, Chart
from labkit.record.writer import PHASES

if TYPE_CHECKING:
    import plotly.graph_objects

    from labkit.analysis.comparison import Row


def speedup(rows: Sequence[Row], recorded: Sequence[Row] = ()) -> Chart:
    """Samples per second relative to the baseline; results recorded on another machine are marked with *."""
    measured = Bars("here", colours.RANKS[0], (*(row.speedup or 0.0 for row in rows), *(0.0 for _ in recorded)))
    bars = [measured]
    if recorded:
        bars.append(Bars("elsewhere*", colours.INK, (*(0.0 for _ in rows), *(row.speedup or 0.0 for row in recorded))))
    x = Axis("", categories=(*_names(rows), *(f"{row.title} ×{row.devices}*" for row in recorded)))
    note = "* recorded on another machine with two GPUs" if recorded else ""
    return Chart("speedup", "Speed-up", x, Axis("× single", least=1.0), bars=tuple(bars), note=note)


def memory(rows: Sequence[Row]) -> Chart:
    """The largest peak memory of any device."""
    counts = [row.memory or 0 for row in rows]
    return _of_bytes("memory", "Peak memory per device", "peak", colours.RANKS[2], rows, counts)


def sent(rows: Sequence[Row]) -> Chart:
    """Bytes per step of the rank that sends the most."""
    counts = [row.sent or 0 for row in rows]
    return _of_bytes("sent", "Bytes sent per step, by one rank", "sent", colours.RANKS[1], rows, counts)


def _of_bytes(name: str, title: str, what: str, colour: str, rows: Sequence[Row], counts: Sequence[float]) -> Chart:
    axis = Axis.of_bytes(max(counts, default=0.0))
    bars = Bars(what, colour, tuple(count / axis.bytes_each for count in counts))
    return Chart(name, title, Axis("", categories=_names(rows)), axis, bars=(bars,))


def phases(rows: Sequence[Row]) -> Chart:
    """The share of each phase in a step of the slowest rank, in percent."""
    shares = {phase: tuple(100 * row.phases.get(phase, 0.0) for row in rows) for phase in PHASES}
    bars = tuple(
        Bars(phase, colours.PHASES[phase], values) for phase, values in shares.items() if phase != "copy" or any(values)
    )
    x, y = Axis("", categories=_names(rows)), Axis("% of a step", end=100.0)
    return Chart("phases", "Share of each phase in a step", x, y, bars=bars)


def charts(rows: Sequence[Row], recorded: Sequence[Row] = ()) -> tuple[Chart, ...]:
    """The charts that have something to show, in the order in which they are shown."""
    drawn = speedup(rows, recorded), phases(rows), memory(rows), sent(rows)
    return tuple(chart for chart in drawn if any(any(bars.values) for bars in chart.bars))


def figure(rows: Sequence[Row], recorded: Sequence[Row] = ()) -> plotly.graph_objects.Figure:
    """All charts as one plotly figure, two by two."""
    from labkit.figures.as_plotly import as_figure, grid

    return as_figure(*grid([chart.drawn() for chart in charts(rows, recorded)]))


def svg(rows: Sequence[Row], recorded: Sequence[Row] = (), width: int = 560, height: int = 220) -> str:
    """All charts as inline SVG elements, with no script."""
    return "".join(drawing(chart.drawn(), width, height) for chart in charts(rows, recorded))


def _names(rows: Sequence[Row]) -> tuple[str, ...]:
    """Unique names, because plotly stacks bars with the same name."""
    names = [f"{row.title} ×{row.devices}" for row in rows]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    )
