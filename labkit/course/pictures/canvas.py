"""What the pictures of splits, pipelines and meshes share: boxes, words, and a layout that reads on light and dark pages."""

from __future__ import annotations

from typing import Any

from labkit.figures import colours
from labkit.figures.as_plotly import FONT

EVERY = "rgba(128, 128, 128, 0.22)"  # what every rank has
HIDDEN = {"visible": False, "fixedrange": True}
SCALED = {"gridcolor": colours.GRID, "zeroline": False}
_DARK = (0, 2, 5)  # ranks whose colour takes white letters


def layout(title: str, height: float) -> dict[str, Any]:
    """The layout that all have: a title at the top left, no painted background, greys for letters; `height` in pixels."""
    return {
        "title": {"text": title, "x": 0, "xref": "container", "y": 1, "yanchor": "top", "font": {"size": 13}, "pad": {"l": 8, "t": 7}},
        "height": round(height),
        "margin": {"l": 8, "r": 8, "t": 34, "b": 8},
        "font": {"family": FONT, "size": 11, "color": colours.INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


def box(x: float, y: float, width: float, height: float, colour: str) -> dict[str, Any]:
    """A filled rectangle from its corner."""
    corners = {"x0": x, "y0": y, "x1": x + width, "y1": y + height}
    return {"type": "rect", **corners, "fillcolor": colour, "line": {"width": 0}, "layer": "below"}


def note(x: float, y: float, text: str, size: int, colour: str | None = None, anchor: str = "center") -> dict[str, Any]:
    """Words at a place, `anchor` of them there; in the page's grey where no colour is named."""
    font = {"size": size} | ({"color": colour} if colour else {})
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": font, "xanchor": anchor, "yanchor": "middle"}


def ink(owner: int | None) -> str | None:
    """What is read on the colour of a rank; the page's grey where `owner` is None, since all have it."""
    return None if owner is None else "#FFFFFF" if owner % len(colours.RANKS) in _DARK else "#000000"
