"""The panel: the configuration with its Spec, one row of actions, and tabs that all show the same run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ipywidgets

from labkit.common.arguments import check_flag, shown
from labkit.common.text import escape
from labkit.common.units import counted
from labkit.frontends.panel import widgets
from labkit.frontends.panel.recorded import Install, Instead, OpenTab, Recorded, find_all, spec_of, under_way
from labkit.frontends.panel.view import RunView, StaticFigures, display_static, style, wait_and_display
from labkit.frontends.panel.widgets import Presentation, sentence_html
from labkit.launch.warm.client import prepare
from labkit.plan.spec import (
    DEFAULT,
    Spec,
    SpecError,
    about,
    check_available,
    check_fields,
    takes_long,
    unsupported,
    without_effect,
)
from labkit.record.documents import SpecFields, Unreadable
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, recorded_words
from labkit.record.state import RunState
from labkit.runs.handle import Run, start
from labkit.runs.notebook import headless, in_notebook
from labkit.setup.machine import Machine
from labkit.training.faults import FAULTS
from labkit.training.rows import INPUT_PIPELINE, Option, Strategy, Workload
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

if TYPE_CHECKING:
    from labkit.frontends.panel.compare import CompareTab
    from labkit.frontends.panel.sources import Sources

# ---- whether what a configuration needs is available


class Availability:
    """The answers for the configurations of a panel. `on_answer` is called in a thread when an answer arrives.

    A configuration that was available stays so. One that was not is asked again after the next change of the
    configuration; until then its refusal stays.
    """

    def __init__(self, on_answer: Callable[[], None]):
        self._on_answer = on_answer
        self._answers: dict[tuple[str | None, ...], SpecError | None] = {}
        self._asking: set[tuple[str | None, ...]] = set()
        self._lock = threading.Lock()

    def known(self, spec: Spec, ask: bool = True) -> bool:
        """Whether a Spec is known to be available; if it is not, `ask` asks in a thread. Raises the `SpecError` of the
        last answer if that was a refusal."""
        if not takes_long(spec):
            return True
        key = (spec.strategy, spec.workload, spec.data, spec.data_dir)
        with self._lock:
            answer = self._answers.get(key, ...)
            if ask and answer is not None and key not in self._asking:
                self._asking.add(key)
                widgets.in_thread("availability of data", self._ask, key, spec)
        if isinstance(answer, SpecError):
            raise answer
        return answer is None

    def _ask(self, key: tuple[str | None, ...], spec: Spec) -> None:
        try:
            check_available(spec)
            answer = None
        except SpecError as error:
            answer = error
        with self._lock:
            self._answers[key] = answer
            self._asking.discard(key)
        self._on_answer()


# ---- the settings that fold away


class Settings:
    """A button and the box that it unfolds: the batch size and so on, and the options of the chosen strategy and
    workload, each of which keeps its value while another strategy is chosen.

    `values` and `fault` are the initial values, for the strategy and workload that are `chosen`; `first` are widgets
    that are shown above the options; `on_change` is called with the change of each option.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        fault: str | None,
        chosen: tuple[Strategy, Workload],
        first: Sequence[ipywidgets.Widget],
        on_change: Callable[[dict[str, Any]], None],
    ):
        self._first, self._on_change = first, on_change
        self._known: dict[str, Any] = dict(values)  # also of strategies that are not chosen now
        self._row, self._workload = chosen
        self._widgets: dict[str, ipywidgets.ValueWidget] = {}
        hint = "Batch size, length, precision, further options and faults"
        self.more = widgets.toggle("Settings", hint, self._disclose, css="labkit-more")
        faults = [("none", None), *((row.title, row.name) for row in FAULTS.values())]
        hint = "Inject a fault into the generated script"
        self.fault = widgets.dropdown("Inject fault", faults, fault, tooltip=hint)
        self.popover = widgets.VBox(layout=widgets.HIDDEN, css="labkit-popover")
        self._shows = widgets.HTML()
        self.widget = widgets.Box([self.more, self.popover], layout={}, css="labkit-options")

    @property
    def values(self) -> dict[str, Any]:
        """The values of the options of the chosen strategy and workload, by name."""
        return self.values_of(self._row.all_options + self._workload.options)

    def values_of(self, options: tuple[Option, ...]) -> dict[str, Any]:
        return {option.name: self._known.get(option.name, option.default) for option in options}

    def fit(self, row: Strategy, workload: Workload) -> None:
        """Offers the options of a strategy and a workload."""
        self._row, self._workload = row, workload
        fault = FAULTS.get(self.fault.value)
        shows = fault.shows if fault else "Injects a typical fault into the generated script, so that you can study it."
        self._shows.value = f'<div class="labkit-help">{escape(shows)}</div>'
        self.more.description = "Settings, fault" if fault else "Settings"
        if self.more.value:
            self._fill()

    def _fill(self) -> None:
        """Makes the widgets of the options: only when the box is open, because a page needs long for so many."""
        row, workload = self._row, self._workload
        wanted = {option.name: option for option in row.all_options + workload.options}
        if wanted.keys() == self._widgets.keys():
            return
        self._widgets = {name: _widget(option, self._known) for name, option in wanted.items()}
        for name, widget in self._widgets.items():
            widget.observe(partial(self._keep, name), "value")
        listed = [choice for heading, group in _groups(row, workload) for choice in self._listed(heading, group)]
        heading = widgets.HTML('<div class="labkit-heading">Fault injection</div>')
        self.popover.children = [*self._first, *listed, heading, self.fault, self._shows]

    def _keep(self, name: str, change: dict[str, Any]) -> None:
        self._known[name] = change["new"]
        self._on_change(change)

    def _listed(self, heading: str, group: tuple[Option, ...]) -> Iterator[ipywidgets.Widget]:
        """A heading, and each option of the group with its help text."""
        if group:
            yield widgets.HTML(f'<div class="labkit-heading">{escape(heading)}</div>')
        for option in group:
            yield self._widgets[option.name]
            yield widgets.HTML(f'<div class="labkit-help">{escape(option.help)}</div>')

    def _disclose(self, shown: bool) -> None:
        if shown:
            self._fill()
        widgets.show(self.popover, shown)


def _groups(row: Strategy, workload: Workload) -> tuple[tuple[str, tuple[Option, ...]], ...]:
    common = tuple(option for option in row.all_options if option not in (*row.options, *INPUT_PIPELINE))
    pipeline = tuple(option for option in INPUT_PIPELINE if option.name not in row.lacks)
    return (
        (row.title, row.options),
        ("All strategies", common),
        ("Input pipeline", pipeline),
        (workload.title.partition(":")[0], workload.options),
    )


def _widget(option: Option, values: dict[str, Any]) -> ipywidgets.ValueWidget:
    """A widget for the type of an option."""
    value, name = values.get(option.name, option.default), option.name
    common = {"value": value, "description": name, "tooltip": option.help}
    if option.choices:
        return widgets.dropdown(name, list(option.choices), value, tooltip=option.help)
    if isinstance(option.default, bool):
        return widgets.Checkbox(indent=False, **common)
    if isinstance(option.default, (int, float)):
        kind = ipywidgets.BoundedIntText if isinstance(option.default, int) else ipywidgets.BoundedFloatText
        return kind(min=option.bounds.minimum, max=option.bounds.maximum, **common)
    return widgets.Text(**common)


# ---- the choices

_ABOUT = {flag.name: about(flag) for flag in fields(Spec)}
_SCALING = (
    "per rank: the global batch grows with the number of ranks (weak scaling); "
    "in total: it is split over the ranks (strong scaling)"
)


class Choices:
    """Widgets for a Spec on `machine` with `defaults` (fields of Spec) as initial values; `on_change` is called after
    each change.

    Raises `SpecError` if the defaults are invalid or ask for more ranks than the machine supports.
    """

    def __init__(self, machine: Machine, defaults: dict[str, Any], on_change: Callable[[], None]):
        self._machine, self._on_change, self._quiet = machine, on_change, False
        for name, value in check_fields(defaults).items():
            if not _ABOUT[name].panel and value:
                raise SpecError(
                    name, f"the panel does not take {name}={shown(value)}; start the run with run(), and show() it"
                )
        start = _settled(Spec(**defaults), machine)
        self._kept = {name: getattr(start, name) for name in defaults if _ABOUT[name].panel == DEFAULT}
        self._wanted_nproc = start.nproc
        self.precision = widgets.dropdown("precision", list(_ABOUT["precision"].choices), start.precision)
        self._make(start)
        self._settings = Settings(
            start.options, start.fault, (start.strategy_row, WORKLOADS[start.workload]), self._first(), self._changed
        )
        self._fit()
        for widget in (
            *(self.strategy, self.further, self.workload, self.device, self.nproc, self.batch, self.scaling),
            *(self.length, self.unit, self.precision, self._settings.fault),
        ):
            widget.observe(self._changed, "value")

    def _make(self, start: Spec) -> None:
        device = "cuda" if self._machine.gpus and start.device == "cuda" else "cpu"
        usual = [row for row in STRATEGIES.values() if not row.further]
        rest = [row for row in STRATEGIES.values() if row.further]
        self.strategy = widgets.ToggleButtons(
            options=[(row.title, row.name) for row in usual],
            tooltips=[row.splits for row in usual],
            value=None if STRATEGIES[start.strategy].further else start.strategy,
            description="Strategy",
            layout={"width": "auto"},
            css="labkit-strategy labkit-field",
        )
        names = [("more", ""), *((row.title, row.name) for row in rest)]
        value = start.strategy if STRATEGIES[start.strategy].further else ""
        name = "More strategies"
        self.further = widgets.dropdown(name, names, value, tooltip=name, css="labkit-further")
        pairs = [
            (f"{row.title.partition(':')[0]} · {data}", (row.name, data))
            for row in WORKLOADS.values()
            for data in row.data
        ]
        value, css = (start.workload, start.data), "labkit-field labkit-workload"
        self.workload = widgets.dropdown("Workload", pairs, value, layout={"width": "190px"}, css=css)
        has_gpus = bool(self._machine.gpus)
        names = [*([("GPUs", "cuda")] if has_gpus else []), ("CPU ranks", "cpu")]
        layout = {"width": "110px"} | ({} if has_gpus else widgets.HIDDEN)
        self.device = widgets.dropdown("Train on", names, device, layout=layout, css="labkit-field")
        look = {"description": "Ranks", "layout": {"width": "64px"}, "css": "labkit-field"}
        self.nproc = widgets.BoundedIntText(value=start.nproc, min=1, max=max(start.nproc, 1), **look)
        self.batch = _number("batch_size", start.batch_size, description="Batch size", layout={"width": "68px"})
        names, css = [("per rank", "weak"), ("in total", "strong")], "labkit-field labkit-joined"
        look = {"tooltip": _SCALING, "layout": {"width": "90px"}, "css": css}
        self.scaling = widgets.dropdown("Batch size counts samples", names, start.scaling, **look)
        self.length = _number("steps", start.steps or start.epochs, description="Train for", layout={"width": "70px"})
        unit = "steps" if start.steps else "epochs"
        names = ["epochs", "steps"]
        self.unit = widgets.dropdown("Train for: unit", names, unit, layout={"width": "80px"}, css=css)
        self.explanation, self.where = widgets.HTML(), widgets.HTML(layout={})
        self._mark_further()

    @property
    def what(self) -> tuple[ipywidgets.Widget, ...]:
        """What is trained: strategy, workload and ranks."""
        return self.strategy, self.further, self.workload, self.nproc

    @property
    def settings(self) -> ipywidgets.Widget:
        """The button that unfolds everything else."""
        return self._settings.widget

    def _first(self) -> list[ipywidgets.Widget]:
        """The settings of every run, in rows, above the options of the strategy."""
        row = widgets.HBox([self.batch, self.scaling, self.length, self.unit], css="labkit-row")
        return [self.device, row, self.precision]

    @property
    def chosen(self) -> str:
        return self.further.value or self.strategy.value

    def spec(self) -> Spec:
        """The Spec of the current configuration, settled for this machine. Raises `SpecError` if it cannot run.

        Whether its data are available is not checked, because it may take seconds.
        """
        return Spec(
            strategy=self.chosen,
            nproc=self.nproc.value,
            batch_size=self.batch.value,
            scaling=self.scaling.value,
            precision=self.precision.value,
            options=self._settings.values,
            fault=self._settings.fault.value,
            **self._training(),
        ).settled(self._machine)

    def comparable(self) -> dict[str, Any]:
        """The fields of Spec that are the same for all strategies of a comparison: the same training and global batch
        size.
        """
        present = self.spec()
        batch = {"batch_size": present.global_batch, "scaling": "strong", "nproc": self._wanted_nproc}
        kept = {option.name: present.options[option.name] for option in WORKLOADS[present.workload].options}
        return batch | {"precision": present.precision, "options": kept} | self._training()

    def _training(self) -> dict[str, Any]:
        workload, data = self.workload.value
        length = {self.unit.value: self.length.value}
        training = {"workload": workload, "data": data, "device": self.device.value} | length | self._kept
        idle = without_effect(training)  # such as the folder of another data set
        return {name: value for name, value in training.items() if name not in idle}

    # ---- keeping the settings consistent

    def _changed(self, change: dict[str, Any]) -> None:
        if self._quiet:
            return
        if change["owner"] is self.further and not change["new"]:
            self.further.value = change["old"]  # "more" is not a strategy: keep the selection
            return
        with self._quietly():
            if change["owner"] is self.strategy:
                self.further.value = ""
            if change["owner"] is self.further:
                self.strategy.value = None
            self._mark_further()
            if change["owner"] is self.nproc:
                self._wanted_nproc = self.nproc.value
            if change["owner"] is self.workload:
                self._fit_batch()
            if change["owner"] is self.scaling:
                self._keep_global_batch()
            self._fit()
        self._on_change()

    def _fit(self) -> None:
        """Updates the bounds and lists that depend on other settings."""
        self.nproc.description = "GPUs" if self.device.value == "cuda" else "CPU ranks"
        self._fit_ranks()
        self._fit_precision()
        where = _shared_cores(self._machine, self.nproc.value) if self.device.value == "cpu" else ""
        self.where.value = f'<div class="labkit-where">{escape(where or _devices_of(self._machine))}</div>'
        row = STRATEGIES[self.chosen]
        self._settings.fit(row, WORKLOADS[self.workload.value[0]])
        sentences = (("What is split", row.splits), ("What is sent", row.sends), ("Note", row.note(self.device.value)))
        rows = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in sentences if text)
        self.explanation.value = f'<div class="labkit-explanation">{rows}</div>'

    def _fit_ranks(self) -> None:
        most = len(self._machine.gpus) if self.device.value == "cuda" else self._machine.max_cpu_ranks
        asked = {"strategy": self.chosen, "workload": self.workload.value[0]}
        possible = [number for number in range(1, most + 1) if _runs(**asked, nproc=number)] or list(range(1, most + 1))
        self.nproc.min, self.nproc.max = 1, max(possible)
        self.nproc.min = min(possible)
        self.nproc.value = min(possible, key=lambda number: abs(number - self._wanted_nproc))
        self.nproc.disabled = len(possible) == 1

    def _fit_precision(self) -> None:
        gpus, lacks = self._machine.gpus[: self.nproc.value], STRATEGIES[self.chosen].lacks
        known = [
            name
            for name in _ABOUT["precision"].choices
            if name not in lacks and unsupported(name, self.device.value, gpus) is None
        ]
        chosen = self.precision.value
        if list(self.precision.options) != known:
            self.precision.options = known
            self.precision.value = chosen if chosen in known else known[0]

    def _fit_batch(self) -> None:
        default = WORKLOADS[self.workload.value[0]].batch_size
        self.batch.value = default if self.scaling.value == "weak" else default * self._data_ranks()

    def _keep_global_batch(self) -> None:
        ranks = self._data_ranks()
        self.batch.value = (
            self.batch.value * ranks if self.scaling.value == "strong" else max(1, self.batch.value // ranks)
        )

    def _data_ranks(self) -> int:
        """The number of data-parallel ranks; 1 if the other settings contradict the strategy."""
        own = self._settings.values_of(STRATEGIES[self.chosen].options)
        try:
            return Spec(
                strategy=self.chosen, workload=self.workload.value[0], nproc=self.nproc.value, options=own
            ).data_ranks
        except SpecError:
            return 1

    def _mark_further(self) -> None:
        mark = self.further.add_class if self.further.value else self.further.remove_class
        mark("mod-active")

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False


def _settled(spec: Spec, machine: Machine) -> Spec:
    """The initial configuration on this machine; raises only for errors that no widget can correct."""
    try:
        return spec.settled(machine)
    except SpecError as error:
        if error.field in ("nproc", "device", "strategy", "options") and error.extra is None:
            raise
        device = "cuda" if machine.gpus and spec.device != "cpu" else "cpu"
        return Spec(**spec.to_json() | {"device": device, "nproc": spec.nproc or machine.default_nproc(device)})


def _runs(**asked: Any) -> bool:
    try:
        Spec(**asked)
    except SpecError:
        return False
    return True


def _number(name: str, value: int, **settings: Any) -> ipywidgets.BoundedIntText:
    """A widget for a numeric field of Spec, with the bounds and the help that the field declares."""
    known = _ABOUT[name]
    low, high = known.bounds.minimum, known.bounds.maximum
    return widgets.BoundedIntText(value=value, min=low, max=high, tooltip=known.help, css="labkit-field", **settings)


def _devices_of(machine: Machine) -> str:
    """The devices that a run can use: `2 × Tesla T4`, or why there is no GPU."""
    names = [gpu.name for gpu in machine.gpus]
    if names:
        return " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    reason = machine.no_gpu_reason.removeprefix("this machine has ")
    return "no GPU here: CPU ranks over gloo" if reason == "no GPU" else f"{machine.no_gpu_reason}: CPU ranks over gloo"


def _shared_cores(machine: Machine, ranks: int) -> str:
    """That CPU ranks share cores, which makes their steps slower; empty if each can have its own."""
    if ranks <= machine.cores:
        return ""
    return f"{ranks} CPU ranks share {counted(machine.cores, 'core')}: they take turns"


# ---- the panel

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
        self.box = widgets.VBox(css="labkit-later")

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
        self._files = Later(lambda: OpenTab(self._kept))
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
        return self._run

    def _make(self, presentation: bool) -> None:
        self._run_button = widgets.button("▶ Run", _RUN_HINT, self._start, css="labkit-run")
        self._batch = widgets.HTML()
        view, choices = self._view, self._choices
        of_run = (view.live, self._sources.box, view.logs.widget, view.timeline.widget, view.memory.widget)
        shown = (*of_run, self._compare.box, self._files.box)
        self._tabs = tabs = ipywidgets.Tab(shown, titles=_TABS, selected_index=0)
        tabs.add_class("labkit-tabs")
        tabs.observe(self._turned, "selected_index")
        mode = Presentation(on=presentation)
        self._install = Install(self._changed)
        first = widgets.HBox([*choices.what, self._run_button, view.stop_button, view.predict.button], css="labkit-row")
        said = widgets.HBox([self._batch, self._install.widget, choices.where], css="labkit-status-row")
        self._own = widgets.VBox([first, choices.explanation], layout={})
        self._head = widgets.VBox([self._own, self._recorded.widget, said], css="labkit-head")
        self._settings = choices.settings
        actions = widgets.HBox(
            [view.words, view.progress, self._settings, self._recorded.which, mode.box], css="labkit-actions"
        )
        self._widget = widgets.VBox([style(), self._head, actions, tabs], css="labkit")

    def _make_sources(self) -> Sources:
        from labkit.frontends.panel.sources import Sources

        return Sources(lambda: self._open or self._ready())

    def _make_compare(self) -> CompareTab:
        from labkit.frontends.panel.compare import CompareTab

        return CompareTab(self._comparable, lambda: self._starting or self._view.busy, self._cold)

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
            widgets.later(_PICTURED, prepare)
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
        widgets.in_thread("recording", self._read, path, self._recorded.beside.value)

    def _show_recorded(self, shown: bool) -> None:
        """A recorded run has a name and a time line instead of a configuration and the buttons that run it."""
        widgets.show(self._recorded.widget, shown)
        self._recorded.which.layout.width = "300px" if shown else "132px"
        for widget in (self._own, self._settings, self._choices.where):
            widgets.show(widget, not shown)

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
        widgets.in_thread("run", self._launch, spec)

    def _launch(self, spec: Spec) -> None:
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
