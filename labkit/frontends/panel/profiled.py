"""The tabs of profiled steps: the timeline of all ranks with the communication ledger, and memory by owner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ipywidgets

from labkit import figures
from labkit.analysis.ledger import ledger
from labkit.analysis.profiled import beyond, newest, profiled_steps, resident, write_trace
from labkit.common.text import escape
from labkit.common.units import size
from labkit.figures.charts import timeline
from labkit.figures.tables import ledger_html, outcome_html
from labkit.frontends.panel import widgets
from labkit.frontends.panel.charts import Charts
from labkit.launch.job import ask
from labkit.record.folder import RunFolder
from labkit.record.state import RunState

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
        hint = "Profile one of the next steps"
        self._capture = widgets.Button(description="Profile a step", tooltip=hint, disabled=True)
        self._capture.on_click(lambda _: self._ask())

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
        row = widgets.HBox([*head, self._said])
        row.add_class("labkit-tab-head")
        box = widgets.VBox([row, self.charts.widget, *below])
        box.add_class(name)
        return box


class TimelineTab(_Tab):
    """One profiled step of all ranks, selected or the newest, and its expected communication."""

    def __init__(self, folder: Callable[[], RunFolder | None], lock: AbstractContextManager[Any]):
        super().__init__(folder, lock, Charts({"timeline": lambda state: timeline(state, self._chosen())}, lock))
        self._which = widgets.Dropdown(options=[(_NEWEST, 0)], value=0, description="Step", layout={"width": "150px"})
        self._which.observe(lambda _: self.charts.redraw(), "value")
        hint = "Save a trace for ui.perfetto.dev or chrome://tracing"
        self._export = widgets.Button(description="Save trace", tooltip=hint, disabled=True)
        self._export.on_click(lambda _: self._save())
        self._ledger = widgets.HTML()
        self._ledger.add_class("labkit-comparison")
        self.widget = self._box("labkit-timeline", [self._capture, self._which, self._export], self._ledger)

    def _chosen(self) -> int | None:
        return self._which.value or newest(self._state)

    def _save(self) -> None:
        with self._lock:
            folder = self._folder()
            if folder is not None:
                write_trace(self._state, folder.trace)
                self._say(f"saved as {_near(folder.trace)}")

    def draw(self, state: RunState, final: bool = False) -> None:
        """Updates the tab to the state."""
        self._follow(state)
        steps = profiled_steps(state)
        options = [(_NEWEST, 0), *((f"{step}", step) for step in steps)]
        if list(self._which.options) != options:
            chosen = self._which.value
            self._which.options = options
            self._which.value = chosen if chosen in steps else 0
        self._export.disabled = not steps
        self.charts.draw(state, final)
        html = ledger_html(ledger(state))
        if self._ledger.value != html:
            self._ledger.value = html


class MemoryTab(_Tab):
    """Memory of a step at its peak, by owner and rank, predicted and measured, and its course over one step."""

    def __init__(self, folder: Callable[[], RunFolder | None], lock: AbstractContextManager[Any]):
        names = ("memory_by_owner", "memory_of_step")
        super().__init__(folder, lock, Charts({name: figures.CHARTS[name] for name in names}, lock))
        hint = "Record a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz)"
        self._snapshot = widgets.Button(description="Memory snapshot", tooltip=hint, layout={"display": "none"})
        self._snapshot.on_click(lambda _: self._ask(snapshot=True))
        self._apart, self._outcome = widgets.HTML(), widgets.HTML(layout={})
        self._outcome.add_class("labkit-outcome")
        self.widget = self._box("labkit-memory", [self._capture, self._snapshot, self._apart], self._outcome)

    def draw(self, state: RunState, final: bool = False) -> None:
        """Updates the tab to the state."""
        self._follow(state)
        on_cuda = any(rank.device.startswith("cuda") for rank in state.ranks.values())
        self._snapshot.layout.display = "" if on_cuda else "none"
        self._snapshot.disabled = self._capture.disabled
        self._apart.value = _help(apart(state))
        html = outcome_html(state)
        if self._outcome.value != html:
            self._outcome.value = html
        self._outcome.layout.display = "" if html else "none"
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


def _near(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
