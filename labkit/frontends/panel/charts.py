"""The live charts as a widget that is sent new points only, with inline SVG for a client that cannot show widgets; the
picture of the machine; and the tabs of profiled steps.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from labkit import figures
from labkit.analysis.ledger import ledger
from labkit.analysis.profiled import beyond, newest, profiled_steps, resident, write_trace
from labkit.common.text import escape
from labkit.common.units import size
from labkit.figures.as_plotly import numbers, parts, words
from labkit.figures.as_svg import drawing
from labkit.figures.charts import timeline
from labkit.figures.controls import CONFIG, tools
from labkit.figures.machine import Changes, Film, as_json, film, player, still
from labkit.figures.model import Chart, Drawn, Extent
from labkit.figures.tables import ledger_html, outcome_html
from labkit.frontends.panel import widgets
from labkit.frontends.panel.widgets import HandshakeWidget, program
from labkit.launch.job import ask
from labkit.record.folder import RunFolder
from labkit.record.state import RunState

# ---- incremental chart updates

WHOLE = 400  # points per line when a chart is sent whole
_LOW = 0.4  # of the range of the axis: bars that are lower make it shorter
CAP = 1000  # maximum points per line in a page; beyond it the chart is downsampled and sent whole again


@dataclass
class _Page:
    """One chart as the page has it: per line, how many points of the state it covers and how many points it
    contains."""

    drawn: Drawn
    read: list[int]
    held: list[int]
    last_x: list[float]

    def lacks(self, chart: Chart) -> bool:
        """Whether `chart` must be sent whole because new points alone are not enough."""
        return chart.signature != self.drawn.chart.signature or max(self.held, default=0) >= CAP


class Feed:
    """Builds messages for the page from successive states of one run; call `restart` before another run."""

    def __init__(self, charts: Mapping[str, Callable[[RunState], Chart | None]]) -> None:
        self._charts = charts
        self._pages: dict[str, _Page] = {}
        self._names: list[str] | None = None  # that the page has

    def restart(self) -> None:
        """Makes the next message contain every chart whole."""
        self._pages.clear()
        self._names = None

    def message(self, state: RunState) -> dict[str, Any] | None:
        """The names of the charts that the run has, and what has changed since the last message; None if nothing
        has."""
        charts = {name: chart for name, make in self._charts.items() if (chart := make(state)) is not None}
        updates = [update for name, chart in charts.items() if (update := self._update(name, chart))]
        names, self._names = self._names, [*charts]
        changed = updates or names != self._names
        return {"kind": "charts", "names": self._names, "charts": updates} if changed else None

    def _update(self, name: str, chart: Chart) -> dict[str, Any] | None:
        page = self._pages.get(name)
        if page is None or page.lacks(chart):
            return {"name": name, "whole": self._whole(name, chart)}
        more = _more(page, chart)
        return {"name": name, "more": more} if more else None

    def _whole(self, name: str, chart: Chart) -> dict[str, Any]:
        drawn = chart.drawn(WHOLE)
        old = self._pages.get(name)
        if chart.lines and old is not None and old.drawn.chart.y == chart.y:  # downsampled: keep the range of the axes
            drawn = Drawn(chart, drawn.points, old.drawn.x.or_(drawn.x), old.drawn.y.or_(drawn.y))
        self._pages[name] = _Page(
            drawn,
            read=[len(line) for line in chart.lines],
            held=[len(xs) for xs, _ in drawn.points],
            last_x=[xs[-1] if xs else 0.0 for xs, _ in drawn.points],
        )
        data, layout = parts(drawn)
        return {"label": chart.title, "data": data, "layout": layout}


def _more(page: _Page, chart: Chart) -> dict[str, Any] | None:
    """The new points of each line (reduced to one or two), new heights of bars, and axis ranges that have grown."""
    points = []
    before, x, y = page.drawn, page.drawn.x, page.drawn.y
    for index, line in enumerate(chart.lines):
        if len(line) == page.read[index]:
            continue
        xs, ys = line.points(page.read[index], limit=1)
        if xs[0] < page.last_x[index]:  # the rank was restarted
            xs, ys = [xs[0], *xs], [None, *ys]
        page.read[index], page.last_x[index] = len(line), xs[-1]
        page.held[index] += len(xs)
        x, y = x.with_(xs), y.with_(ys)
        points.append([index, numbers(xs), numbers(ys), words(chart.y, ys)])
    if chart.bars and chart.bar_height < _LOW * y.high:
        y = Extent()  # the first steps are long: the bars of the others would be low for ever
    page.drawn = Drawn(chart, (), x, y.with_([chart.bar_height]))
    more = {
        "points": points,
        "bars": (
            [[numbers(bars.values), words(chart.y, bars.values)] for bars in chart.bars]
            if chart.bars != before.chart.bars
            else []
        ),
        "x": None if page.drawn.x_span == before.x_span else list(page.drawn.x_span),
        "y": None if page.drawn.y_span == before.y_span else list(page.drawn.y_span),
    }
    return more if any(more.values()) else None


# ---- the widgets

_PATIENCE = 8.0  # seconds to wait for a page's answer before plain SVG is shown
_SVG_SECONDS = 1.0
_SVG_POINTS = 100  # per line: an SVG is sent whole at every update


def _live(name: str) -> Callable[[RunState], Chart | None]:
    """The chart of a run that has data for it: axes without data say nothing."""

    def made(state: RunState) -> Chart | None:
        chart = figures.chart(name, state) if name in figures.live(state) else None
        return chart if chart and (any(any(bars.values) for bars in chart.bars) or any(map(len, chart.lines))) else None

    return made


LIVE = {name: _live(name) for name in (*figures.LIVE, "experts")}


@lru_cache(maxsize=1)
def _plotly() -> tuple[str, bytes]:
    """The version of the installed plotly, and its plotly.js, gzipped."""
    import plotly
    from plotly.offline import get_plotlyjs

    return plotly.__version__, gzip.compress(get_plotlyjs().encode(), 6)


class _ChartsWidget(HandshakeWidget):
    """The browser side: requests "plotly" once per page, then sends "ready" for charts."""

    _esm = program("charts.js", tools())
    plotly_version = traitlets.Unicode().tag(sync=True)
    plotly_config = traitlets.Dict(CONFIG).tag(sync=True)


class Live:
    """A widget with a program that draws a state, and plain SVG for a client in which no page answers.

    Display `widget`; `draw` updates it to a state, from any thread. A subclass says what is sent (`_message`, None if
    nothing has changed; `_restart` makes the next one whole), and what the plain SVG is.

    `lock` (an `RLock`) is held while a state is read; hold it while changing the state that was drawn last.
    """

    def __init__(self, page: HandshakeWidget, lock: AbstractContextManager[Any] | None = None) -> None:
        self.page = page
        self.page.on_msg(self._heard)
        self.plain = widgets.HTML(layout=widgets.HIDDEN)
        self.widget = widgets.VBox([self.page.box, self.plain])
        self._lock = lock or threading.RLock()
        self._state = RunState()
        self._shown: float | None = None
        self._here = self._ready = False
        self._next_svg = 0.0
        self._answers: dict[str, Callable[[], None]] = {
            "pong": self._is_here,
            "ready": self._send_all,
            "failed": self._has_failed,
        }

    def _message(self, state: RunState) -> dict[str, Any] | None:
        raise NotImplementedError

    def _restart(self) -> None:
        raise NotImplementedError

    def _plain(self, state: RunState) -> str:
        raise NotImplementedError

    def shown(self) -> None:
        """Call this just before the widget is displayed: from then on it waits for a page."""
        self._shown = time.monotonic()
        widgets.later(_PATIENCE + 0.1, self.redraw)

    def restart(self, state: RunState) -> None:
        with self._lock:
            self._restart()
            self.draw(state)

    def redraw(self) -> None:
        """Updates the page to the state that was drawn last, after a choice of the user or when no page has come."""
        with self._lock:
            self.draw(self._state, final=True)

    def draw(self, state: RunState, final: bool = False) -> None:
        """Updates the page to `state`: sends what is new. Plain SVG is updated once per second and if `final`."""
        with self._lock:
            self._state = state
            if self._ready:
                message = self._message(state)
                if message:
                    self.page.send(message)
            elif self.is_plain and (final or time.monotonic() >= self._next_svg):
                self._next_svg = time.monotonic() + _SVG_SECONDS
                widgets.show(self.plain, True)
                self.plain.value = f'<div class="labkit-plain">{self._plain(state)}</div>'

    @property
    def is_plain(self) -> bool:
        """Whether plain SVG is shown because no page has answered in time after the display."""
        return not self._here and self._shown is not None and time.monotonic() - self._shown > _PATIENCE

    def _heard(self, _, message, buffers) -> None:
        # Answered in a thread: a thread that holds the lock to read a long run must not block the kernel.
        answer = self._answers.get(message.get("kind"))
        if answer:
            widgets.in_thread("answer to a page", answer)

    def _is_here(self) -> None:
        with self._lock:
            self._here = True
            widgets.show(self.plain, False)

    def _send_all(self) -> None:
        with self._lock:
            self._is_here()  # again, if plotly.js has arrived after "failed"
            self._ready = True
            self._restart()
            self.draw(self._state)

    def _has_failed(self) -> None:
        with self._lock:
            self._here = self._ready = False
            self._shown = time.monotonic() - 2 * _PATIENCE
            self.redraw()


class Charts(Live):
    """Live charts of one run: a mapping from a name to the function that builds the chart from the state, or returns
    None if the run has none."""

    def __init__(
        self,
        charts: Mapping[str, Callable[[RunState], Chart | None]] = LIVE,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        import plotly

        super().__init__(_ChartsWidget(plotly_version=plotly.__version__), lock)
        self.widget.add_class("labkit-board")
        self._charts = charts
        self._feed = Feed(charts)
        self._answers["plotly"] = self._send_plotly

    def draw(self, state: RunState, final: bool = False) -> None:
        """As for any widget; if `final`, each chart is sent whole, with points that were left out while it grew."""
        with self._lock:
            if final:
                self._feed.restart()
            super().draw(state, final)

    def _message(self, state: RunState) -> dict[str, Any] | None:
        return self._feed.message(state)

    def _restart(self) -> None:
        self._feed.restart()

    def _plain(self, state: RunState) -> str:
        charts = filter(None, (make(state) for make in self._charts.values()))
        return "".join(f"<div>{drawing(chart.drawn(_SVG_POINTS), 560, 220)}</div>" for chart in charts)

    def _send_plotly(self) -> None:
        _, packed = _plotly()
        self.page.send({"kind": "plotly"}, [packed])


# ---- the picture of the machine as a widget: a page receives a film of one step, plays it while the run trains, and is
# sent only what changes

_PACE = 20_000  # bytes of films per second: after a long one only words are sent for some time


class _MachineWidget(HandshakeWidget):
    """The browser side: sends "ready" for the film, and shows `still` until it comes."""

    _esm = program("machine_widget.js", player())
    still = traitlets.Unicode().tag(sync=True)


class MachinePicture(Live):
    """The picture of the machine in one run: before it what is predicted, then the newest profiled step, over and over
    for as long as steps follow each other."""

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        super().__init__(_MachineWidget(), lock)
        self.widget.add_class("labkit-machine-box")
        self._sent: Film | None = None  # what the page has
        self._moved = False
        self._next = 0.0  # when the next film may be sent

    def shown(self) -> None:
        """As for any widget; a still comes with it, because a busy page asks for a film only much later."""
        self.page.still = self._plain(self._state)
        super().shown()

    def _restart(self) -> None:
        self._sent = None

    def _message(self, state: RunState) -> dict[str, Any] | None:
        shown, before, moves = film(state), self._sent, moving(state)
        continues = before is not None and _continues(shown, before)
        if before is None:
            self.page.still = ""  # a page that is reloaded should not begin with it
        if before is None or not (continues or (time.monotonic() < self._next and not state.over)):
            self._sent, self._moved = shown, moves
            message = {"kind": "film", "moves": moves, **as_json(shown)}
            self._next = time.monotonic() + len(json.dumps(message)) / _PACE
            return message
        changed = {
            name: shape
            for name, shape in shown.shapes.items()
            if name in before.shapes and before.shapes[name] != shape and (continues or shape[0] == "text")
        }
        self._sent = replace(before, shapes=before.shapes | changed)
        moved, self._moved = self._moved, moves
        if not changed and moves == moved:
            return None
        attributes: Changes = {name: shape[1] for name, shape in changed.items()}
        return {"kind": "shapes", "moves": moves, "shapes": attributes, "label": shown.label}

    def _plain(self, state: RunState) -> str:
        shown = film(state)
        return still(shown, shown.peak)


def moving(state: RunState) -> bool:
    """Whether the ranks finish steps now, as far as is known: none of them waits without progress."""
    waits = any(rank.waiting or rank.silent for rank in state.ranks.values())
    return state.status.state == "running" and state.step > 0 and not waits


def _continues(shown: Film, before: Film) -> bool:
    """Whether only texts and places of the same shapes have changed."""
    same = shown.frames is before.frames and shown.height == before.height
    return same and shown.shapes.keys() == before.shapes.keys()


# ---- the tabs of profiled steps: the timeline of all ranks with the communication ledger, and memory by owner

_NEWEST = "newest"


class _Tab:
    """The part that both tabs share: a row of buttons with a message, and charts below.

    `lock` is held while the state is read, and while it changes; `folder` returns the folder of the run that the state
    is of, or None.
    """

    def __init__(self, folder: Callable[[], RunFolder | None], lock: AbstractContextManager[Any], charts: Charts):
        self._folder, self._lock, self.charts = folder, lock, charts
        self.live = True  # False for a recording, of which no step can be profiled
        self._state = RunState()
        self._waits_for = 0
        self._said = widgets.HTML()
        self._capture = widgets.button("Profile a step", "Profile one of the next steps", self._ask, disabled=True)

    def _ask(self, snapshot: bool = False) -> None:
        with self._lock:
            folder = self._folder()
            if folder is None or self._state.over or not self.live:
                return
            self._waits_for = ask(folder, self._state, snapshot=snapshot)
            self._say(f"step {self._waits_for} will be profiled")

    def _say(self, text: str) -> None:
        self._said.value = _help(text)

    def _follow(self, state: RunState) -> None:
        """Updates the buttons, and the message when the requested step has been profiled."""
        self._state = state
        self._capture.disabled = state.over or not state.step or not self.live
        if self._waits_for and any(step >= self._waits_for for step in profiled_steps(state)):
            self._say(f"profiled step {max(profiled_steps(state))}")
            self._waits_for = 0

    def _box(self, name: str, head: list[ipywidgets.Widget], *below: ipywidgets.Widget) -> ipywidgets.Box:
        row = widgets.HBox([*head, self._said], css="labkit-tab-head")
        return widgets.VBox([row, self.charts.widget, *below], css=name)


class TimelineTab(_Tab):
    """One profiled step of all ranks, selected or the newest, and its expected communication."""

    def __init__(self, folder: Callable[[], RunFolder | None], lock: AbstractContextManager[Any]):
        super().__init__(folder, lock, Charts({"timeline": lambda state: timeline(state, self._chosen())}, lock))
        self._which = widgets.dropdown("Step", [(_NEWEST, 0)], 0, layout={"width": "150px"})
        self._which.observe(lambda _: self.charts.redraw(), "value")
        hint = "Save a trace for ui.perfetto.dev or chrome://tracing"
        self._export = widgets.button("Save trace", hint, self._save, disabled=True)
        self._ledger = widgets.HTML(css="labkit-comparison")
        self.widget = self._box("labkit-timeline", [self._capture, self._which, self._export], self._ledger)

    def _chosen(self) -> int | None:
        return self._which.value or newest(self._state)

    def _save(self) -> None:
        with self._lock:
            folder = self._folder()
            if folder is not None:
                write_trace(self._state, folder.trace)
                here = folder.trace.is_relative_to(Path.cwd())
                self._say(f"saved as {folder.trace.relative_to(Path.cwd()) if here else folder.trace}")

    def draw(self, state: RunState, final: bool = False) -> None:
        self._follow(state)
        steps = profiled_steps(state)
        options = [(_NEWEST, 0), *((f"{step}", step) for step in steps)]
        if list(self._which.options) != options:
            chosen = self._which.value
            self._which.options = options
            self._which.value = chosen if chosen in steps else 0
        self._export.disabled = not steps
        self.charts.draw(state, final)
        self._ledger.value = ledger_html(ledger(state))


class MemoryTab(_Tab):
    """Memory of a step at its peak, by owner and rank, predicted and measured, and its course over one step."""

    def __init__(self, folder: Callable[[], RunFolder | None], lock: AbstractContextManager[Any]):
        names = ("memory_by_owner", "memory_of_step")
        super().__init__(folder, lock, Charts({name: figures.CHARTS[name] for name in names}, lock))
        hint = "Record a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz)"
        self._snapshot = widgets.button(
            "Memory snapshot", hint, lambda: self._ask(snapshot=True), layout=widgets.HIDDEN
        )
        self._apart, self._outcome = widgets.HTML(), widgets.HTML(layout={}, css="labkit-outcome")
        self.widget = self._box("labkit-memory", [self._capture, self._snapshot, self._apart], self._outcome)

    def draw(self, state: RunState, final: bool = False) -> None:
        self._follow(state)
        on_cuda = any(rank.device.startswith("cuda") for rank in state.ranks.values())
        widgets.show(self._snapshot, on_cuda)
        self._snapshot.disabled = self._capture.disabled
        self._apart.value = _help(apart(state))
        self._outcome.value = outcome_html(state)
        widgets.show(self._outcome, bool(self._outcome.value))
        self.charts.draw(state, final)


def apart(state: RunState) -> str:
    """Memory that no tensor explains: on CUDA what is in use beyond PyTorch's reserved memory, on the CPU the
    processes' RSS.
    """
    ranks = [rank for _, rank in sorted(state.ranks.items())]
    if any(rank.device.startswith("cuda") for rank in ranks):
        sizes = [f"rank {rank.rank} {size(beyond(state, rank)[1])}" for rank in ranks[:8]]
        prefix = "GPU memory in use beyond what PyTorch has reserved (CUDA context, NCCL, other processes): "
        return prefix + ", ".join(sizes) if sizes else ""
    sizes = [f"rank {rank} {size(count)}" for rank, count in list(resident(state).items())[:8]]
    return "Resident memory (RSS) of the processes: " + ", ".join(sizes) if sizes else ""


def _help(text: str) -> str:
    return f'<div class="labkit-help" role="status">{escape(text)}</div>'
