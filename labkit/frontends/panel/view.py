"""The view of one run: state, progress, finding, charts and logs, updated by one thread; what stays when it is over."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import ipywidgets

from labkit import figures
from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.analysis.summary import summarise
from labkit.common.text import escape, visible_log
from labkit.common.units import counted
from labkit.figures import machine, rank_colour
from labkit.figures.controls import CONFIG
from labkit.figures.tables import findings_html, ledger_html, ranks_html, speed_html
from labkit.frontends.panel import widgets
from labkit.frontends.panel.charts import Charts, Live, MachinePicture, MemoryTab, TimelineTab
from labkit.frontends.panel.predict import Before
from labkit.frontends.panel.recorded import Replay, what
from labkit.frontends.panel.widgets import (
    STATIC,
    HandshakeWidget,
    Presentation,
    finding_html,
    program,
    progress_html,
    sentence_html,
    state_html,
    tone_of,
    what_html,
)
from labkit.plan.spec import Spec
from labkit.record.documents import Plan, SpecFields, plain
from labkit.record.files import LogTail
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.follow import Follower, Recording
from labkit.record.state import RunState
from labkit.runs.handle import Run
from labkit.runs.notebook import headless

# ---- the log view: sends new lines of every rank's output to the page, which keeps a bounded number; a search reads
# whole files

_FRESH = 1000  # lines sent to a new page
_AT_ONCE = 200  # maximum lines per redraw; the newest are sent
_FOUND = 500  # maximum matches shown for a search
_NOTHING = {"rank": "", "stream": "", "query": ""}  # the default filter: all ranks, both streams, no search


class _Page(HandshakeWidget):
    _esm = program("logs.js")


class Logs:
    """The output of one run's ranks. Display `widget`; `draw` sends it the new lines, from any thread."""

    def __init__(self) -> None:
        self.page = _Page()
        self.page.on_msg(self._heard)
        self.widget = self.page.box
        self.widget.add_class("labkit-log-box")
        self._lock = threading.RLock()
        self._folder: RunFolder | None = None
        self._remark = ""
        self._tails: dict[tuple[int, str], LogTail] = {}
        self._sent: dict[tuple[int, str], int] = {}
        self._wanted = _NOTHING
        self._ready = False

    def restart(self, folder: RunFolder | None, nproc: int, remark: str = "") -> None:
        """Shows another run, or none; `remark` is shown next to the number of lines."""
        with self._lock:
            self._folder, self._remark = folder, remark
            keys = [(rank, stream) for rank in range(nproc) for stream in STREAMS] if folder else []
            self._tails = {key: folder.log_tail(*key, keep=_FRESH) for key in keys}
            self._wanted = _NOTHING
            self._begin()

    def draw(self, over: bool = False) -> None:
        """Reads new lines and sends the newest of those selected; if `over`, also a last line without a newline."""
        with self._lock:
            for tail in self._tails.values():
                tail.poll()
            if not self._ready or self._wanted["query"]:
                return
            lines = [line for key in self._shown() for line in self._new(key, _AT_ONCE)]
            if over:
                lines += [
                    [*key, visible_log(tail.partial), None]
                    for key, tail in self._tails.items()
                    if key in self._shown() and tail.partial
                ]
            if lines:
                self._send(lines, self._count())

    def _new(self, key: tuple[int, str], most: int) -> list[list[Any]]:
        tail = self._tails[key]
        wanted = self._sent[key]
        first, texts = tail.since(max(wanted, tail.count - max(1, most // len(self._shown()))))
        self._sent[key] = tail.count
        lines = [[*key, visible_log(text), None] for text in texts]
        if first > wanted:
            passed = f"… {counted(first - wanted, 'line')} of rank {key[0]} not shown; Search reads the whole log file"
            lines.insert(0, [None, "", passed, None])
        return lines

    def _begin(self) -> None:
        """Sends the page the lines of the current selection, from the beginning."""
        self._sent = dict.fromkeys(self._tails, 0)
        if not self._ready:
            return
        for tail in self._tails.values():
            tail.poll()
        self._send_fresh([line for key in self._shown() for line in self._new(key, _FRESH)], self._count())

    def _send_fresh(self, lines: list[list[Any]], note: str) -> None:
        ranks = sorted({rank for rank, _ in self._tails})
        self._send(
            lines, note, fresh=True, wanted=self._wanted, ranks=ranks, colours=[rank_colour(rank) for rank in ranks]
        )

    def _found(self, folder: RunFolder, keys: list[tuple[int, str]], query: str) -> tuple[list[list[Any]], str]:
        lines: list[list[Any]] = []
        for rank, stream in keys:
            found = folder.search_log(rank, stream, query, _FOUND)
            lines += [[rank, stream, visible_log(text), number + 1] for number, text in found]
        more = len(lines) > _FOUND
        return lines[:_FOUND], f"first {_FOUND} matching lines" if more else f"{counted(len(lines), 'line')} found"

    def _shown(self) -> list[tuple[int, str]]:
        rank, stream = self._wanted["rank"], self._wanted["stream"]
        return [key for key in self._tails if rank in ("", str(key[0])) and stream in ("", key[1])]

    def _count(self) -> str:
        count = counted(sum(self._tails[key].count for key in self._shown()), "line")
        return f"{count} · {self._remark}" if self._remark else count

    def _send(self, lines: list[list[Any]], note: str, **more: Any) -> None:
        self.page.send({"kind": "lines", "lines": lines, "note": note} | more)

    def _heard(self, _, message, buffers) -> None:
        if message.get("kind") in ("ready", "show"):  # in a thread, because a search reads whole files
            widgets.in_thread("answer to a page", self._show, message)

    def _show(self, message: dict[str, Any]) -> None:
        """A new view is "ready": its message selects nothing, and it receives what the view before it showed."""
        with self._lock:
            wanted = {name: str(message.get(name, before)) for name, before in self._wanted.items()}
            self._ready, self._wanted = True, wanted
            folder, keys = self._folder, self._shown()
            if folder is None or not wanted["query"]:
                self._begin()
                return
        found = self._found(folder, keys, wanted["query"])  # without the lock, so that `draw` can go on
        with self._lock:
            if self._wanted is wanted:
                self._send_fresh(*found)


# ---- what stays in the notebook


class StaticFigures:
    """Two empty outputs below a panel, filled with the static figures and the table of a run when it ends.

    They can be updated until the page is reloaded; after that they keep their last contents, under the run's name. They
    are for readers without a kernel: where the panel is alive, its style sheet hides them.
    """

    def __init__(self) -> None:
        from IPython.display import display

        blank = {"text/html": "", "text/plain": ""}
        self._figure, self._table = (display(blank, raw=True, display_id=True) for _ in range(2))

    def fill(self, name: str, state: RunState) -> None:
        """Shows a run's figures and table, which need no widget, kernel or network."""
        self._figure.update(figures_bundle(name, state), raw=True)
        self._table.update(table_bundle(name, state), raw=True)


def display_static(name: str, state: RunState) -> None:
    """Displays a run's table and figures as static outputs of the current cell."""
    from IPython.display import display

    display(table_bundle(name, state), raw=True)
    display(figures_bundle(name, state), raw=True)


def figures_bundle(name: str, state: RunState) -> dict[str, Any]:
    """All charts of a run, both as plotly and as inline SVG; the notebook client shows the format it supports."""
    shown = figures.of_run(state)
    pictures = machine.stills(state) + "".join(figures.svg(name, state) for name in shown)
    plotly = json.loads(figures.overview(state).to_json()) | {"config": CONFIG}
    text = f"{', '.join(shown)} of {name}: {state.words}"
    return {"application/vnd.plotly.v1+json": plotly, "text/html": f"<div>{pictures}</div>", "text/plain": text}


def table_bundle(name: str, state: RunState) -> dict[str, Any]:
    """A run's findings, its table of ranks and its communication ledger."""
    html = findings_html(findings(state)) + ranks_html(name, state) + ledger_html(ledger(state))
    told = f'<div class="labkit-static">{html}</div>'
    return {"text/html": told, "text/plain": json.dumps(plain(summarise(state, name)), indent=2)}


# ---- the view of one run

_READ = 0.1  # seconds between two reads of the run folder
_REDRAW = 0.25  # seconds between two redraws, or so many times as long as one takes:
_REST = 3
_WHOLE = "complete log: log lines have no timestamps"


class Job(Protocol):
    """A run that can be followed: its folder, and a method that stops it."""

    folder: RunFolder

    def stop(self) -> object:
        """Stops the run; returns when all its processes have ended."""


def style() -> ipywidgets.HTML:
    """The panel's style sheet, as a hidden widget."""
    own = ((STATIC / name).read_text(encoding="utf-8") for name in ("panel.css", "presentation.css"))
    css = "".join((machine.style(), *own))
    return widgets.HTML(f"<style>{css}</style>", layout=widgets.HIDDEN)


class Beside:
    """The picture and the charts of a second recorded run, below those of the first one, each under its name."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.names = [widgets.HTML(css="labkit-beside") for _ in range(2)]
        self.machine, self.charts = MachinePicture(lock), Charts(lock=lock)
        self.drawn = (self.machine, self.charts)
        for live in self.drawn:
            live.shown()
        self._state: RunState | None = None

    def show(self, state: RunState) -> None:
        """Draws a state, whole if it is another one than before."""
        for live in self.drawn:
            live.draw(state, final=state.over) if state is self._state else live.restart(state)
        self._state = state


class RunView:
    """The widgets of one run at a time, laid out by a panel. `follow` shows a run, `open` a recorded one; a run that is
    over has a time line, which replays it.

    `on_over` is called with the run's name and state when it is over or stopped; `chosen` returns the Spec to predict,
    or None. Nothing here prints, and nothing slow
    runs in the kernel's main thread.

    The state is read by the thread that follows the run, by the kernel (a button, a choice) and by the answers to the
    pages. One lock serves all: it is held while the state that is shown is read or changed.
    """

    def __init__(
        self,
        on_over: Callable[[str, RunState], None] = lambda name, state: None,
        chosen: Callable[[], Spec | None] = lambda: None,
    ):
        self._lock = threading.RLock()
        self.state = RunState()
        self.words = widgets.HTML(state_html("ready", "quiet"), css="labkit-words")
        self.progress = widgets.HTML(progress_html(self.state))
        self.finding = widgets.HTML(css="labkit-above")
        hint = "Show evidence, cause and fix"
        self._why = widgets.toggle("Why?", hint, lambda _: self._explain(), layout=widgets.HIDDEN, css="labkit-why")
        self._diagnosis = widgets.HTML(layout=widgets.HIDDEN, css="labkit-diagnoses")
        # which run is on screen: the configuration may have changed since it started
        self._what = widgets.HTML(css="labkit-what")
        self.line = widgets.HBox([self._what, self.finding, self._why], css="labkit-line")
        self.findings = widgets.VBox([self.line, self._diagnosis], css="labkit-findings")
        self.machine = MachinePicture(self._lock)
        self.charts = Charts(lock=self._lock)
        self._before = Before(chosen, self._predicted)
        self.predict, self.guess = self._before.predict, self._before.guess
        self.replay = Replay(self._show_moment, self._lock)
        self._beside: Beside | None = None  # made when a second run is shown for the first time
        self.live = widgets.VBox(self._alone(), css="labkit-live")
        self.logs = Logs()
        self.timeline, self.memory = (Tab(lambda: self._folder, self._lock) for Tab in (TimelineTab, MemoryTab))
        hint = "Stop the run and all its processes"
        self.stop_button = widgets.button("■ Stop", hint, self.stop, disabled=True, css="labkit-stop")
        self._on_over = on_over
        self._job: Job | None = None
        self._folder: RunFolder | None = None  # of the run that `state` is of
        self._recorded = self._replayed = self._stopping = self._busy = self._paused = self._awaited = False
        self._thread: threading.Thread | None = None

    def _alone(self) -> list[ipywidgets.Widget]:
        above = (self.findings, self.guess.widget, self.replay.widget, self.machine.widget, self._before.widget)
        return [*above, self.charts.widget]

    def shown(self) -> None:
        """Call this just before the widgets are displayed."""
        for charts in self._all_charts():
            charts.shown()

    def _all_charts(self) -> tuple[Live, ...]:
        return self.machine, self.charts, self.timeline.charts, self.memory.charts

    @property
    def recorded(self) -> bool:
        return self._recorded

    @property
    def busy(self) -> bool:
        """Whether the view follows an active run."""
        return self._busy

    def say(self, words: str, tone: str = "waiting") -> None:
        """Sets the state line while no run sets it."""
        self.words.value = state_html(words, tone)

    def complain(self, sentence: str) -> None:
        """Sets the message above the charts; an empty string removes it."""
        self.finding.value = sentence_html(sentence)

    def await_run(self, words: str) -> None:
        """A run is being started, which Stop ends as soon as `follow` is called; `words` say what is done meanwhile."""
        self._awaited, self._stopping = True, False
        self.complain("")
        self.say(words)
        self.stop_button.disabled = False

    def not_started(self, why: str) -> None:
        """The run that was being started has failed to start."""
        self._awaited = False
        self.stop_button.disabled = True
        self.say("failed to start", "bad")
        self.complain(why)

    def preview(self, spec: Spec) -> None:
        """Shows empty charts for a run that has not started, and its expected memory and traffic."""
        state = RunState()
        state.apply(SpecFields.of(spec))
        self._job = None
        self._recorded = self._replayed = self._stopping = False
        self.replay.close()
        self.live.children = self._alone()
        self._begin(state)
        self.plan(spec)

    def plan(self, spec: Spec | None) -> None:
        """Shows the expected memory and traffic of the next run above the current view; None: it cannot run."""
        self._before.plan(spec)

    def _predicted(self, spec: Spec, plan: Plan) -> None:
        """Adds the prediction of a run that has not started to its empty charts, if these are shown."""
        with self._lock:
            if self._folder is None and self.state.spec == SpecFields.of(spec):
                self.state.apply(plan)
                self._draw()

    def follow(self, job: Job) -> None:
        """Shows a run until it is over; it has stored what the learner entered."""
        self.guess.clear()
        self.replay.close()
        with self._lock:
            stopped, self._awaited = self._awaited and self._stopping, False
            self._job, self._stopping, self._busy = job, False, True
            self._recorded = self._replayed = False
            self._thread = widgets.in_thread(f"view of {job.folder.name}", self._watch, job)
        if stopped:
            self.stop()

    def open(self, folder: RunFolder, beside: RunFolder | None = None) -> None:
        """Shows the beginning of a recorded run, or the end of an imported one, and its time line; with another one
        `beside` it, in step. Reads all of their events."""
        self._job, self._recorded, self._stopping = None, True, False
        self._folder = folder
        others = [beside] if beside else []
        self.replay.open(folder, *others)
        if folder.read_imported() is not None:  # it lasts some milliseconds: what has been profiled is seen at the end
            self.replay.seek(math.inf)
        self.logs.restart(folder, self.state.world_size, _WHOLE)
        if not beside:
            self.live.children = self._alone()

    def _show_moment(self, recordings: Sequence[Recording], playing: bool) -> None:
        """Shows a recorded run at a moment, and another one beside it."""
        first, *others = recordings
        self._replayed, self._paused = True, not playing
        if first.state is not self.state:
            self._switch(first.state, self._folder)
        self._draw()
        for second in others:
            self._show_beside(first, second)

    def _show_beside(self, first: Recording, second: Recording) -> None:
        beside = self._beside = self._beside or Beside(self._lock)
        for widget, recording in zip(beside.names, (first, second)):
            state = recording.state
            widget.value = f"<b>{escape(what(recording.folder))}</b> {escape(state.words)} · step {state.step:,}"
        pictures = [beside.names[0], self.machine.widget, beside.names[1], beside.machine.widget]
        self.live.children = [self.findings, self.replay.widget, *pictures, self.charts.widget, beside.charts.widget]
        beside.show(second.state)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the run is over and its final state is shown."""
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self) -> None:
        """Stops the run; returns immediately. A run that is being started stops when it has."""
        with self._lock:
            if self._stopping or not (self._awaited or self._job):
                return
            if self._awaited:
                self.stop_button.disabled = self._stopping = True
                self.say("stopping")
                return
        self.stop_button.disabled = True
        self.say("stopping")  # first: with the flag set, the other thread may say how it ended
        self._stopping = True
        if self.state.over:
            self._draw()  # a click that arrives after the end: the other thread has already said how it ended
        widgets.in_thread("stop", self._end, self._job)

    def _end(self, job: Job) -> None:
        try:
            job.stop()
        except Exception as error:  # show it: an exception in a thread would go unnoticed
            self._stopping = False
            self.stop_button.disabled = not self.busy
            self.complain(str(error))

    # ---- the thread that reads and draws

    def _watch(self, job: Job) -> None:
        source = Follower(job.folder)
        try:
            self._follow_to_the_end(job, source)
        except Exception as error:
            self.complain(f"this view failed, but the run continues: {type(error).__name__}: {error}")
            raise
        finally:
            self.stop_button.disabled = True
            self._busy = False  # before `on_over`, which lets the user start the next run
        self._on_over(job.folder.name, source.state)
        self.replay.open(job.folder, at_end=True, wanted=lambda: self._job is job)

    def _begin(self, state: RunState, folder: RunFolder | None = None) -> None:
        """Switches to another state and the logs of its folder."""
        with self._lock:
            self._switch(state, folder)
            self.logs.restart(folder, state.world_size)
            self._draw()

    def _switch(self, state: RunState, folder: RunFolder | None) -> None:
        self.state, self._folder = state, folder
        self.timeline.live = self.memory.live = not (self._recorded or self._replayed)
        for charts in self._all_charts():
            charts.restart(state)

    def _follow_to_the_end(self, job: Job, source: Follower) -> None:
        source.progress = lambda share: self.say(f"reading the run: {share:.0%}")
        source.poll()
        source.progress = lambda share: None
        self.stop_button.disabled = source.state.over or self._stopping
        self._begin(source.state, job.folder)
        due = 0.0
        while True:
            now = time.monotonic()
            if now >= due or self.state.over:
                self._draw()
                due = now + max(_REDRAW, (1 + _REST) * (time.monotonic() - now))
                if self.state.over:
                    return
            time.sleep(_READ)
            with self._lock:
                source.poll()

    def _explain(self) -> None:
        """Shows all findings in detail while *Why?* is pressed."""
        with self._lock:
            found = findings(self.state)
            widgets.show(self._why, bool(found))
            shown = bool(found) and self._why.value
            widgets.show(self._diagnosis, shown)
            if shown:
                self._diagnosis.value = findings_html(found)

    def _draw(self) -> None:
        with self._lock:
            self._draw_state(self.state)

    def _draw_state(self, state: RunState) -> None:
        if self._recorded or (self._replayed and not state.over):
            paused = " · paused" if self._paused and not state.over else ""
            source = "recorded" if self._recorded else "replay"
            words = "imported" if state.imported else f"{source}: {state.words}"  # the line below says from what
            self.say(f"{words}{paused}", "quiet" if paused else tone_of(state))
        elif self._stopping and not state.over:
            self.say("stopping")  # again: the kernel may have said it while this thread said something else
        else:
            self.say(state.words, tone_of(state))
        self._what.value = "" if self._folder is None else what_html(state) + speed_html(state)
        self.progress.value = progress_html(state)
        self.finding.value = finding_html(state)
        self._explain()
        if self._folder is not None:
            self._before.draw(state)
        self.machine.draw(state, final=state.over)
        self.charts.draw(state, final=state.over)
        self.timeline.draw(state, final=state.over)
        self.memory.draw(state, final=state.over)
        self.logs.draw(over=state.over)


# ---- the live view of one run without the configuration


def show_in_notebook(run: Run) -> None:
    """Shows a run live and returns immediately. If headless, waits for the run's end and displays static figures."""
    if headless():
        wait_and_display(run)
    else:
        _live(run)
    _displayed_once(run)


def _displayed_once(run: Run) -> None:
    """The cell that shows a run does not print it as well if it ends with it: the text would soon be out of date."""
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    cell = shell.execution_count

    def print_elsewhere(returned: Run) -> None:
        if returned is not run or shell.execution_count != cell:
            display({"text/plain": repr(returned)}, raw=True)

    shell.display_formatter.ipython_display_formatter.for_type(Run, print_elsewhere)


def wait_and_display(run: Run) -> None:
    """Waits for a run's end (an interrupt stops the run) and displays its static figures as outputs of the current
    cell.
    """
    run.wait()
    display_static(run.name, run.state)


def _live(run: Run) -> None:
    from IPython.display import display

    static: list[StaticFigures] = []
    view = RunView(lambda name, state: static[0].fill(name, state))
    actions = widgets.HBox([view.stop_button, view.words, view.progress, Presentation().box], css="labkit-actions")
    shown = [view.live, view.logs.widget, view.timeline.widget, view.memory.widget]
    tabs = ipywidgets.Tab(shown, titles=("Live", "Logs", "Timeline", "Memory"))
    tabs.add_class("labkit-tabs")
    widget = widgets.VBox([style(), actions, tabs], css="labkit")
    view.shown()
    display(widget)
    static.append(StaticFigures())
    view.follow(run)
