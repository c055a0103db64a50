"""The Compare tab, which runs several strategies one after another, or shows recorded runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from labkit.analysis.comparison import alike, newest, recorded
from labkit.frontends.panel.comparison import ComparisonView
from labkit.frontends.panel.recorded import label
from labkit.frontends.panel.words import sentence_html
from labkit.plan.spec import SpecError
from labkit.record.folder import RunFolder
from labkit.record.follow import is_recorded, recorded_words
from labkit.runs.comparing import Comparing, plan
from labkit.training.strategies import BASELINE, STRATEGIES

_NEWEST = 100  # recorded runs in the list
_INTRODUCTION = (
    "Compare trains the same model with each selected strategy, one run after another, with the same global batch "
    "size. The table then shows their time, speed-up, memory and traffic side by side. Recorded compares finished runs."
)
_HOW_TO_CHOOSE = (
    "Ctrl or Shift selects several. With no selection: the newest run of each strategy with the same training."
)


class CompareTab:
    """A checkbox for each strategy, the buttons, and the view.

    `fields` returns the fields of Spec of the current configuration, or raises `SpecError`, also until its data are
    known to be available; `cold` is as in `run`;
    `elsewhere` returns whether another tab is running something.
    """

    def __init__(self, fields: Callable[[], dict[str, Any]], elsewhere: Callable[[], bool], cold: bool = False):
        self._fields, self._cold, self._elsewhere = fields, cold, elsewhere
        self._comparing: Comparing | None = None
        self._boxes = {
            name: ipywidgets.Checkbox(
                value=row.compared or row is BASELINE, description=row.title, indent=False, disabled=row is BASELINE
            )
            for name, row in STRATEGIES.items()
        }
        hint = "Run the selected strategies, one after another"
        self._start_button = ipywidgets.Button(description="▶ Compare", tooltip=hint)
        self._start_button.on_click(lambda _: self.start())
        self._start_button.add_class("labkit-compare-run")
        self._stop_button = ipywidgets.Button(description="■ Stop", tooltip="Stop the comparison", disabled=True)
        self._stop_button.on_click(lambda _: self.stop())
        self._stop_button.add_class("labkit-compare-stop")
        self._said = ipywidgets.HTML()
        self._view = ComparisonView()
        self._view.say(_INTRODUCTION)
        # Threads read recorded runs: of what was asked for, only the newest is shown.
        self._lock = threading.Lock()
        self._asked = 0
        boxes = ipywidgets.HBox(list(self._boxes.values()))
        boxes.add_class("labkit-boxes")
        head = ipywidgets.HBox([self._start_button, self._stop_button, self._recorded(), boxes])
        head.add_class("labkit-compare-head")
        self.widget = ipywidgets.VBox([head, self._said, self._view.widget])
        self.widget.add_class("labkit-compare")

    def _recorded(self) -> ipywidgets.Box:
        """A button that opens the list of recorded runs to compare."""
        hint = "Compare recorded runs without running anything"
        self._recorded_button = ipywidgets.ToggleButton(description="Recorded", tooltip=hint)
        self._recorded_button.observe(self._disclose, "value")
        self._recorded_button.add_class("labkit-compare-recorded")
        self._list = ipywidgets.SelectMultiple(rows=9, description="Recorded runs")
        hint = "Show the table and charts of the selected runs"
        self._chosen_button = ipywidgets.Button(description="Compare selected", tooltip=hint)
        self._chosen_button.on_click(lambda _: self._show_chosen())
        help_ = ipywidgets.HTML(f'<div class="labkit-help">{_HOW_TO_CHOOSE}</div>')
        below = ipywidgets.HBox([self._chosen_button, help_])
        self._popover = ipywidgets.VBox([self._list, below], layout={"display": "none"})
        self._popover.add_class("labkit-runs")
        box = ipywidgets.Box([self._recorded_button, self._popover])
        box.add_class("labkit-options")
        return box

    @property
    def comparing(self) -> Comparing | None:
        """The comparison started last, or None."""
        return self._comparing

    @property
    def busy(self) -> bool:
        """Whether a comparison is running."""
        return self._comparing is not None and not self._comparing.over

    def refresh(self) -> None:
        """Disables the strategies that cannot run with the current configuration; their tooltips give the reason."""
        try:
            fields = self._fields()
        except SpecError:
            return  # the panel already shows the error
        _, left_out = plan("all", look=False, **fields)
        for name, box in self._boxes.items():
            box.disabled = name in left_out or name == BASELINE.name
            box.tooltip = left_out.get(name, STRATEGIES[name].splits)

    def start(self) -> None:
        """Starts comparing the checked strategies, or shows why it cannot."""
        if self._elsewhere() or self.busy:
            self._said.value = sentence_html("a run is under way; stop it or wait until it finishes")
            return
        try:
            specs, left_out = plan(
                [name for name, box in self._boxes.items() if box.value and name not in self._refused()],
                look=False,
                **self._fields(),
            )
        except SpecError as error:
            self._said.value = sentence_html(str(error))
            return
        self._next()
        self._said.value = ""
        self._comparing = Comparing(specs, left_out, cold=self._cold).start()
        self._free(False)
        self._view.follow(self._comparing, self._over)

    def opened(self) -> None:
        """Call this when the tab is selected: it shows the newest comparison among the recorded runs.

        A comparison started in the tab itself is not replaced.
        """
        if not self._asked:
            _in_a_thread(self._show_newest)

    def _next(self) -> int:
        """The number of a new request, which supersedes those before it."""
        with self._lock:
            self._asked += 1
            return self._asked

    def _show_newest(self) -> None:
        readable, _ = RunFolder.readable(RunFolder.all())
        folders = newest([folder for folder in readable if is_recorded(folder)])
        if folders:
            self._show(0, folders, "Newest comparison in this runs folder. ")

    def _disclose(self, change: dict[str, Any]) -> None:
        self._popover.layout.display = "" if change["new"] else "none"
        if change["new"]:
            _in_a_thread(self._list_runs)

    def _list_runs(self) -> None:
        there = [folder for folder in RunFolder.all()[: -_NEWEST - 1 : -1] if folder.trouble() or is_recorded(folder)]
        chosen = self._list.value
        self._list.options = [(label(folder), str(folder.path)) for folder in there]
        self._list.value = [path for path in chosen if path in {value for _, value in self._list.options}]

    def _show_chosen(self) -> None:
        """Shows the runs selected in the list, or names those that cannot be read."""
        asked = self._next()
        folders = [RunFolder(path) for path in self._list.value]
        _, unreadable = RunFolder.readable(folders)
        if not folders:
            _in_a_thread(lambda: self.show_recorded(asked))
        elif unreadable:
            sentence = "; ".join(f"{name} cannot be read: {why}" for name, why in unreadable.items())
            self._said.value = sentence_html(sentence)
        else:
            self._said.value = ""
            _in_a_thread(lambda: self._show(asked, folders))
        self._recorded_button.value = False

    def show_recorded(self, asked: int | None = None) -> None:
        """Shows the newest recorded run of each strategy with the same training as the newest run, if there are any."""
        asked = self._next() if asked is None else asked
        readable, unreadable = RunFolder.readable(RunFolder.all())
        folders = alike([folder for folder in readable if is_recorded(folder)])
        left = [f"{name} is left out: it cannot be read ({why})." for name, why in unreadable.items()]
        if not folders:
            sentence = "there is no recorded run of a strategy yet; select strategies and press Compare"
            self._said.value = sentence_html(sentence)
            return
        self._said.value = ""
        self._show(asked, folders, after=" ".join(["", *left]))

    def _show(self, asked: int, folders: Sequence[RunFolder], before: str = "", after: str = "") -> None:
        """Shows recorded runs, unless something else was asked for in the meantime."""
        when = recorded_words(max(folders, key=lambda run: run.name))
        found = recorded(folders)
        sentence = f"{before}Recorded runs; nothing is running now. The newest was {when}.{after}"
        with self._lock:
            if asked == self._asked and not self.busy:
                self._view.show(found, {}, sentence)

    def stop(self) -> None:
        """Stops the current run and skips the remaining ones; returns immediately."""
        self._stop_button.disabled = True
        threading.Thread(target=self._comparing.stop, daemon=True, name="labkit stop").start()

    def _refused(self) -> set[str]:
        return {name for name, box in self._boxes.items() if box.disabled and name != BASELINE.name}

    def _free(self, free: bool) -> None:
        self._start_button.disabled = self._recorded_button.disabled = not free
        self._stop_button.disabled = free

    def _over(self) -> None:
        self._free(True)
        try:
            self._comparing.wait(0)
        except Exception as error:  # why a run could not be started
            self._said.value = sentence_html(str(error))


def _in_a_thread(work: Callable[[], None]) -> None:
    """Runs `work`, which reads run folders, outside the kernel's main thread."""
    threading.Thread(target=work, daemon=True, name="labkit recorded runs").start()
