"""Shared by the pictures: boxes, text, lanes of time, and layouts for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.figures import colours
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.plan.spec import Spec

if TYPE_CHECKING:
    import plotly.graph_objects as go


# ---- shared by the pictures


EVERY = "rgba(128, 128, 128, 0.22)"  # data that every rank has
HIDDEN = {"visible": False, "fixedrange": True}
SCALED = {"gridcolor": colours.GRID, "zeroline": False}
_DARK = (0, 2, 5)  # ranks whose colour needs white text


def layout(title: str, height: float) -> dict[str, Any]:
    """The common layout: a title at the top left, a transparent background, grey text; `height` in pixels."""
    return {
        "title": {
            "text": title,
            "x": 0,
            "xref": "container",
            "y": 1,
            "yanchor": "top",
            "font": {"size": 13},
            "pad": {"l": 8, "t": 7},
        },
        "height": round(height),
        "margin": {"l": 8, "r": 8, "t": 34, "b": 8},
        **plain_look(),
    }


def box(x: float, y: float, width: float, height: float, colour: str) -> dict[str, Any]:
    """A filled rectangle from its corner."""
    corners = {"x0": x, "y0": y, "x1": x + width, "y1": y + height}
    return {"type": "rect", **corners, "fillcolor": colour, "line": {"width": 0}, "layer": "below"}


def note(x: float, y: float, text: str, size: int, colour: str | None = None, anchor: str = "center") -> dict[str, Any]:
    """Text at a position, aligned by `anchor`; in grey if `colour` is None."""
    font = {"size": size} | ({"color": colour} if colour else {})
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": font, "xanchor": anchor, "yanchor": "middle"}


def ink(owner: int | None) -> str | None:
    """The text colour on the colour of rank `owner`; None (grey) if `owner` is None, which means all ranks."""
    return None if owner is None else "#FFFFFF" if owner % len(colours.RANKS) in _DARK else "#000000"


# ---- pictures with one lane per rank or device, time to the right


_HALF = 0.27  # half the height of a box, relative to a lane
_BOXES = {"batch": colours.PHASES["copy"], "loss": colours.PHASES["other"], "update": colours.PHASES["optimizer"]}
_BOXES |= {
    "forward": colours.PHASES["forward"],
    "backward": colours.PHASES["backward"],
    "all_reduce": colours.COMMUNICATION,
}
_LIGHT = ("forward", "loss", "all_reduce")  # phases with black text; the others have white text


@dataclass(frozen=True)
class Box:
    """What a lane does from `start` to `end`: its phase, its text, and `more` text on hover."""

    lane: int
    start: float
    end: float
    phase: str
    words: str
    more: str = ""


@dataclass(frozen=True)
class Arrow:
    """A message from one lane to another at time `at`; in both directions if `both`."""

    start: int
    end: int
    at: float
    both: bool = False


def lane_name(lane: int, what: str = "rank") -> str:
    """The name of a rank or device, with its colour."""
    return f'<b><span style="color:{colours.rank_colour(lane)}">■</span> {what} {lane}</b>'


def side_by_side(
    title: str, subtitle: str, names: Sequence[str], boxes: Sequence[Box], arrows: Sequence[Arrow], heads
) -> go.Figure:
    """Lanes from the top down, time to the right, without a scale: boxes are phases, arrows are messages between
    lanes."""
    annotations = [note(x, -0.62, text, 13) | {"yanchor": "bottom"} for x, text in heads]
    annotations += [_arrow(arrow) for arrow in arrows]
    shapes = [
        {"type": "line", "x0": 0, "x1": 10, "y0": lane, "y1": lane, "line": {"color": colours.GRID}}
        for lane in range(len(names))
    ]
    looks = wide_layout(title, subtitle, 150 + 92 * len(names)) | {
        "annotations": annotations,
        "shapes": [shape | {"layer": "below"} for shape in shapes],
        "xaxis": {"visible": False, "range": [-0.1, 10], "fixedrange": True},
        "yaxis": lane_axis(names, -1.25),
        "showlegend": False,
    }
    return as_figure([bars(boxes)], looks)


def bars(boxes: Sequence[Box]) -> dict[str, Any]:
    """Boxes as one trace of horizontal bars."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": [box.lane for box in boxes],
        "base": [box.start for box in boxes],
        "x": [box.end - box.start for box in boxes],
        "width": 2 * _HALF,
        "marker": {"color": [_BOXES[box.phase] for box in boxes], "line": {"width": 0}},
        "text": [box.words for box in boxes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
        "textfont": {"color": ["#000000" if box.phase in _LIGHT else "#FFFFFF" for box in boxes], "size": 13},
        "customdata": [f"{box.words}{box.more}" for box in boxes],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _arrow(arrow: Arrow) -> dict[str, Any]:
    """An arrow between the edges of two lanes' boxes."""
    down = math.copysign(_HALF + 0.03, arrow.end - arrow.start)
    look = {
        "showarrow": True,
        "text": "",
        "arrowhead": 2,
        "arrowwidth": 2.5,
        "arrowsize": 0.9,
        "arrowcolor": colours.COMMUNICATION,
    }
    ends = {"x": arrow.at, "ax": arrow.at, "y": arrow.end - down, "ay": arrow.start + down}
    both = {"startarrowhead": 2, "startarrowsize": 0.9, "arrowside": "end+start"} if arrow.both else {}
    return look | ends | both | {"xref": "x", "yref": "y", "axref": "x", "ayref": "y"}


def lane_axis(names: Sequence[str], top: float) -> dict[str, Any]:
    """The axis of the lanes' names, the first on top."""
    lanes = {"tickvals": list(range(len(names))), "ticktext": list(names), "range": [len(names) - 0.55, top]}
    return lanes | {"ticks": "", "showgrid": False, "zeroline": False, "fixedrange": True}


def wide_layout(title: str, subtitle: str, height: int) -> dict[str, Any]:
    """The layout of a picture for a projector: larger text, and a line below the title for its assumptions."""
    base = layout(f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>", height)
    large = {
        "title": base["title"] | {"font": {"size": 16}, "pad": {"l": 8, "t": 18}},
        "font": base["font"] | {"size": 13},
    }
    return base | large | {"margin": {"l": 84, "r": 12, "t": 56, "b": 12}, "hovermode": "closest"}


def axis(title: str) -> dict[str, Any]:
    """An axis with a scale."""
    return {
        "title": {"text": title, "standoff": 6, "font": {"size": 13}},
        "gridcolor": colours.GRID,
        "zeroline": False,
        "fixedrange": True,
    }


def model_words(spec: Spec) -> str:
    """`cnn: 405,898 parameters`."""
    return f"{spec.workload}: {spec.workload_row.parameters(spec.options):,} parameters"
