"""The roofline of a device: the FLOP/s that it can reach at most, by arithmetic intensity (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.common.arguments import Number
from labkit.course.pictures.canvas import checked
from labkit.figures import rank_colour
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.figures.colours import GRID, INK

if TYPE_CHECKING:
    import plotly.graph_objects as go

_RATE = Number(float, 1.0, 1e18)  # FLOP/s, bytes per second
_INTENSITY = Number(float, 1e-9, 1e9)  # FLOP per byte
_WIDER = 2.0  # the axis beyond the outermost points


@checked
def ceiling(points: Mapping[str, Sequence[float]], peak: float, bandwidth: float) -> go.Figure:
    """The roof min(`peak`, `bandwidth` × intensity), in FLOP/s and bytes per second, on logarithmic axes; and measured
    `points` by name: FLOP per byte, FLOP/s."""
    _RATE.check("peak", peak)
    _RATE.check("bandwidth", bandwidth)
    for name, point in points.items():
        if len(point) != 2:
            raise ValueError(f"points must be pairs of FLOP per byte and FLOP/s, got {len(point)} numbers for {name}")
        _INTENSITY.check(f"FLOP per byte of {name}", point[0])
        _RATE.check(f"FLOP/s of {name}", point[1])
    ridge = peak / bandwidth
    every = [ridge, *(intensity for intensity, _ in points.values())]
    x = [min(every) / _WIDER, ridge, max(every) * _WIDER]
    roof = {
        "type": "scatter",
        "mode": "lines",
        "name": f"roof: bends at {ridge:.3g} FLOP per byte",
        "x": x,
        "y": [min(peak, bandwidth * value) for value in x],
        "line": {"color": INK, "dash": "dash"},
        "hoverinfo": "skip",
    }
    marks = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [intensity],
            "y": [reached],
            "marker": {"color": rank_colour(number), "size": 10},
            "hovertemplate": f"%{{x:.3~g}} FLOP per byte: %{{y:.3~s}}FLOP/s<extra>{name}</extra>",
        }
        for number, (name, (intensity, reached)) in enumerate(points.items())
    ]
    axis = {"type": "log", "gridcolor": GRID, "zeroline": False, "exponentformat": "SI"}
    layout = plain_look() | {
        "hovermode": "closest",
        "height": 360,
        "margin": {"l": 70, "r": 20, "t": 20, "b": 50},
        "xaxis": axis | {"title": {"text": "arithmetic intensity, FLOP per byte"}},
        "yaxis": axis | {"title": {"text": "FLOP/s"}},
        "legend": {"bgcolor": "rgba(0,0,0,0)"},
    }
    return as_figure([roof, *marks], layout)
