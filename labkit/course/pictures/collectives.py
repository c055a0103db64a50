"""Pictures of collectives: who sends what to whom, round by round, from the plans of
`labkit.analysis.theory.collectives`.

There is one panel per round. The ranks are on a circle, an arrow is a message labelled with its chunks (`+` if they are
added), and the cells next to a rank show what it has *after* the round. Chunks are called A, B, C…; the digits in a
cell are the ranks whose data it contains, and Σ is the sum over all ranks. Chunks that were received in this round have
a thick border.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory import collectives as plans
from labkit.common.units import size
from labkit.course.pictures.checked import checked
from labkit.figures import rank_colour
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.figures.colours import GRID, INK

if TYPE_CHECKING:
    import plotly.graph_objects as go

from labkit.course.pictures.rounds import few_enough, rounds_of

_MARKS = ("circle", "square", "diamond", "cross", "x", "triangle-up")


@checked
def broadcast(n: int = 4, by: str = "tree") -> go.Figure:
    """A broadcast to `n` ranks (2 to 8) `by` one_by_one, chain or tree."""
    return rounds_of(plans.broadcast(few_enough(n), by))


@checked
def reduce(n: int = 4, by: str = "tree") -> go.Figure:
    """A reduce of `n` ranks (2 to 8) `by` one_by_one or tree."""
    return rounds_of(plans.reduce(few_enough(n), by))


@checked
def all_reduce(n: int = 4, by: str = "ring") -> go.Figure:
    """An all-reduce of `n` ranks (2 to 8) `by` root (reduce, then broadcast), tree or ring."""
    return rounds_of(plans.all_reduce(few_enough(n), by))


@checked
def all_gather(n: int = 4) -> go.Figure:
    """An all-gather of `n` ranks (2 to 8) by a ring."""
    return rounds_of(plans.all_gather(few_enough(n)))


@checked
def reduce_scatter(n: int = 4) -> go.Figure:
    """A reduce-scatter of `n` ranks (2 to 8) by a ring."""
    return rounds_of(plans.reduce_scatter(few_enough(n)))


@checked
def all_to_all(n: int = 4) -> go.Figure:
    """An all-to-all of `n` ranks (2 to 8): each sends a different chunk to every other rank; `2›0` is from rank 2 to
    rank 0."""
    return rounds_of(plans.all_to_all(few_enough(n)))


@checked
def costs(n: int = 4) -> go.Figure:
    """The cost of each algorithm on `n` ranks: its rounds, and what the busiest rank sends, in messages."""
    every = [*plans.plans(n)][::-1]
    names = [plan.title.replace(": ", "<br>", 1) for plan in every]
    figures = (
        ("rounds", [len(plan.rounds) for plan in every]),
        ("sent by the busiest rank, in messages", [plan.busiest() for plan in every]),
    )
    data, layout = (
        [],
        plain_look()
        | {
            "hovermode": "closest",
            "height": 40 * len(every) + 60,
            "margin": {"l": 230, "r": 20, "t": 10, "b": 45},
            "showlegend": False,
        },
    )
    for number, (what, values) in enumerate(figures):
        suffix = "2" if number else ""
        texts = [f"{value:g}" for value in values]
        look = {
            "orientation": "h",
            "marker": {"color": INK, "opacity": 0.6},
            "text": texts,
            "textposition": "outside",
            "cliponaxis": False,
        }
        data.append(
            {"type": "bar", "x": values, "y": names, "xaxis": f"x{suffix}", "yaxis": "y", "hoverinfo": "skip"} | look
        )
        top = 1.15 * max(values)
        layout[f"xaxis{suffix}"] = {
            "domain": [0.54 * number, 0.54 * number + 0.44],
            "range": [0, top],
            "gridcolor": GRID,
            "zeroline": False,
        }
        layout[f"xaxis{suffix}"]["title"] = {"text": what}
    return as_figure(data, layout | {"yaxis": {"automargin": False, "tickfont": {"size": 10}}})


@checked
def times(
    sizes: Sequence[float], measured: Mapping[str, Sequence[float]], modelled: Mapping[str, Sequence[float]]
) -> go.Figure:
    """Seconds versus bytes on logarithmic axes: `measured` as markers, `modelled` as dashed lines, one colour per
    name."""
    names = [*dict.fromkeys([*measured, *modelled])]
    colours = {name: rank_colour(number) for number, name in enumerate(names)}
    series = []
    for name, values in modelled.items():
        series.append(
            _series(name, "modelled", sizes, values)
            | {
                "mode": "lines",
                "line": {"color": colours[name], "dash": "dash"},
            }
        )
    for name, values in measured.items():
        marker = {"color": colours[name], "size": 9, "symbol": _MARKS[names.index(name) % len(_MARKS)]}
        series.append(_series(name, "measured", sizes, values) | {"mode": "markers", "marker": marker})
    shown = [1000 * value for values in (*measured.values(), *modelled.values()) for value in values]
    axis = {"type": "log", "gridcolor": GRID, "zeroline": False}
    layout = plain_look() | {
        "hovermode": "closest",
        "height": 380,
        "margin": {"l": 70, "r": 20, "t": 30, "b": 50},
        "xaxis": (
            axis
            | {
                "title": {"text": "message of one rank"},
                "tickvals": [*sizes],
                "ticktext": [size(bytes_, 0) for bytes_ in sizes],
            }
        ),
        "yaxis": axis | {"title": {"text": "milliseconds"}, "tickvals": _ticks(min(shown), max(shown))},
        "legend": {"bgcolor": "rgba(0,0,0,0)"},
    }
    return as_figure(series, layout)


def _series(name: str, kind: str, sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    hover = {
        "hovertemplate": f"%{{text}}: %{{y:.3~g}} ms<extra>{name}, {kind}</extra>",
        "text": [size(bytes_, 0) for bytes_ in sizes],
    }
    return {
        "type": "scatter",
        "name": f"{name}, {kind}",
        "x": [*sizes],
        "y": [1000 * value for value in seconds],
    } | hover


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten, from below `low` to above `high`."""
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**power for power in tens for digit in (1, 2, 5)]
