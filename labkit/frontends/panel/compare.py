"""Strategies side by side: the tab that chooses and starts them, and the view of a comparison."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from labkit.analysis.comparison import BASELINE, HEADS, Row, alike, beside, cells, newest, recorded, sentences
from labkit.common.text import escape
from labkit.figures import comparison as pictures
from labkit.frontends.panel.recorded import label
from labkit.frontends.panel.view import style
from labkit.frontends.panel.words import sentence_html
from labkit.plan.spec import SpecError
from labkit.record.folder import RunFolder
from labkit.record.replay import is_recorded, recorded_words
from labkit.runs.comparing import Comparing, plan
from labkit.runs.notebook import headless
from labkit.training.strategies import STRATEGIES

_REDRAW = 0.5  # seconds between two pictures
_FIRST = ("ddp", "fsdp2")  # chosen from the start
_NEWEST = 100  # recorded runs in the list
_INTRODUCTION = (
    "Compare trains the same model with each chosen strategy, one run after another, with the same global batch. "
    "Here you then see their time, speed-up, memory and traffic side by side; Recorded shows the same of runs that are over."
)
_HOW_TO_CHOOSE = "Ctrl or Shift selects several; with none selected, the newest run of each strategy that trained the same."
_TONES = {"equal": "good", "reference": "quiet", "differs": "bad"}


class ComparisonView:
    """A comparison on screen: its table, its charts and what there is to say, drawn anew while it runs."""

    def __init__(self) -> None:
        self._html = ipywidgets.HTML()
        self._html.add_class("labkit-comparison")
        self.widget = self._html

    def follow(self, comparing: Comparing, on_over: Callable[[], None] = lambda: None) -> threading.Thread:
        """Shows a comparison from now on until nothing of it runs any more, in a thread that is given back."""
        thread = threading.Thread(target=self._watch, args=(comparing, on_over), daemon=True, name="labkit view of a comparison")
        thread.start()
        return thread

    def _watch(self, comparing: Comparing, on_over: Callable[[], None]) -> None:
        try:
            while not comparing.over:
                self.show(comparing.rows, comparing.left_out)
                time.sleep(_REDRAW)
            self.show(comparing.rows, comparing.left_out)
        finally:
            on_over()

    def show(self, rows: Sequence[Row], left_out: Mapping[str, str], first: str = "") -> None:
        """Shows rows as they are now, below a sentence that comes `first`."""
        self._html.value = (f"<p>{escape(first)}</p>" if first else "") + comparison_html(rows, left_out)

    def say(self, text: str) -> None:
        """Shows a text in the place of a comparison."""
        self._html.value = f'<p class="labkit-empty">{escape(text)}</p>'


def show_comparison_in_notebook(comparing: Comparing) -> None:
    """Shows a comparison live and returns at once; where nobody watches it waits for the end and leaves plain outputs."""
    from IPython.display import display

    if headless():
        comparing.wait()
        display(comparison_bundle(comparing), raw=True)
        return
    view = ComparisonView()
    widget = ipywidgets.VBox([style(), view.widget])
    widget.add_class("labkit")
    display(widget)
    kept = display({"text/html": "", "text/plain": ""}, raw=True, display_id=True)
    view.follow(comparing, lambda: kept.update(comparison_bundle(comparing), raw=True))


def comparison_bundle(comparing: Comparing) -> dict[str, Any]:
    """The table and the charts as a plain output, which needs no widget, no kernel and no network.

    A page that has the widget hides it: the two show the same.
    """
    html = f'<div class="labkit-kept">{comparison_html(comparing.rows, comparing.left_out)}</div>'
    return {"text/html": html, "text/plain": json.dumps(comparing.to_json(), indent=2)}


class CompareTab:
    """A checkbox for each strategy, a button, and the view.

    `fields` gives those of the present choices, or raises `SpecError`; `cold` is as in `run`; `elsewhere` says
    whether a run is under way in another tab.
    """

    def __init__(self, fields: Callable[[], dict[str, Any]], elsewhere: Callable[[], bool], cold: bool = False):
        self._fields, self._cold, self._elsewhere = fields, cold, elsewhere
        self._comparing: Comparing | None = None
        self._boxes = {
            name: ipywidgets.Checkbox(value=name in (BASELINE, *_FIRST), description=row.title, indent=False, disabled=name == BASELINE)
            for name, row in STRATEGIES.items()
        }
        self._start_button = ipywidgets.Button(description="▶ Compare", tooltip="Run the chosen strategies, one after another")
        self._start_button.on_click(lambda _: self.start())
        self._start_button.add_class("labkit-compare-run")
        self._stop_button = ipywidgets.Button(description="■ Stop", tooltip="End the run that is under way", disabled=True)
        self._stop_button.on_click(lambda _: self.stop())
        self._stop_button.add_class("labkit-compare-stop")
        self._said = ipywidgets.HTML()
        self._view = ComparisonView()
        self._view.say(_INTRODUCTION)
        self._used = False
        boxes = ipywidgets.HBox(list(self._boxes.values()))
        boxes.add_class("labkit-boxes")
        head = ipywidgets.HBox([self._start_button, self._stop_button, self._recorded(), boxes])
        head.add_class("labkit-compare-head")
        self.widget = ipywidgets.VBox([head, self._said, self._view.widget])
        self.widget.add_class("labkit-compare")

    def _recorded(self) -> ipywidgets.Box:
        """A button that opens the list of recorded runs, from which some are chosen and compared."""
        hint = "Compare recorded runs, without running anything"
        self._recorded_button = ipywidgets.ToggleButton(description="Recorded", tooltip=hint)
        self._recorded_button.observe(self._disclose, "value")
        self._recorded_button.add_class("labkit-compare-recorded")
        self._list = ipywidgets.SelectMultiple(rows=9, description="Recorded runs")
        hint = "The table and the charts of the chosen runs"
        self._chosen_button = ipywidgets.Button(description="Compare these", tooltip=hint)
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
        """The comparison that was started last."""
        return self._comparing

    @property
    def busy(self) -> bool:
        """Whether a comparison is under way."""
        return self._comparing is not None and not self._comparing.over

    def refresh(self) -> None:
        """Greys out what cannot run by the present choices; pointing at it says why."""
        try:
            fields = self._fields()
        except SpecError:
            return  # the panel says it already
        _, left_out = plan("all", **fields)
        for name, box in self._boxes.items():
            box.disabled = name in left_out or name == BASELINE
            box.tooltip = left_out.get(name, STRATEGIES[name].splits)

    def start(self) -> None:
        """Begins to compare what is checked; a sentence says why where it cannot."""
        if self._elsewhere() or self.busy:
            self._said.value = sentence_html("a run is under way; wait for its end, or stop it")
            return
        try:
            specs, left_out = plan(
                [name for name, box in self._boxes.items() if box.value and name not in self._refused()], **self._fields()
            )
        except SpecError as error:
            self._said.value = sentence_html(str(error))
            return
        self._said.value, self._used = "", True
        self._comparing = Comparing(specs, left_out, cold=self._cold).start()
        self._free(False)
        self._view.follow(self._comparing, self._over)

    def opened(self) -> None:
        """To be called when the tab comes to the front: it shows the newest comparison among the recorded runs.

        Once something was compared in the tab itself, that stays.
        """
        if not self._used:
            _in_a_thread(self._show_newest)

    def _show_newest(self) -> None:
        readable, _ = RunFolder.readable(RunFolder.all())
        folders = newest([folder for folder in readable if is_recorded(folder)])
        if folders and not self._used:
            self._show(folders, "The newest comparison of this runs folder. ")

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
        """Shows the runs that are chosen in the list; one sentence names those that cannot be read."""
        self._used = True
        folders = [RunFolder(path) for path in self._list.value]
        _, unreadable = RunFolder.readable(folders)
        if not folders:
            _in_a_thread(self.show_recorded)
        elif unreadable:
            told = "; ".join(f"{name} cannot be read: {why}" for name, why in unreadable.items())
            self._said.value = sentence_html(told)
        else:
            self._said.value = ""
            _in_a_thread(lambda: self._show(folders))
        self._recorded_button.value = False

    def show_recorded(self) -> None:
        """Shows the newest recorded run of each strategy that trained the same as the newest of all; a sentence says
        where there is none.
        """
        readable, unreadable = RunFolder.readable(RunFolder.all())
        folders = alike([folder for folder in readable if is_recorded(folder)])
        left = [f"{name} is left out: it cannot be read ({why})." for name, why in unreadable.items()]
        if not folders:
            self._said.value = sentence_html("there is no recorded run of a strategy yet; compare some, and they are recorded")
            return
        self._said.value = ""
        self._show(folders, after=" ".join(["", *left]))

    def _show(self, folders: Sequence[RunFolder], before: str = "", after: str = "") -> None:
        """Shows recorded runs, if no comparison has begun meanwhile."""
        when = recorded_words(max(folders, key=lambda run: run.name))
        found = recorded(folders)
        if not self.busy:
            self._view.show(found, {}, f"{before}Recorded runs, nothing runs now. The newest was {when}.{after}")

    def stop(self) -> None:
        """Ends the run that is under way, and does not begin the rest; returns at once."""
        self._stop_button.disabled = True
        threading.Thread(target=self._comparing.stop, daemon=True, name="labkit stop").start()

    def _refused(self) -> set[str]:
        return {name for name, box in self._boxes.items() if box.disabled and name != BASELINE}

    def _free(self, free: bool) -> None:
        self._start_button.disabled = self._recorded_button.disabled = not free
        self._stop_button.disabled = free

    def _over(self) -> None:
        self._free(True)
        try:
            self._comparing.wait(0)
        except Exception as error:  # what kept a run from being started
            self._said.value = sentence_html(str(error))


def _in_a_thread(work: Callable[[], None]) -> None:
    """Off the kernel's own thread: run folders are read."""
    threading.Thread(target=work, daemon=True, name="labkit recorded runs").start()


def comparison_html(rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """The table, the charts and the sentences, every text escaped."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(rows, left_out))
    drawn = pictures.svg(rows, beside(rows), height=169)
    return f'{_table(rows)}<div class="labkit-plain">{drawn}</div><div class="labkit-told">{said}</div>'


def _table(rows: Sequence[Row]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
    body = "".join(_row(row, cells(row)) for row in rows)
    body += "".join(_row(row, (*cells(row)[:-1], "recorded elsewhere"), "labkit-recorded") for row in beside(rows))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: Row, texts: Sequence[str], kind: str = "") -> str:
    verdict = row.badge.verdict if row.badge else ""
    hint = escape(row.badge.sentence if row.badge else row.words, quote=True)
    *figures, last = (escape(text) for text in texts)
    tone = "bad" if row.failed else _TONES.get(verdict, "waiting" if verdict else "quiet")
    badge = f'<td class="labkit-badge labkit-{tone}" title="{hint}"><i></i>{last}</td>'
    return f'<tr class="{kind}">' + "".join(f"<td>{text}</td>" for text in figures) + badge + "</tr>"
