"""The panel: one column of choices, one row of actions, and tabs that are all pictures of the same run."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from labkit.common.arguments import check_flag
from labkit.common.text import visible
from labkit.frontends.panel import code
from labkit.frontends.panel.charts import STATIC
from labkit.frontends.panel.choices import Choices
from labkit.frontends.panel.compare import CompareTab
from labkit.frontends.panel.install import Install
from labkit.frontends.panel.live import to_the_end
from labkit.frontends.panel.notebook import Keepsake, leave
from labkit.frontends.panel.recorded import Recorded, find, spec_of
from labkit.frontends.panel.stage import Stage
from labkit.frontends.panel.view import RunView, style
from labkit.frontends.panel.words import sentence_html
from labkit.launch.job import Job
from labkit.launch.warm.client import prepare
from labkit.plan.script import command
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import Unreadable
from labkit.record.files import NotPlain
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.replay import Recording, recorded_words
from labkit.record.state import RunState
from labkit.runs.handle import Run
from labkit.runs.notebook import headless, in_notebook
from labkit.setup.machine import Machine

_RUN, _RUN_HINT = "▶ Run", "Write the script and start it under torchrun"
_PLAY, _PLAY_HINT = "▶ Play", "Play the recorded run at its own speed"


class _Command(anywidget.AnyWidget):
    """A command, and a button that copies it."""

    _esm = (STATIC / "command.js").read_text(encoding="utf-8")
    text = traitlets.Unicode().tag(sync=True)


class Lab:
    """The panel, as the last line of a cell. `defaults` are fields of Spec: `Lab(strategy="ddp", nproc=2, steps=200)`.

    `cold` has torchrun itself start every run, where otherwise a warm server does. `stage` begins with the view for a projector.
    `recorded` opens a recorded run, which plays at its own speed: its name or an end of it, its path, or `last`.
    Where nobody watches (nbclient, a batch run) the cell runs the job to its end instead and leaves plain figures, or those of the
    recorded run. Raises `SpecError` for defaults that cannot be meant here.
    """

    def __init__(
        self, *, stage: bool = False, cold: bool = False, recorded: str | os.PathLike[str] | None = None, **defaults: Any
    ):
        check_flag("stage", stage)
        check_flag("cold", cold)
        self._cold = cold
        opened = None if recorded is None else find(recorded)
        self._choices = Choices(Machine.here(), defaults, self._changed)
        self._view = RunView(self._over)
        self._recorded = Recorded(self._choose)
        self._recording: Recording | None = None
        self._keepsake: Keepsake | None = None
        self._run: Run | None = None
        self._starting = False
        self._make(stage)
        self._changed()
        if opened is not None:
            self._recorded.choose(str(opened.path))

    @property
    def spec(self) -> Spec:
        """What Run would start now; `SpecError` where it could not."""
        return self._choices.spec()

    @property
    def run(self) -> Run | None:
        """The run that was started last."""
        return self._run

    def _make(self, stage: bool) -> None:
        self._run_button = ipywidgets.Button(description=_RUN, tooltip=_RUN_HINT)
        self._run_button.on_click(lambda _: self._start())
        self._run_button.add_class("labkit-run")
        self._batch, self._script, self._diff = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._command = _Command()
        view, choices = self._view, self._choices
        self._compare = CompareTab(choices.comparable, lambda: self._starting or view.busy, self._cold)
        shown = (view.live, self._sources(), view.logs.widget, view.timeline.widget, view.memory.widget, self._compare.widget)
        tabs = ipywidgets.Tab(shown)
        for number, title in enumerate(("Live", "Script & diff", "Logs", "Timeline", "Memory", "Compare")):
            tabs.set_title(number, title)
        tabs.add_class("labkit-tabs")
        tabs.observe(self._turned, "selected_index")
        actions = ipywidgets.HBox([self._run_button, view.stop_button, view.words, view.progress, Stage(on=stage)])
        actions.add_class("labkit-actions")
        self._install = Install(self._changed)
        said = ipywidgets.HBox([self._batch, self._install.widget, self._command])
        said.add_class("labkit-said")
        row = choices.row
        row.children = (*row.children, self._recorded.which)
        self._own = (choices.top, choices.explanation, row)
        self._head = ipywidgets.VBox(self._own)
        self._head.add_class("labkit-head")
        self._widget = ipywidgets.VBox([style(), self._head, said, actions, tabs])
        self._widget.add_class("labkit")

    def _turned(self, change: dict[str, Any]) -> None:
        if change["owner"].children[change["new"]] is self._compare.widget:
            self._compare.opened()

    def _sources(self) -> ipywidgets.Box:
        """The script, or what it changes: one at a time, as wide as the panel."""
        which = ipywidgets.ToggleButtons(options=[("train.py", self._script), ("What changes from one device", self._diff)])
        which.add_class("labkit-which")
        box = ipywidgets.VBox([which, self._script])
        box.add_class("labkit-sources")
        for widget in (self._script, self._diff):
            widget.add_class("labkit-code")
        which.observe(lambda change: setattr(box, "children", (which, change["new"])), "value")
        return box

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if not in_notebook():
            print("The panel needs a notebook: python3 -m labkit lab opens one.")
            return
        if headless():
            if self._recorded.which.value:
                _leave_recorded(RunFolder(self._recorded.which.value))
                return
            self._run = Run(Job.start(self.spec, cold=self._cold))
            to_the_end(self._run)
            return
        if not self._cold:
            prepare()
        display(self._widget)
        self._keepsake = Keepsake()
        self._view.shown()

    # ---- what follows from a choice

    def _changed(self) -> None:
        try:
            spec = self.spec
        except SpecError as error:
            self._batch.value = sentence_html(str(error))
            self._install.offer(error.extra)
            self._run_button.disabled = True
            if not (self._starting or self._view.busy):
                self._view.plan(None)
            return
        self._install.offer(None)
        self._describe(spec)
        self._script.value = code.script_html(spec)
        self._compare.refresh()
        self._free(not (self._starting or self._view.busy))
        if not self._starting and (self._run is None or self._view.recorded):
            self._view.preview(spec)
        elif not (self._starting or self._view.busy):
            self._view.plan(spec)

    def _describe(self, spec: Spec) -> None:
        self._batch.value = f'<div class="labkit-batch">{spec.batch_sentence}</div>'
        self._command.text = command(spec)
        self._diff.value = code.diff_html(spec)

    def _free(self, free: bool) -> None:
        """Whether another run may be started, or opened."""
        self._run_button.disabled = not free
        self._recorded.which.disabled = self._recorded.close_button.disabled = not free

    # ---- a recorded run

    def _choose(self, path: str) -> None:
        """Opens a recorded run in the place of the choices, or puts them back."""
        if not path:
            self._recording, self._head.children = None, self._own
            self._run_button.description, self._run_button.tooltip = _RUN, _RUN_HINT
            self._changed()
            return
        self._free(False)
        self._view.say("opening the recorded run")
        threading.Thread(target=self._open, args=(RunFolder(path),), daemon=True, name="labkit recording").start()

    def _open(self, folder: RunFolder) -> None:
        """Off the kernel's own thread: all of a run's events are read."""
        try:
            self._recording = self._recorded.open(folder)
            spec = spec_of(folder)
            if spec is not None and spec.strategy is not None:
                self._describe(spec)
            else:
                self._batch.value, self._command.text = "", _text_of(folder, folder.command).strip()
                self._diff.value = '<p class="labkit-empty">A script of one\'s own: there is none to compare it with.</p>'
            self._script.value = code.source_html(_text_of(folder, folder.script))
            self._head.children = self._recorded.widgets
            self._run_button.description, self._run_button.tooltip = _PLAY, _PLAY_HINT
            self._view.ready(self._recording)
        except Unreadable as error:
            self._view.complain(error.args[0])
        except Exception as error:
            self._view.complain(f"this run cannot be played: {type(error).__name__}: {error}")
        finally:
            self._free(True)

    def _play(self, recording: Recording) -> None:
        if recording.state.over:
            recording = self._recording = self._recorded.open(recording.folder)
        self._free(False)
        self._view.play(recording)

    # ---- Run

    def _start(self) -> None:
        if self._recording is not None and not self._view.busy:
            self._play(self._recording)
            return
        if self._starting or self._view.busy:
            return
        if self._compare.busy:
            self._view.complain("a comparison is under way; wait for its end, or stop it")
            return
        try:
            spec = self.spec
        except SpecError:
            return  # the sentence stands there already
        self._starting = True
        self._free(False)
        self._view.say("writing the script")
        self._view.complain("")
        threading.Thread(target=self._launch, args=(spec,), daemon=True, name="labkit run").start()

    def _launch(self, spec: Spec) -> None:
        """Off the kernel's own thread: the kernel answers meanwhile."""
        try:
            job = Job.start(spec, cold=self._cold)
        except Exception as error:
            self._view.say("failed to start", "bad")
            self._view.complain(str(error))
            self._free(True)
        else:
            self._view.follow(job)
            self._run = Run(job)  # last: who sees the run can wait for its view
        finally:
            self._starting = False

    def _over(self, name: str, state: RunState) -> None:
        self._recorded.refresh()
        self._free(True)
        if self._keepsake is not None and not self._view.recorded:
            self._keepsake.fill(name, state)


def _leave_recorded(folder: RunFolder) -> None:
    follower = Follower(folder)
    follower.poll()
    leave(f"{folder.name} ({recorded_words(folder)})", follower.state)


def _text_of(folder: RunFolder, path: Path) -> str:
    try:
        return visible(folder.text(path))
    except NotPlain as error:
        return f"# not shown: {error}\n"
    except OSError:
        return f"# {path.name} is not in the folder of this run\n"
