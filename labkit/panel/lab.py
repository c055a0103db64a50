"""The panel: one column of choices, one row of actions, and tabs that are all pictures of the same run."""

from __future__ import annotations

import threading
from typing import Any

import anywidget
import ipywidgets
import traitlets

from labkit.api import Run, in_notebook
from labkit.launch.job import Job
from labkit.machine import Machine
from labkit.panel import code
from labkit.panel.charts import STATIC
from labkit.panel.choices import Choices
from labkit.panel.compare import CompareTab
from labkit.panel.live import to_the_end
from labkit.panel.notebook import Keepsake, headless
from labkit.panel.view import RunView, style
from labkit.panel.words import sentence_html
from labkit.script import command
from labkit.spec import Spec, SpecError
from labkit.state import RunState


class _Command(anywidget.AnyWidget):
    """A command, and a button that copies it."""

    _esm = (STATIC / "command.js").read_text(encoding="utf-8")
    text = traitlets.Unicode().tag(sync=True)


class Lab:
    """The panel, as the last line of a cell. `defaults` are fields of Spec: `Lab(strategy="ddp", nproc=2, steps=200)`.

    Where nobody watches (nbclient, a batch run) the cell runs the job to its end instead and leaves plain figures.
    Raises `SpecError` for defaults that cannot be meant here.
    """

    def __init__(self, **defaults: Any):
        self._choices = Choices(Machine.here(), defaults, self._changed)
        self._view = RunView(self._over)
        self._keepsake: Keepsake | None = None
        self._run: Run | None = None
        self._starting = False
        self._make()
        self._changed()

    @property
    def spec(self) -> Spec:
        """What Run would start now; `SpecError` where it could not."""
        return self._choices.spec()

    @property
    def run(self) -> Run | None:
        """The run that was started last."""
        return self._run

    def _make(self) -> None:
        self._run_button = ipywidgets.Button(description="▶ Run", tooltip="Write the script and start it under torchrun")
        self._run_button.on_click(lambda _: self._start())
        self._run_button.add_class("labkit-run")
        self._batch, self._script, self._diff = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._command = _Command()
        view, choices = self._view, self._choices
        live = ipywidgets.VBox([view.findings, view.charts.widget])
        self._compare = CompareTab(choices.comparable, lambda: self._starting or view.busy)
        tabs = ipywidgets.Tab([live, self._sources(), view.logs.widget, view.timeline.widget, view.memory.widget, self._compare.widget])
        for number, title in enumerate(("Live", "Script & diff", "Logs", "Timeline", "Memory", "Compare")):
            tabs.set_title(number, title)
        tabs.add_class("labkit-tabs")
        actions = ipywidgets.HBox([self._run_button, view.stop_button, view.words, view.progress])
        actions.add_class("labkit-actions")
        said = ipywidgets.HBox([self._batch, self._command])
        said.add_class("labkit-said")
        self._widget = ipywidgets.VBox([style(), choices.top, choices.explanation, choices.row, said, actions, tabs])
        self._widget.add_class("labkit")

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
            self._run = Run(Job.start(self.spec))
            to_the_end(self._run)
            return
        display(self._widget)
        self._keepsake = Keepsake()
        self._view.shown()

    # ---- what follows from a choice

    def _changed(self) -> None:
        try:
            spec = self.spec
        except SpecError as error:
            self._batch.value = sentence_html(str(error))
            self._run_button.disabled = True
            return
        self._batch.value = f'<div class="labkit-batch">{spec.batch_sentence}</div>'
        self._command.text = command(spec)
        self._script.value, self._diff.value = code.script_html(spec), code.diff_html(spec)
        self._compare.refresh()
        self._run_button.disabled = self._starting or self._view.busy
        if self._run is None and not self._starting:
            self._view.preview(spec)

    # ---- Run

    def _start(self) -> None:
        if self._starting or self._view.busy:
            return
        if self._compare.busy:
            self._view.complain("a comparison is under way; wait for its end, or stop it")
            return
        try:
            spec = self.spec
        except SpecError:
            return  # the sentence stands there already
        self._starting = self._run_button.disabled = True
        self._view.say("writing the script")
        self._view.complain("")
        threading.Thread(target=self._launch, args=(spec,), daemon=True, name="labkit run").start()

    def _launch(self, spec: Spec) -> None:
        """Off the kernel's own thread: the kernel answers meanwhile."""
        try:
            job = Job.start(spec)
        except Exception as error:
            self._view.say("failed to start", "bad")
            self._view.complain(str(error))
            self._run_button.disabled = False
        else:
            self._view.follow(job)
            self._run = Run(job)  # last: who sees the run can wait for its view
        finally:
            self._starting = False

    def _over(self, name: str, state: RunState) -> None:
        self._run_button.disabled = False
        if self._keepsake is not None:
            self._keepsake.fill(name, state)
