"""One run on screen: state, progress, finding, charts and logs, kept up to date by one thread that reads the run folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import ipywidgets

from labkit.analysis.diagnose import findings
from labkit.figures.tables import findings_html
from labkit.frontends.panel.before import Before
from labkit.frontends.panel.charts import STATIC, Charts
from labkit.frontends.panel.logs import Logs
from labkit.frontends.panel.profiled import MemoryTab, TimelineTab
from labkit.frontends.panel.words import finding_html, progress_html, sentence_html, state_html, tone_of
from labkit.plan.spec import Spec
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.replay import Recording
from labkit.record.state import RunState

_READ = 0.1  # seconds between two looks at the run folder
_REDRAW = 0.25  # seconds between two pictures
_WHOLE = "all of the recording: lines of a log have no times"


class Job(Protocol):
    """What is followed: a run folder, and a way to end the run."""

    folder: RunFolder

    def stop(self) -> object:
        """Ends the run; returns when nothing of it is left."""


class Source(Protocol):
    """Where the state comes from: a `Follower` of a run folder, or a `Recording` that plays."""

    state: RunState
    progress: Callable[[float], None]  # is called when reading takes long, with the share that was read

    def poll(self) -> bool:
        """Folds in what is new."""


def style() -> ipywidgets.HTML:
    """The house's look, as a widget that shows nothing."""
    css = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("panel.css", "stage.css"))
    return ipywidgets.HTML(f"<style>{css}</style>", layout={"display": "none"})


class RunView:
    """The widgets of one run at a time, for a panel to lay out. `follow` shows a run, and `play` a recorded one; `on_over` is told its
    name and state when it is over, or stopped.

    Nothing here prints, and nothing that may take time is done in the kernel's own thread.
    """

    def __init__(self, on_over: Callable[[str, RunState], None] = lambda name, state: None):
        self.state = RunState()
        self.words = ipywidgets.HTML(state_html("ready", "quiet"))
        self.words.add_class("labkit-words")
        self.progress = ipywidgets.HTML(progress_html(self.state))
        self.finding = ipywidgets.HTML()
        self.finding.add_class("labkit-above")
        self._why = ipywidgets.ToggleButton(description="Why?", tooltip="Evidence, cause, fix", layout={"display": "none"})
        self._why.add_class("labkit-why")
        self._why.observe(lambda _: self._explain(), "value")
        self._diagnosis = ipywidgets.HTML(layout={"display": "none"})
        self._diagnosis.add_class("labkit-diagnoses")
        line = ipywidgets.HBox([self.finding, self._why])
        line.add_class("labkit-line")
        self.findings = ipywidgets.VBox([line, self._diagnosis])
        self.findings.add_class("labkit-findings")
        self.charts = Charts()
        self._before = Before()
        self.live = ipywidgets.VBox([self.findings, self._before.widget, self.charts.widget])
        self.live.add_class("labkit-live")
        self.logs = Logs()
        self.timeline, self.memory = TimelineTab(self._folder), MemoryTab(self._folder)
        self.stop_button = ipywidgets.Button(description="■ Stop", tooltip="End the run: no process of it is left", disabled=True)
        self.stop_button.on_click(lambda _: self.stop())
        self.stop_button.add_class("labkit-stop")
        self._on_over = on_over
        self._job: Job | None = None
        self._recorded = self._stopping = False
        self._thread: threading.Thread | None = None

    def _folder(self) -> RunFolder | None:
        return None if self._job is None else self._job.folder

    def shown(self) -> None:
        """To be called when the widgets go on screen."""
        for charts in self._all_charts():
            charts.shown()

    def _all_charts(self) -> tuple[Charts, Charts, Charts]:
        return self.charts, self.timeline.charts, self.memory.charts

    @property
    def recorded(self) -> bool:
        """Whether what is shown was recorded."""
        return self._recorded

    @property
    def busy(self) -> bool:
        """Whether a run is followed that has not ended, or one is played."""
        return self._thread is not None and self._thread.is_alive()

    def say(self, words: str, tone: str = "waiting") -> None:
        """Sets the state line while there is no run to tell its own."""
        self.words.value = state_html(words, tone)

    def complain(self, sentence: str) -> None:
        """Sets the line above the charts; empty takes it away."""
        self.finding.value = sentence_html(sentence)

    def preview(self, spec: Spec) -> None:
        """Shows the axes of a run that was not started yet, and what it will hold and send."""
        state = RunState()
        state.apply({"kind": "spec", "spec": spec.to_json()})
        self._job, self._recorded, self._stopping = None, False, False
        self._begin(state)
        self.plan(spec)

    def plan(self, spec: Spec | None) -> None:
        """Shows what the ranks of the next run will hold and send, above whatever run is shown; None: it cannot run."""
        self._before.plan(spec)

    def follow(self, job: Job) -> None:
        """Shows a run from now on until it is over."""
        self._watch_it(job, Follower(job.folder), recorded=False)

    def ready(self, recording: Recording) -> None:
        """Shows where a recorded run stands, and its logs, before it is played."""
        recording.poll()
        recording.stop()
        self._job, self._recorded, self._stopping = recording, True, True
        self._begin(recording.state, recording.folder)
        self.say("recorded: ready to play", "quiet")

    def play(self, recording: Recording) -> None:
        """Shows a recorded run from where it stands, at its own speed, until it is over or stopped."""
        recording.stop()  # the time since it was shown last does not count
        self._watch_it(recording, recording, recorded=True)

    def _watch_it(self, job: Job, source: Source, recorded: bool) -> None:
        self._job, self._recorded, self._stopping = job, recorded, False
        self._thread = threading.Thread(target=self._watch, args=(job, source), daemon=True, name=f"labkit view of {job.folder.name}")
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the run that is followed has ended and all of it is shown."""
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self) -> None:
        """Asks for the run's end, or the recording's, and returns at once."""
        if self._job is None or self._stopping:
            return
        self._stopping = True
        self.stop_button.disabled = True
        self.say("stopping")
        threading.Thread(target=self._end, args=(self._job,), daemon=True, name="labkit stop").start()

    def _end(self, job: Job) -> None:
        try:
            job.stop()
        except Exception as error:  # whatever it was, it must be seen, and in a thread nobody else would show it
            self._stopping = False
            self.stop_button.disabled = not self.busy
            self.complain(str(error))

    # ---- the one thread that reads and draws

    def _watch(self, job: Job, source: Source) -> None:
        try:
            self._follow_to_the_end(job, source)
        except Exception as error:
            self.complain(f"this view stopped following the run, which goes on: {type(error).__name__}: {error}")
            raise
        finally:
            self.stop_button.disabled = True
        self._on_over(job.folder.name, self.state)

    def _begin(self, state: RunState, folder: RunFolder | None = None) -> None:
        """Shows another state from now on, with the logs of its folder."""
        self.state = state
        self.timeline.live = self.memory.live = not self._recorded
        for charts in self._all_charts():
            charts.restart(state)
        self.logs.restart(folder, state.world_size, _WHOLE if self._recorded else "")
        self._draw()

    def _follow_to_the_end(self, job: Job, source: Source) -> None:
        source.progress = lambda share: self.say(f"reading the run: {share:.0%}")
        source.poll()
        source.progress = lambda share: None
        self.stop_button.disabled = source.state.over
        self._begin(source.state, job.folder)
        due = 0.0
        while True:
            now = time.monotonic()
            left = self._recorded and self._stopping  # a run that is stopped has still to end, a recording has not
            if now >= due or self.state.over or left:
                due = now + _REDRAW
                self._draw()
                if self.state.over or left:
                    return
            time.sleep(_READ)
            with self.charts.lock, self.timeline.charts.lock, self.memory.charts.lock:  # a page that is new reads the same state
                source.poll()

    def _explain(self) -> None:
        """What is behind the line of the gravest finding, as long as it is asked for."""
        told = findings_html(findings(self.state))
        self._why.layout.display = "" if told else "none"
        shown = bool(told) and self._why.value
        self._diagnosis.layout.display = "" if shown else "none"
        if shown:
            self._diagnosis.value = told

    def _draw(self) -> None:
        state = self.state
        if self._recorded:
            held = " · held here" if self._stopping and not state.over else ""
            self.say(f"recorded: {state.words}{held}", "quiet" if held else tone_of(state))
        elif state.over or not self._stopping:
            self.say(state.words, tone_of(state))
        self.progress.value = progress_html(state)
        self.finding.value = finding_html(state)
        self._explain()
        if self._job is not None:
            self._before.draw(state)
        self.charts.draw(state, final=state.over)
        self.timeline.draw(state, final=state.over)
        self.memory.draw(state, final=state.over)
        self.logs.draw(over=state.over)
