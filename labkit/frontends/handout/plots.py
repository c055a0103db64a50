"""The figures of a page: a placeholder for each, with a static picture if there is one, and the data of all in one
block.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import lru_cache
from typing import Any

from bs4 import BeautifulSoup

from labkit import figures
from labkit.common.text import escape
from labkit.figures.as_plotly import inert
from labkit.record.state import RunState

_HEIGHT = 450  # px of a figure without a height; plotly's default
_CHART = 300  # px of a run's chart
_STILL_SIZE = 20_000  # characters; larger static pictures are omitted
_LANE = 30  # px of a lane in a timeline
_STILL = 100  # points per line in a static picture, which is visible only until plotly draws


class Plots:
    """The figures of one page, in the order in which they were added."""

    def __init__(self) -> None:
        self._figures: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._figures)

    def add(self, figure: dict[str, Any], still: str = "") -> str:
        """Adds a plotly figure, given as plain values, and returns its placeholder; `still` is an `<svg>` shown until
        plotly draws.
        """
        figure = inert(figure)
        self._figures.append(figure)
        layout = figure.get("layout") or {}
        height = layout.get("height")
        height = int(height) if isinstance(height, (int, float)) and 40 <= height <= 4000 else _HEIGHT
        label = escape(_plain(layout.get("title")) or "figure", quote=True)
        waits = "" if still else f'<p class="waits">{label}: needs JavaScript.</p>'
        number = len(self._figures) - 1
        return (
            f'<figure class="plot" data-figure="{number}" style="min-height:{height}px" role="img"'
            f' aria-label="{label}"><div class="still">{still}{waits}</div></figure>'
        )

    def charts(self, state: RunState) -> str:
        """The placeholders of all charts of a run, including those of profiled steps if there are any."""
        places = []
        for name in figures.of_run(state):
            figure = json.loads(figures.figure(name, state).to_json())
            lanes = len(figure["layout"]["yaxis"].get("categoryarray", ()))
            figure["layout"]["height"] = 110 + _LANE * lanes if lanes else _CHART
            still = figures.svg(name, state, points=_STILL)
            wide = ' class="wide"' if name == "timeline" else ""
            places.append(f"<div{wide}>{self.add(figure, still if len(still) <= _STILL_SIZE else '')}</div>")
        return f'<div class="charts">{"".join(places)}</div>'

    def block(self) -> str:
        """The data of all figures: JSON, gzip, base64."""
        return packed(json.dumps(self._figures, separators=(",", ":"), allow_nan=False))


def packed(text: str) -> str:
    """A text as gzip in base64, which contains no HTML special characters."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


@lru_cache(maxsize=1)
def plotly_js() -> str:
    """The source of plotly.js from the installed plotly."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _plain(title: Any) -> str:
    """A figure's title without markup."""
    text = title.get("text") if isinstance(title, dict) else title
    return BeautifulSoup(str(text or ""), "html.parser").get_text(" ", strip=True)
