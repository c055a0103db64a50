"""The live charts as a widget, with inline SVG for a notebook client that cannot show widgets."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import ipywidgets
import traitlets

from labkit import figures
from labkit.figures.as_svg import drawing
from labkit.figures.controls import CONFIG
from labkit.figures.model import Chart
from labkit.frontends.panel.feed import Feed
from labkit.frontends.panel.handshake import HandshakeWidget, program
from labkit.record.state import RunState

_PATIENCE = 8.0  # seconds to wait for a page's answer before plain SVG is shown
_SVG_SECONDS = 1.0
_SVG_POINTS = 100  # per line: an SVG is sent whole at every update


def _live(name: str) -> Callable[[RunState], Chart | None]:
    return lambda state: figures.chart(name, state) if name in figures.live(state) else None


LIVE = {name: _live(name) for name in (*figures.LIVE, "experts")}


@lru_cache(maxsize=1)
def _plotly() -> tuple[str, bytes]:
    """The version of the installed plotly, and its plotly.js, gzipped."""
    import plotly
    from plotly.offline import get_plotlyjs

    return plotly.__version__, gzip.compress(get_plotlyjs().encode(), 6)


class _Page(HandshakeWidget):
    """The browser side: requests "plotly" once per page, then sends "ready" for charts."""

    _esm = program("charts.js")
    plotly_version = traitlets.Unicode().tag(sync=True)
    plotly_config = traitlets.Dict(CONFIG).tag(sync=True)


class Charts:
    """Live charts of one run: a mapping from a name to the function that builds the chart from the state, or returns
    None if the run has none.

    Display `widget`; `draw` updates it to a state, from any thread.

    `lock` (an `RLock`) is held while a state is read; hold it while changing the state that was drawn last.
    """

    def __init__(
        self,
        charts: Mapping[str, Callable[[RunState], Chart | None]] = LIVE,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        import plotly

        self.page = _Page(plotly_version=plotly.__version__)
        self.page.on_msg(self._heard)
        self.plain = ipywidgets.HTML(layout={"display": "none"})
        self.widget = ipywidgets.VBox([self.page.box, self.plain])
        self.widget.add_class("labkit-board")
        self._lock = lock or threading.RLock()
        self._charts = charts
        self._feed = Feed(charts)
        self._state = RunState()
        self._shown: float | None = None
        self._here = self._ready = False
        self._next_svg = 0.0

    def shown(self) -> None:
        """Call this when the widget is displayed: from then on it waits for a page."""
        self._shown = time.monotonic()
        timer = threading.Timer(_PATIENCE + 0.1, self.redraw)
        timer.daemon = True
        timer.start()

    def restart(self, state: RunState) -> None:
        """Shows another run."""
        with self._lock:
            self._feed.restart()
            self.draw(state)

    def redraw(self) -> None:
        """Updates the page to the state that was drawn last, after a choice of the user or when no page has come."""
        with self._lock:
            self.draw(self._state, final=True)

    def draw(self, state: RunState, final: bool = False) -> None:
        """Updates the page to `state`: sends new points only. Plain SVG is updated once per second and if `final`."""
        with self._lock:
            self._state = state
            if self._ready:
                message = self._feed.message(state)
                if message:
                    self.page.send(message)
            elif self.is_plain and (final or time.monotonic() >= self._next_svg):
                self._next_svg = time.monotonic() + _SVG_SECONDS
                self.plain.layout.display = ""
                charts = filter(None, (make(state) for make in self._charts.values()))
                pictures = "".join(f"<div>{drawing(one.drawn(_SVG_POINTS), 560, 220)}</div>" for one in charts)
                self.plain.value = f'<div class="labkit-plain">{pictures}</div>'

    @property
    def is_plain(self) -> bool:
        """Whether plain SVG is shown because no page has answered in time after the display."""
        return not self._here and self._shown is not None and time.monotonic() - self._shown > _PATIENCE

    def _heard(self, _, message, buffers) -> None:
        # Answered in a thread: a thread that holds the lock to read a long run must not block the kernel.
        answers = {
            "pong": self._is_here,
            "plotly": self._send_plotly,
            "ready": self._send_all,
            "failed": self._has_failed,
        }
        answer = answers.get(message.get("kind"))
        if answer:
            threading.Thread(target=answer, daemon=True).start()

    def _is_here(self) -> None:
        with self._lock:
            self._here = True
            self.plain.layout.display = "none"

    def _send_plotly(self) -> None:
        _, packed = _plotly()
        self.page.send({"kind": "plotly"}, [packed])

    def _send_all(self) -> None:
        with self._lock:
            self._is_here()  # again, if plotly.js has arrived after "failed"
            self._ready = True
            self._feed.restart()
            self.draw(self._state)

    def _has_failed(self) -> None:
        with self._lock:
            self._here = self._ready = False
            self._shown = time.monotonic() - 2 * _PATIENCE
            self.redraw()
