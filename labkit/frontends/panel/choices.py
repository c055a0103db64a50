"""The configuration widgets, built from the tables of strategies and workloads, and the Spec that they describe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import ipywidgets

from labkit.common.arguments import shown
from labkit.common.text import escape
from labkit.frontends.panel import widgets
from labkit.frontends.panel.widgets import devices_of, shared_cores
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
from labkit.setup.machine import Machine
from labkit.training.faults import FAULTS
from labkit.training.rows import INPUT_PIPELINE, Option, Strategy, Workload
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

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
                threading.Thread(
                    target=self._ask, args=(key, spec), daemon=True, name="labkit availability of data"
                ).start()
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
        self.more = widgets.ToggleButton(
            description="Settings", tooltip="Batch size, length, precision, further options and faults"
        )
        self.more.observe(self._disclose, "value")
        self.fault = widgets.Dropdown(
            options=[("none", None), *((row.title, row.name) for row in FAULTS.values())],
            value=fault,
            description="Inject fault",
            tooltip="Inject a fault into the generated script",
        )
        self.popover = widgets.VBox(layout={"display": "none"})
        self._shows = widgets.HTML()
        self.more.add_class("labkit-more")
        self.popover.add_class("labkit-popover")
        self.widget = widgets.Box([self.more, self.popover], layout={})
        self.widget.add_class("labkit-options")

    @property
    def values(self) -> dict[str, Any]:
        """The values of the options of the chosen strategy and workload, by name."""
        return self.values_of(self._row.all_options + self._workload.options)

    def values_of(self, options: tuple[Option, ...]) -> dict[str, Any]:
        """The values of some options, by name."""
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

    def _disclose(self, change: dict[str, Any]) -> None:
        if change["new"]:
            self._fill()
        self.popover.layout.display = "" if change["new"] else "none"


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
        return widgets.Dropdown(options=list(option.choices), **common)
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
        self.precision = widgets.Dropdown(
            options=list(_ABOUT["precision"].choices), value=start.precision, description="precision"
        )
        self._make(start)
        self._settings = Settings(
            start.options, start.fault, (start.strategy_row, WORKLOADS[start.workload]), self._first(), self._changed
        )
        self._fit()
        for widget in self._widgets():
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
        )
        self.further = widgets.Dropdown(
            options=[("more", ""), *((row.title, row.name) for row in rest)],
            value=start.strategy if STRATEGIES[start.strategy].further else "",
            description="More strategies",
            tooltip="More strategies",
        )
        pairs = [
            (f"{row.title.partition(':')[0]} · {data}", (row.name, data))
            for row in WORKLOADS.values()
            for data in row.data
        ]
        self.workload = widgets.Dropdown(
            options=pairs, value=(start.workload, start.data), description="Workload", layout={"width": "190px"}
        )
        self.device = widgets.Dropdown(
            options=[("GPUs", "cuda"), ("CPU ranks", "cpu")] if self._machine.gpus else [("CPU ranks", "cpu")],
            value=device,
            description="Train on",
            layout={"width": "110px"} | ({} if self._machine.gpus else {"display": "none"}),
        )
        self.nproc = widgets.BoundedIntText(
            value=start.nproc, min=1, max=max(start.nproc, 1), description="Ranks", layout={"width": "64px"}
        )
        self.batch = _number("batch_size", start.batch_size, description="Batch size", layout={"width": "68px"})
        self.scaling = widgets.Dropdown(
            options=[("per rank", "weak"), ("in total", "strong")],
            value=start.scaling,
            description="Batch size counts samples",
            tooltip=_SCALING,
            layout={"width": "90px"},
        )
        self.length = _number("steps", start.steps or start.epochs, description="Train for", layout={"width": "70px"})
        unit = "steps" if start.steps else "epochs"
        self.unit = widgets.Dropdown(
            options=["epochs", "steps"], value=unit, description="Train for: unit", layout={"width": "80px"}
        )
        self.explanation, self.where = widgets.HTML(), widgets.HTML(layout={})
        self.strategy.add_class("labkit-strategy")
        self.further.add_class("labkit-further")
        self._mark_further()

    def _widgets(self) -> tuple[ipywidgets.ValueWidget, ...]:
        return (
            self.strategy,
            self.further,
            self.workload,
            self.device,
            self.nproc,
            self.batch,
            self.scaling,
            self.length,
            self.unit,
            self.precision,
            self._settings.fault,
        )

    @property
    def what(self) -> tuple[ipywidgets.Widget, ...]:
        """What is trained: strategy, workload and ranks."""
        for widget in (self.strategy, self.workload, self.nproc):
            widget.add_class("labkit-field")
        self.workload.add_class("labkit-workload")
        return self.strategy, self.further, self.workload, self.nproc

    @property
    def settings(self) -> ipywidgets.Widget:
        """The button that unfolds everything else."""
        return self._settings.widget

    def _first(self) -> list[ipywidgets.Widget]:
        """The settings of every run, in rows, above the options of the strategy."""
        for widget in (self.device, self.batch, self.scaling, self.length, self.unit):
            widget.add_class("labkit-field")
        for widget in (self.scaling, self.unit):
            widget.add_class("labkit-joined")
        row = widgets.HBox([self.batch, self.scaling, self.length, self.unit])
        row.add_class("labkit-row")
        return [self.device, row, self.precision]

    @property
    def chosen(self) -> str:
        """The name of the selected strategy."""
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
        where = shared_cores(self._machine, self.nproc.value) if self.device.value == "cpu" else ""
        self.where.value = f'<div class="labkit-where">{escape(where or devices_of(self._machine))}</div>'
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
    return widgets.BoundedIntText(value=value, min=low, max=high, tooltip=known.help, **settings)
