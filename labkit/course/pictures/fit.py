"""Will it fit: the bytes of the model states of a device, by formula (Rajbhandari et al. 2020, section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.analysis.theory.formulas import RECIPES
from labkit.common.arguments import check_choice
from labkit.course.pictures.canvas import checked
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.prediction.scale.layouts import SHARDINGS

if TYPE_CHECKING:
    import plotly.graph_objects as go


@checked
def states(parameters: float, devices: int, recipe: str = "mixed", memory: float | None = None) -> go.Figure:
    """Bytes of model states per device under DDP and the ZeRO stages, by owner, by formula; `memory` draws a line."""
    bytes_per_parameter = RECIPES[check_choice("recipe", recipe, RECIPES)]
    unit, word = (1e9, "GB") if sum(bytes_per_parameter.values()) * parameters >= 1e9 else (2**20, "MiB")
    shown = {sharding.title: sharding.owners for sharding in SHARDINGS.values() if not sharding.across}
    shares = {
        owner: [size * parameters / (devices if owner in sharded else 1) / unit for sharded in shown.values()]
        for owner, size in bytes_per_parameter.items()
    }
    names = [f"{name}<br>{sum(parts):,.1f} {word}" for name, *parts in zip(shown, *shares.values())]
    data = [
        {"type": "bar", "name": owner, "x": names, "y": share, "marker": {"color": colours.OWNERS[owner]}}
        | {"hovertemplate": f"{owner} %{{y:.3~s}} {word}<extra>%{{x}}</extra>"}
        for owner, share in shares.items()
    ]
    title = f"Model states per device, by formula: {parameters:,.0f} parameters, {devices} devices, {recipe}"
    layout = _layout(title, 330) | {"barmode": "stack", "legend": {"orientation": "h", "y": -0.18}}
    layout |= {
        "yaxis": {"title": {"text": word}, "gridcolor": colours.GRID, "zeroline": False},
        "xaxis": {"type": "category"},
    }
    if memory:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": memory / unit, "y1": memory / unit}
        layout["shapes"] = [line | {"line": {"color": colours.INK, "width": 2, "dash": "dash"}}]
        words = f"device memory: {memory / unit:,.0f} {word}"
        layout["annotations"] = [_note(1, memory / unit, words, xref="paper", xanchor="right", yanchor="bottom")]
    return as_figure(data, layout)


def _note(x: Any, y: float, text: str, **more: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": {"size": 12}} | more


def _layout(title: str, height: int) -> dict[str, Any]:
    return {
        "title": {
            "text": f"<b>{title}</b>",
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "font": {"size": 13},
            "pad": {"l": 8},
        },
        "height": height,
        "margin": {"l": 50, "r": 10, "t": 40, "b": 30},
        **plain_look(12),
    }
