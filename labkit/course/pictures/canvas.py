"""Shared by the pictures: boxes, text, and a layout for light and dark pages."""

from __future__ import annotations

from typing import Any

from labkit.figures import colours
from labkit.figures.as_plotly import plain_look

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
