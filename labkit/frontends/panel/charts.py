"""The live charts as a widget, and inline SVG for a front end that cannot show it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import anywidget
import ipywidgets
import traitlets

from labkit import figures
from labkit.figures.as_svg import drawing
from labkit.figures.model import Chart
from labkit.frontends.panel.feed import Feed
from labkit.record.state import RunState

STATIC = Path(__file__).parent / "static"
_PATIENCE = 8.0  # seconds that a page may take to say "here" before it is given plain SVG
LIVE = {name: figures.CHARTS[name] for name in figures.LIVE}
_SVG_SECONDS = 1.0
_SVG_POINTS = 100  # of a line: plain pictures are sent whole, each time


@lru_cache(maxsize=1)
def _plotly() -> tuple[str, bytes]:
    """plotly.js of the installed plotly, gzipped, and its version."""
    import plotly
    from plotly.offline import get_plotlyjs

    return plotly.__version__, gzip.compress(get_plotlyjs().encode(), 6)


class _Page(anywidget.AnyWidget):
    """The front end: it says "here" when it is drawn, asks for "plotly" once a page, and is "ready" for charts then."""

    _esm = (STATIC / "charts.js").read_text(encoding="utf-8")
    plotly_version = traitlets.Unicode().tag(sync=True)


class Charts:
    """Charts of one run, live: by name, what makes each of them from the state.

    `widget` goes on screen; `draw` brings it up to the state, from any thread.

    Who changes the state that was drawn last holds `lock` meanwhile.
    """

    def __init__(self, charts: Mapping[str, Callable[[RunState], Chart]] = LIVE) -> None:
        import plotly

        self.page = _Page(plotly_version=plotly.__version__)
        self.page.on_msg(self._heard)
        self.plain = ipywidgets.HTML(layout={"display": "none"})
        self.widget = ipywidgets.VBox([self.page, self.plain])
        self.widget.add_class("labkit-board")
        self.lock = threading.RLock()
        self._charts = charts
        self._feed = Feed(charts)
        self._state = RunState()
        self._shown: float | None = None
        self._here = self._ready = False
        self._next_svg = 0.0

    def shown(self) -> None:
        """To be called when the widget goes on screen: from now on a page is waited for."""
        self._shown = time.monotonic()
        timer = threading.Timer(_PATIENCE + 0.1, lambda: self.draw(self._state, final=True))
        timer.daemon = True
        timer.start()

    def restart(self, state: RunState) -> None:
        """Shows another run."""
        with self.lock:
            self._feed.restart()
            self.draw(state)

    def draw(self, state: RunState, final: bool = False) -> None:
        """Brings the page up to `state`: new points only; the plain pictures once a second, and when `final`."""
        with self.lock:
            self._state = state
            if self._ready:
                message = self._feed.message(state)
                if message:
                    self.page.send(message)
            elif self.is_plain and (final or time.monotonic() >= self._next_svg):
                self._next_svg = time.monotonic() + _SVG_SECONDS
                self.plain.layout.display = ""
                drawn = (chart(state).drawn(_SVG_POINTS) for chart in self._charts.values())
                pictures = "".join(f"<div>{drawing(one, 560, 220)}</div>" for one in drawn)
                self.plain.value = f'<div class="labkit-plain">{pictures}</div>'

    @property
    def is_plain(self) -> bool:
        """Whether this front end is given SVG: no page has said that it is here, long after the display."""
        return not self._here and self._shown is not None and time.monotonic() - self._shown > _PATIENCE

    def _heard(self, _, message, buffers) -> None:
        # A page is answered in a thread: whoever reads a long run's files just now must not keep the kernel waiting.
        answers = {"here": self._is_here, "plotly": self._send_plotly, "ready": self._tell_all, "failed": self._has_failed}
        answer = answers.get(message.get("kind"))
        if answer:
            threading.Thread(target=answer, daemon=True).start()

    def _is_here(self) -> None:
        self._here = True
        self.plain.layout.display = "none"

    def _send_plotly(self) -> None:
        _, packed = _plotly()
        self.page.send({"kind": "plotly"}, [packed])

    def _tell_all(self) -> None:
        with self.lock:
            self._ready = True
            self._feed.restart()
            self.draw(self._state)

    def _has_failed(self) -> None:
        with self.lock:
            self._here = self._ready = False
            self._shown = time.monotonic() - 2 * _PATIENCE
            self.draw(self._state, final=True)
