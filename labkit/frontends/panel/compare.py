"""The Compare tab: runs several strategies one after another, or shows recorded runs; its table, charts and remarks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import ipywidgets

from labkit.analysis.changes import Difference, of_folders
from labkit.analysis.comparison import HEADS, Row, alike, cells, newest, recorded, recorded_elsewhere, sentences
from labkit.common.text import escape
from labkit.figures import comparison as pictures
from labkit.figures.tables import titled_html
from labkit.frontends.panel import widgets
from labkit.frontends.panel.recorded import newest_over
from labkit.frontends.panel.view import style
from labkit.frontends.panel.widgets import sentence_html
from labkit.plan.spec import SpecError
from labkit.record.folder import RunFolder
from labkit.record.follow import is_recorded, recorded_words
from labkit.runs.comparing import Comparing, plan
from labkit.runs.notebook import headless
from labkit.training.strategies import BASELINE, STRATEGIES

# ---- the view of a comparison

_REDRAW = 0.5  # seconds between two redraws
_TONES = {"equal": "good", "reference": "quiet", "differs": "bad"}


class ComparisonView:
    """Shows a comparison: its table, charts and remarks, updated while it runs."""

    def __init__(self) -> None:
        self._html = widgets.HTML(css="labkit-comparison")
        self._shown: tuple[Any, ...] | None = None
        self.widget = self._html

    def follow(self, comparing: Comparing, on_over: Callable[[], None] = lambda: None) -> threading.Thread:
        """Shows a comparison until all its runs are over, in a thread, which is returned."""
        return widgets.in_thread("view of a comparison", self._watch, comparing, on_over)

    def _watch(self, comparing: Comparing, on_over: Callable[[], None]) -> None:
        try:
            for rows in comparing.watched(_REDRAW):
                self.show(rows, comparing.left_out)
            self.show(comparing.rows, comparing.left_out)
        finally:
            on_over()

    def show(
        self, rows: Sequence[Row], left_out: Mapping[str, str], first: str = "", changed: Difference | None = None
    ) -> None:
        """Shows the rows, with the sentence `first` above them, and what changed between two runs; draws nothing if
        they are shown already."""
        what = tuple(rows), dict(left_out), first, changed
        if what == self._shown:
            return
        self._shown = what
        self._html.value = (f"<p>{escape(first)}</p>" if first else "") + comparison_html(rows, left_out, changed)

    @property
    def empty(self) -> bool:
        return self._shown is None

    def say(self, text: str) -> None:
        """Shows a text instead of a comparison."""
        self._shown = None
        self._html.value = f'<p class="labkit-empty">{escape(text)}</p>'


def show_comparison_in_notebook(comparing: Comparing) -> None:
    """Shows a comparison live and returns immediately. If headless, waits for the end and displays static outputs."""
    from IPython.display import display

    if headless():
        comparing.wait()
        display(comparison_bundle(comparing), raw=True)
        return
    view = ComparisonView()
    widget = widgets.VBox([style(), view.widget], css="labkit")
    display(widget)
    static = display({"text/html": "", "text/plain": ""}, raw=True, display_id=True)
    view.follow(comparing, lambda: static.update(comparison_bundle(comparing), raw=True))


def comparison_bundle(comparing: Comparing) -> dict[str, Any]:
    """The table and the charts as a static output, which needs no widget, kernel or network.

    A page that shows the widget hides it, because both show the same.
    """
    html = f'<div class="labkit-static">{comparison_html(comparing.rows, comparing.left_out)}</div>'
    return {"text/html": html, "text/plain": json.dumps(comparing.to_json(), indent=2)}


def comparison_html(rows: Sequence[Row], left_out: Mapping[str, str], changed: Difference | None = None) -> str:
    """The table, what changed between two runs, the charts and the remarks as HTML, all text escaped."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(rows, left_out))
    drawn = pictures.svg(rows, recorded_elsewhere(rows), height=169)
    changes = _changes_html(changed)
    return f'{_table(rows)}{changes}<div class="labkit-plain">{drawn}</div><div class="labkit-notes">{said}</div>'


def _table(rows: Sequence[Row]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
    body = "".join(_row(row, cells(row)) for row in rows)
    body += "".join(
        _row(row, (*cells(row)[:-1], "recorded elsewhere"), "labkit-recorded") for row in recorded_elsewhere(rows)
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _changes_html(changed: Difference | None) -> str:
    if changed is None:
        return ""
    tables = "".join(map(titled_html, changed.tables))
    return f'<div class="labkit-changes"><p>{escape(changed.sentence)}</p>{tables}</div>'


def _row(row: Row, texts: Sequence[str], kind: str = "") -> str:
    verdict = row.badge.verdict if row.badge else ""
    hint = escape(row.badge.sentence if row.badge else row.words, quote=True)
    *figures, last = (escape(text) for text in texts)
    tone = "bad" if row.failed else _TONES.get(verdict, "waiting" if verdict else "quiet")
    badge = f'<td class="labkit-badge labkit-{tone}" title="{hint}"><i></i>{last}</td>'
    return f'<tr class="{kind}">' + "".join(f"<td>{text}</td>" for text in figures) + badge + "</tr>"


# ---- the tab

_NEWEST = 100  # recorded runs in the list
_SHOWN = 3  # ready comparisons
_INTRODUCTION = (
    "One click trains the same model with each of these strategies, one run after another, with the same global batch "
    "size. A table then shows their time, speed-up, memory and traffic side by side."
)
_NONE_READY = "No ready comparison can run with these settings"
_HOW_TO_CHOOSE = (
    "Ctrl or Shift selects several. With no selection: the newest run of each strategy with the same training."
)


@dataclass(frozen=True)
class Question:
    """A ready comparison: what a student would ask, what to look at in the answer, and the strategies that give it,
    next to a single device."""

    title: str
    look_at: str
    strategies: tuple[str, ...]


QUESTIONS = (
    Question("One device or several?", "Speed-up: how far from the number of ranks, and what the rest is.", ("ddp",)),
    Question(
        "Where does the memory go?",
        "Peak memory: ZeRO-1 shards the optimizer state, FSDP2 the parameters and gradients too.",
        ("ddp", "zero1", "fsdp2"),
    ),
    Question(
        "Split the batch or the layers?",
        "Sent per step: DDP sends gradients, TP sends activations in every layer.",
        ("ddp", "tp"),
    ),
    Question(
        "Split the batch or the experts?",
        "Sent per step: an all-to-all carries tokens to their experts instead of copies of the experts.",
        ("ddp", "ep"),
    ),
    Question(
        "Split the batch or the sequence?",
        "Peak memory: CP divides the activations of a long window, and sends keys and values.",
        ("ddp", "cp"),
    ),
    Question(
        "Split across the layers or between them?",
        "Time per step: TP waits in every layer, PP waits while its pipeline fills and drains.",
        ("tp", "pp"),
    ),
    Question(
        "Talk at every step?",
        "Sent per step: DiLoCo exchanges parameters once in many steps. Does the loss still fall?",
        ("ddp", "diloco"),
    ),
    Question(
        "One process or one per device?",
        "Time per step: DP drives all devices from one process, DDP from one process each.",
        ("dp", "ddp"),
    ),
)


class Card:
    """A question with the button that runs its comparison; a click anywhere on the card presses it."""

    def __init__(self, on_run: Callable[[Question], None]) -> None:
        self.question: Question | None = None
        self._text = widgets.HTML()
        self.button = widgets.button("", None, lambda: self.question and on_run(self.question))
        self.widget = widgets.VBox([self._text, self.button], layout=widgets.HIDDEN, css="labkit-card")

    def show(self, question: Question | None) -> None:
        """Shows a question; None hides the card."""
        self.question = question
        widgets.show(self.widget, question is not None)
        if question:
            self._text.value = f"<h4>{escape(question.title)}</h4><p>{escape(question.look_at)}</p>"
            titles = [STRATEGIES[name].title for name in (BASELINE.name, *question.strategies)]
            self.button.description = f"▶ {', '.join(titles)}"
            self.button.tooltip = f"{question.title} Runs {', '.join(titles)}, one after another"


class CompareTab:
    """Ready comparisons, a checkbox for each strategy, the buttons, and the view.

    `fields` returns the fields of Spec of the current configuration, or raises `SpecError`, also until its data are
    known to be available; `cold` is as in `run`;
    `elsewhere` returns whether another tab is running something.
    """

    def __init__(self, fields: Callable[[], dict[str, Any]], elsewhere: Callable[[], bool], cold: bool = False):
        self._fields, self._cold, self._elsewhere = fields, cold, elsewhere
        self._comparing: Comparing | None = None
        self._boxes = {
            name: widgets.Checkbox(
                value=row.compared or row is BASELINE, description=row.title, indent=False, disabled=row is BASELINE
            )
            for name, row in STRATEGIES.items()
        }
        self._cards = [Card(self._ask) for _ in range(_SHOWN)]
        self._stop_button = widgets.button(
            "■ Stop", "Stop the comparison", self.stop, disabled=True, css="labkit-compare-stop"
        )
        self._said = widgets.HTML()
        self._view = ComparisonView()
        self._view.say(_INTRODUCTION)
        # Threads read recorded runs: of what was asked for, only the newest is shown.
        self._lock = threading.Lock()
        self._asked = 0
        cards = widgets.HBox([card.widget for card in self._cards], css="labkit-cards")
        head = widgets.HBox(
            [self._own_choice(), self._recorded(), self._stop_button, self._said], css="labkit-compare-head"
        )
        self.widget = widgets.VBox([cards, head, self._view.widget], css="labkit-compare")

    def _own_choice(self) -> ipywidgets.Box:
        """A button that opens the checkboxes of all strategies."""
        hint = "Choose the strategies to compare"
        self._choose_button = widgets.toggle("Choose yourself", hint, lambda on: widgets.show(self._choices, on))
        hint = "Run the selected strategies, one after another"
        self._start_button = widgets.button("▶ Compare", hint, self.start, css="labkit-compare-run")
        boxes = widgets.HBox(list(self._boxes.values()), css="labkit-boxes")
        self._choices = widgets.VBox([boxes, self._start_button], layout=widgets.HIDDEN)
        return _popover(self._choose_button, self._choices)

    def _recorded(self) -> ipywidgets.Box:
        """A button that opens the list of recorded runs to compare."""
        hint = "Compare recorded runs without running anything"
        self._recorded_button = widgets.toggle("Recorded", hint, self._disclose)
        self._list = ipywidgets.SelectMultiple(rows=9, description="Recorded runs")
        hint = "Show the table and charts of the selected runs"
        self._chosen_button = widgets.button("Compare selected", hint, self._show_chosen)
        help_ = widgets.HTML(f'<div class="labkit-help">{_HOW_TO_CHOOSE}</div>')
        below = widgets.HBox([self._chosen_button, help_])
        self._popover = widgets.VBox([self._list, below], layout=widgets.HIDDEN)
        return _popover(self._recorded_button, self._popover)

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
        left_out = _left_out(fields)
        for name, box in self._boxes.items():
            box.disabled = name in left_out or name == BASELINE.name
            box.tooltip = left_out.get(name, STRATEGIES[name].splits)
        left_out = _left_out(_on_several(fields))
        ready = [question for question in QUESTIONS if not left_out.keys() & {BASELINE.name, *question.strategies}]
        for card, question in zip_longest(self._cards, ready[:_SHOWN]):
            card.show(question)
        if self._view.empty:
            self._view.say(_INTRODUCTION if ready else f"{_NONE_READY}: {next(iter(left_out.values()))}.")

    def start(self) -> None:
        """Starts comparing the checked strategies, or shows why it cannot."""
        boxes = self._boxes.items()
        chosen = [name for name, box in boxes if box.value and (name == BASELINE.name or not box.disabled)]
        self._compare(chosen, self._fields)

    def _ask(self, question: Question) -> None:
        """Starts a ready comparison; the checkboxes then show its strategies."""
        for name, box in self._boxes.items():
            box.value = name in (BASELINE.name, *question.strategies)
        self._compare(question.strategies, lambda: _on_several(self._fields()))

    def _compare(self, strategies: Sequence[str], fields: Callable[[], dict[str, Any]]) -> None:
        self._choose_button.value = self._recorded_button.value = False
        if self._elsewhere() or self.busy:
            self._said.value = sentence_html("a run is under way; stop it or wait until it finishes")
            return
        try:
            specs, left_out = plan(strategies, look=False, **fields())
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
            widgets.in_thread("recorded runs", self._show_newest)

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

    def _disclose(self, shown: bool) -> None:
        widgets.show(self._popover, shown)
        if shown:
            self._list.disabled = True  # a choice would be lost when the list is filled
            widgets.in_thread("recorded runs", self._list_runs)

    def _list_runs(self) -> None:
        chosen = self._list.value
        self._list.options = newest_over(_NEWEST)
        self._list.value = [path for path in chosen if path in {value for _, value in self._list.options}]
        self._list.disabled = False

    def _show_chosen(self) -> None:
        """Shows the runs selected in the list, or names those that cannot be read."""
        asked = self._next()
        folders = [RunFolder(path) for path in self._list.value]
        _, unreadable = RunFolder.readable(folders)
        if not folders:
            widgets.in_thread("recorded runs", self.show_recorded, asked)
        elif unreadable:
            sentence = "; ".join(f"{name} cannot be read: {why}" for name, why in unreadable.items())
            self._said.value = sentence_html(sentence)
        else:
            self._said.value = ""
            widgets.in_thread("recorded runs", self._show, asked, folders)
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
        folders = sorted(folders, key=lambda run: run.name)  # the earlier one is before, the later one after
        when = recorded_words(folders[-1])
        found = recorded(folders)
        changed = of_folders(*folders) if len(folders) == 2 else None
        sentence = f"{before}Recorded runs; nothing is running now. The newest was {when}.{after}"
        with self._lock:
            if asked == self._asked and not self.busy:
                self._view.show(found, {}, sentence, changed)

    def stop(self) -> None:
        """Stops the current run and skips the remaining ones; returns immediately."""
        self._stop_button.disabled = True
        widgets.in_thread("stop", self._comparing.stop)

    def _free(self, free: bool) -> None:
        for button in (self._start_button, self._recorded_button, *(card.button for card in self._cards)):
            button.disabled = not free
        self._stop_button.disabled = free

    def _over(self) -> None:
        self._free(True)
        try:
            self._comparing.wait(0)
        except Exception as error:  # why a run could not be started
            self._said.value = sentence_html(str(error))


def _left_out(fields: Mapping[str, Any]) -> dict[str, str]:
    """The strategies that cannot run with some fields of Spec, with the reason."""
    try:
        return plan("all", look=False, **fields)[1]
    except SpecError as error:  # not even the baseline can
        return dict.fromkeys(STRATEGIES, str(error))


def _on_several(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with at least two ranks: the questions are about several."""
    return fields | {"nproc": max(2, fields["nproc"])}


def _popover(button: ipywidgets.ToggleButton, content: ipywidgets.Box) -> ipywidgets.Box:
    """A button with the box that it opens below itself."""
    button.add_class("labkit-compare-more")
    content.add_class("labkit-runs")
    return widgets.Box([button, content], css="labkit-options")
