"""The panel: the configuration, one row of actions, and tabs that all show the same run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ipywidgets

from labkit.common.arguments import check_flag
from labkit.frontends.panel import widgets
from labkit.frontends.panel.choices import Availability, Choices
from labkit.frontends.panel.recorded import Install, Instead, OpenTab, Recorded, find_all, spec_of, under_way
from labkit.frontends.panel.view import RunView, StaticFigures, display_static, style, wait_and_display
from labkit.frontends.panel.widgets import Presentation, sentence_html
from labkit.launch.warm.client import prepare
from labkit.plan.spec import Spec, SpecError, check_available
from labkit.record.documents import SpecFields, Unreadable
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, recorded_words
from labkit.record.state import RunState
from labkit.runs.handle import Run, start
from labkit.runs.notebook import headless, in_notebook
from labkit.setup.machine import Machine

if TYPE_CHECKING:
    from labkit.frontends.panel.compare import CompareTab
    from labkit.frontends.panel.sources import Sources

_Tab = TypeVar("_Tab", "Sources", "CompareTab", "OpenTab")
_TABS = ("Live", "Script & diff", "Logs", "Timeline", "Memory", "Compare", "Open…")
_SOURCES, _COMPARE, _OPEN = 1, 5, 6
_PICTURED = 1.5  # seconds that the page has for its first picture, before a warm server imports torch beside it
_RUN_HINT = "Generate the script and launch it with torchrun"


class Later(Generic[_Tab]):
    """The content of a tab, which is made when it is first needed."""

    def __init__(self, make: Callable[[], _Tab]):
        self._make = make
        self.made: _Tab | None = None
        self.box = widgets.VBox()
        self.box.add_class("labkit-later")

    def __call__(self) -> _Tab:
        if self.made is None:
            self.made = self._make()
            self.box.children = (self.made.widget,)
        return self.made


class Lab:
    """The panel, displayed as the last line of a cell. `defaults` are fields of Spec: `Lab(strategy="ddp", nproc=2,
    steps=200)`.

    `cold` starts every run with torchrun instead of the warm server. `presentation` starts in presentation mode, for a
    projector. `recorded` opens a recorded run for replay: its name or the end of its name, its path, or `last`; of a
    pair of runs, the second one is shown in step with the first.
    If headless (nbclient, a batch run), the cell runs the job to its end and displays static figures, or those of the
    recorded run. Raises `SpecError` for invalid defaults.
    """

    def __init__(
        self,
        *,
        presentation: bool = False,
        cold: bool = False,
        recorded: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        **defaults: Any,
    ):
        check_flag("presentation", presentation)
        check_flag("cold", cold)
        self._cold = cold
        opened = find_all(recorded)
        self._availability = Availability(self._answered)
        self._drawing = threading.RLock()  # an answer may arrive while a change is drawn
        self._choices = Choices(Machine.here(), defaults, self._changed)
        self._view = RunView(self._over, self._ready)
        self._recorded = Recorded(self._choose)
        self._instead = Instead(self._recorded.choose)
        self._view.line.children = (*self._view.line.children, self._instead.button)
        self._open: RunFolder | None = None  # the recorded run that is shown
        self._static: StaticFigures | None = None
        self._run: Run | None = None
        self._sources, self._compare = Later(self._make_sources), Later(self._make_compare)
        self._files = Later(self._make_files)
        self._starting = False  # whether a thread starts a run or opens a recorded one
        self._make(presentation)
        self._changed()
        if opened:
            self._recorded.choose(*(str(folder.path) for folder in opened))

    @property
    def spec(self) -> Spec:
        """The Spec that Run would start now. Raises `SpecError` if it cannot run; waits for the check of its data."""
        spec = self._choices.spec()
        check_available(spec)
        return spec

    @property
    def run(self) -> Run | None:
        """The run started last, or None."""
        return self._run

    def _make(self, presentation: bool) -> None:
        self._run_button = widgets.Button(description="▶ Run", tooltip=_RUN_HINT)
        self._run_button.on_click(lambda _: self._start())
        self._run_button.add_class("labkit-run")
        self._batch = widgets.HTML()
        view, choices = self._view, self._choices
        shown = (
            view.live,
            self._sources.box,
            view.logs.widget,
            view.timeline.widget,
            view.memory.widget,
            self._compare.box,
            self._files.box,
        )
        self._tabs = tabs = ipywidgets.Tab(shown, titles=_TABS, selected_index=0)
        tabs.add_class("labkit-tabs")
        tabs.observe(self._turned, "selected_index")
        mode = Presentation(on=presentation)
        self._install = Install(self._changed)
        first = widgets.HBox([*choices.what, self._run_button, view.stop_button, view.predict.button])
        first.add_class("labkit-row")
        said = widgets.HBox([self._batch, self._install.widget, choices.where])
        said.add_class("labkit-status-row")
        self._own = widgets.VBox([first, choices.explanation], layout={})
        self._head = widgets.VBox([self._own, self._recorded.widget, said])
        self._head.add_class("labkit-head")
        self._settings = choices.settings
        actions = widgets.HBox([view.words, view.progress, self._settings, self._recorded.which, mode.box])
        actions.add_class("labkit-actions")
        self._widget = widgets.VBox([style(), self._head, actions, tabs])
        self._widget.add_class("labkit")

    def _make_sources(self) -> Sources:
        from labkit.frontends.panel.sources import Sources

        return Sources(lambda: self._open or self._ready())

    def _make_compare(self) -> CompareTab:
        from labkit.frontends.panel.compare import CompareTab

        return CompareTab(self._comparable, lambda: self._starting or self._view.busy, self._cold)

    def _make_files(self) -> OpenTab:
        return OpenTab(self._kept)

    def _kept(self, path: str) -> None:
        """Opens a run that was made from files, unless something is running here."""
        self._recorded.refresh()
        if not (self._starting or self._view.busy):
            self._recorded.choose(path)

    def _turned(self, change: dict[str, Any]) -> None:
        if change["new"] == _COMPARE:
            self._compare().opened()
        elif change["new"] == _OPEN:
            self._files().opened()
        with self._drawing, suppress(SpecError):
            self._draw_tab()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if not in_notebook():
            print("The panel needs a notebook; open one with: python3 -m labkit lab")
            return
        if headless():
            shown = [path for path in (self._recorded.which.value, self._recorded.beside.value) if path]
            for path in shown:
                _display_recorded(RunFolder.find(path))
            if shown:
                return
            self._run = Run(start(self.spec, cold=self._cold))
            wait_and_display(self._run)
            return
        self._view.shown()
        display(self._widget)
        self._static = StaticFigures()
        if not self._cold:
            warm = threading.Timer(_PICTURED, prepare)
            warm.daemon = True
            warm.start()
        self._view.complain(under_way())  # such as a run of a panel that a reload of the page has lost

    # ---- reacting to a change of the configuration

    def _changed(self) -> None:
        with self._drawing:
            self._draw(ask=True)

    def _answered(self) -> None:
        with self._drawing:
            if self._open is None:  # otherwise the configuration is not shown
                self._draw(ask=False)

    def _draw(self, ask: bool) -> None:
        """Shows what the configuration would run; `ask` also asks whether its data are available, without waiting."""
        try:
            spec = self._choices.spec()
            available = self._availability.known(spec, ask)
        except SpecError as error:
            self._batch.value = sentence_html(str(error))
            self._install.offer(error.extra)
            self._allow(False)
            if not (self._starting or self._view.busy):
                self._view.plan(None)
            return
        self._install.offer(None)
        self._batch.value = _batch_html(spec.batch_sentence)
        self._draw_tab()
        idle = not (self._starting or self._view.busy)
        self._free(idle)
        if not available:
            self._allow(False)
            self._batch.value = _batch_html(f"{spec.batch_sentence} · looking for {spec.data}")
        if idle and (self._run is None or self._view.recorded):
            self._view.preview(spec)
        elif idle:
            self._view.plan(spec)

    def _draw_tab(self) -> None:
        """Draws the tab that is open, if it is about what is chosen: all tabs at once would take a tenth of a second.
        Raises `SpecError` if what is chosen cannot run."""
        if self._tabs.selected_index == _SOURCES:
            if self._open is not None:
                self._sources().show_recorded(self._open)
            else:
                self._sources().show(self._choices.spec())
        elif self._tabs.selected_index == _COMPARE and self._open is None:
            self._compare().refresh()

    def _comparable(self) -> dict[str, Any]:
        spec = self._choices.spec()
        if not self._availability.known(spec, ask=False):
            raise SpecError("data", f"the data set {spec.data} is still being looked for; compare when Run is enabled")
        return self._choices.comparable()

    def _free(self, free: bool) -> None:
        """Sets whether another run can be started or opened."""
        self._allow(free)
        self._recorded.which.disabled = self._recorded.close_button.disabled = not free

    def _allow(self, allowed: bool) -> None:
        """Sets whether what is shown can be run or played, and what is chosen can be predicted."""
        self._run_button.disabled = not allowed
        self._view.predict.allow(allowed and self._open is None)

    def _ready(self) -> Spec | None:
        """What is chosen now; None if the panel shows why it cannot run, or that its data are looked for."""
        try:
            spec = self._choices.spec()
            return spec if self._availability.known(spec) else None
        except SpecError:
            return None

    # ---- a recorded run

    def _choose(self, path: str) -> None:
        """Opens a recorded run instead of the configuration, or goes back to the configuration if `path` is empty."""
        if not path:
            self._open = None
            self._show_recorded(False)
            self._changed()
            return
        self._starting = True
        self._free(False)
        self._instead.offer(None)
        self._view.say("opening the recorded run")
        paths = (path, self._recorded.beside.value)
        threading.Thread(target=self._read, args=paths, daemon=True, name="labkit recording").start()

    def _show_recorded(self, shown: bool) -> None:
        """A recorded run has a name and a time line instead of a configuration and the buttons that run it."""
        self._recorded.widget.layout.display = "" if shown else "none"
        self._recorded.which.layout.width = "300px" if shown else "132px"
        for widget in (self._own, self._settings, self._choices.where):
            widget.layout.display = "none" if shown else ""

    def _read(self, path: str, beside: str) -> None:
        """Runs outside the kernel's main thread because it reads all events of the runs."""
        try:
            folder = RunFolder.find(path)
            self._view.open(folder, RunFolder.find(beside) if beside else None)
            self._open = folder
            self._recorded.describe(folder)
            spec = spec_of(folder)
            trains = spec is not None and spec.strategy is not None
            self._batch.value = _batch_html(spec.batch_sentence) if trains else ""
            with self._drawing:  # a tab that is turned to now draws the configuration
                self._draw_tab()
            self._show_recorded(True)
        except (LookupError, Unreadable) as error:
            self._view.complain(error.args[0])
        except Exception as error:
            self._view.complain(f"this run cannot be replayed: {type(error).__name__}: {error}")
        finally:
            self._starting = False
            self._free(True)

    # ---- Run

    def _start(self) -> None:
        if self._starting or self._view.busy:
            return
        if self._compare.made is not None and self._compare.made.busy:
            self._view.complain("a comparison is running; stop it or wait until it finishes")
            return
        if (spec := self._ready()) is None:
            return
        self._starting = True
        self._free(False)
        self._instead.offer(None)
        self._view.await_run("writing the script")
        threading.Thread(target=self._launch, args=(spec,), daemon=True, name="labkit run").start()

    def _launch(self, spec: Spec) -> None:
        """Runs in a thread, so that the kernel stays responsive."""
        try:
            self._view.guess.enter()
            job = start(spec, cold=self._cold)
        except Exception as error:
            self._view.not_started(str(error))
            self._instead.offer(SpecFields.of(spec))
            self._free(True)
        else:
            self._view.follow(job)
            self._run = Run(job)  # set last: a caller that sees the run can wait for its view
        finally:
            self._starting = False

    def _over(self, name: str, state: RunState) -> None:
        self._recorded.refresh()
        self._free(True)
        if state.status.state in ("failed", "lost"):
            self._instead.offer(state.spec)
        if self._static is not None and not self._view.recorded:
            self._static.fill(name, state)


def _batch_html(sentence: str) -> str:
    return f'<div class="labkit-batch">{sentence}</div>'


def _display_recorded(folder: RunFolder) -> None:
    follower = Follower(folder)
    follower.poll()
    display_static(f"{folder.name} ({recorded_words(folder)})", follower.state)
