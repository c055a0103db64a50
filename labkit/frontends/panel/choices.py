"""The configuration widgets, built from the tables of strategies and workloads, and the Spec that they describe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import ipywidgets

from labkit.common.arguments import shown
from labkit.common.text import escape
from labkit.plan.spec import PRECISIONS, Spec, SpecError, check_fields
from labkit.setup.machine import Machine
from labkit.training.faults import FAULTS
from labkit.training.options import Option
from labkit.training.strategies import INPUT_PIPELINE, STRATEGIES
from labkit.training.workloads import WORKLOADS

_MOST = 1_000_000_000
_SCALING = (
    "per rank: the global batch grows with the number of ranks (weak scaling); "
    "global: it is split over the ranks (strong scaling)"
)


class Choices:
    """Widgets for a Spec on `machine` with `defaults` (fields of Spec) as initial values; `on_change` is called after
    each change.

    Raises `SpecError` if the defaults are invalid or ask for more ranks than the machine supports.
    """

    def __init__(self, machine: Machine, defaults: dict[str, Any], on_change: Callable[[], None]):
        self._machine, self._on_change, self._quiet = machine, on_change, False
        check_fields(defaults)
        if defaults.get("script") is not None:
            raise SpecError(
                "script",
                f"the panel generates its scripts; for your own script use run({shown(defaults['script'])}) and show()",
            )
        start = _settled(Spec(**defaults), machine)
        kept = ("seed", "data_dir", "samples", "sample_every", "hang_after")
        self._kept = {f.name: getattr(start, f.name) for f in fields(Spec) if f.name in kept}
        self._wanted_nproc = start.nproc
        self._option_values: dict[str, Any] = dict(start.options)
        self._options: dict[str, ipywidgets.ValueWidget] = {}
        self._make(start)
        self._fit()
        for widget in self._widgets():
            widget.observe(self._changed, "value")

    def _make(self, start: Spec) -> None:
        device = "cuda" if self._machine.gpus and start.device == "cuda" else "cpu"
        usual = [row for row in STRATEGIES.values() if not row.further]
        rest = [row for row in STRATEGIES.values() if row.further]
        self.strategy = ipywidgets.ToggleButtons(
            options=[(row.title, row.name) for row in usual],
            tooltips=[row.splits for row in usual],
            value=None if STRATEGIES[start.strategy].further else start.strategy,
            description="Strategy",
        )
        self.further = ipywidgets.Dropdown(
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
        self.workload = ipywidgets.Dropdown(
            options=pairs, value=(start.workload, start.data), description="Workload · data"
        )
        self.device = ipywidgets.Dropdown(
            options=[("GPUs", "cuda"), ("CPU ranks", "cpu")] if self._machine.gpus else [("CPU ranks", "cpu")],
            value=device,
            description="Train on",
            layout={} if self._machine.gpus else {"display": "none"},
        )
        self.nproc = ipywidgets.BoundedIntText(value=start.nproc, min=1, max=max(start.nproc, 1), description="Ranks")
        self.batch = ipywidgets.BoundedIntText(value=start.batch_size, min=1, max=_MOST, description="Batch")
        self.scaling = ipywidgets.Dropdown(
            options=[("per rank", "weak"), ("global", "strong")],
            value=start.scaling,
            description="Batch is",
            tooltip=_SCALING,
        )
        self.length = ipywidgets.BoundedIntText(
            value=start.steps or start.epochs, min=1, max=_MOST, description="Length"
        )
        self.unit = ipywidgets.Dropdown(
            options=["epochs", "steps"], value="steps" if start.steps else "epochs", description="in"
        )
        self.precision = ipywidgets.Dropdown(options=list(PRECISIONS), value=start.precision, description="Precision")
        self.more = ipywidgets.ToggleButton(description="Options", tooltip="Options of the strategy and the workload")
        self.more.observe(self._disclose, "value")
        self.fault = ipywidgets.Dropdown(
            options=[("none", None), *((row.title, row.name) for row in FAULTS.values())],
            value=start.fault,
            description="Inject fault",
            tooltip="Inject a fault into the generated script",
        )
        self.popover = ipywidgets.VBox(layout={"display": "none"})
        self._shows = ipywidgets.HTML()
        self.explanation = ipywidgets.HTML()
        for widget, name in (
            (self.strategy, "strategy"),
            (self.further, "further"),
            (self.popover, "popover"),
            (self.more, "more"),
        ):
            widget.add_class(f"labkit-{name}")
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
            self.fault,
        )

    @property
    def top(self) -> ipywidgets.Box:
        """The strategies, and the devices they run on."""
        where = _gpus(self._machine) if self._machine.gpus else _no_gpu(self._machine)
        top = ipywidgets.HBox(
            [self.strategy, self.further, ipywidgets.HTML(f'<div class="labkit-where">{escape(where)}</div>')]
        )
        top.add_class("labkit-top")
        return top

    @property
    def row(self) -> ipywidgets.Box:
        """The other settings, in one row below the strategies."""
        sized = {
            self.workload: 200,
            self.device: 96,
            self.nproc: 66,
            self.batch: 68,
            self.scaling: 92,
            self.length: 66,
            self.unit: 80,
        }
        for widget, width in (sized | {self.precision: 70}).items():
            widget.layout.width = f"{width}px"
            widget.add_class("labkit-field")
        self.workload.add_class("labkit-workload")
        options = ipywidgets.Box([self.more, self.popover])
        options.add_class("labkit-options")
        row = ipywidgets.HBox([*sized, self.precision, options])
        row.add_class("labkit-row")
        return row

    @property
    def chosen(self) -> str:
        """The name of the selected strategy."""
        return self.further.value or self.strategy.value

    def spec(self) -> Spec:
        """The Spec of the current configuration, resolved for this machine. Raises `SpecError` if it cannot run."""
        return Spec(
            strategy=self.chosen,
            nproc=self.nproc.value,
            batch_size=self.batch.value,
            scaling=self.scaling.value,
            precision=self.precision.value,
            options={name: widget.value for name, widget in self._options.items()},
            fault=self.fault.value,
            **self._training(),
        ).on(self._machine)

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
        return {"workload": workload, "data": data, "device": self.device.value} | length | self._kept

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
        self._fit_options()
        row = STRATEGIES[self.chosen]
        sentences = (("Splits", row.splits), ("Sends", row.sends), ("Note", row.note(self.device.value)))
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
        device, nproc = self.device.value, self.nproc.value
        known = [
            name
            for name in PRECISIONS
            if _runs(self._machine, strategy="ddp", device=device, nproc=nproc, precision=name)
        ]
        known = [name for name in known if name not in STRATEGIES[self.chosen].lacks]
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
        own = {
            option.name: self._option_values.get(option.name, option.default)
            for option in STRATEGIES[self.chosen].options
        }
        try:
            return Spec(
                strategy=self.chosen, workload=self.workload.value[0], nproc=self.nproc.value, options=own
            ).data_ranks
        except SpecError:
            return 1

    def _fit_options(self) -> None:
        self._option_values |= {name: widget.value for name, widget in self._options.items()}
        both = STRATEGIES[self.chosen].all_options + WORKLOADS[self.workload.value[0]].options
        wanted = {option.name: option for option in both}
        if wanted.keys() != self._options.keys():
            self._options = {name: _widget(option, self._option_values) for name, option in wanted.items()}
            for widget in self._options.values():
                widget.observe(self._changed, "value")
            listed = [one for heading, group in self._groups() for one in self._disclosed(heading, group)]
            heading = ipywidgets.HTML('<div class="labkit-heading">Fault injection</div>')
            self.popover.children = [*listed, heading, self.fault, self._shows]
        fault = FAULTS.get(self.fault.value)
        shows = fault.shows if fault else "Injects a typical fault into the generated script, so that you can study it."
        self._shows.value = f'<div class="labkit-help">{escape(shows)}</div>'
        self.more.description = "Fault" if fault else "Options"

    def _groups(self) -> tuple[tuple[str, tuple[Option, ...]], ...]:
        row, workload = STRATEGIES[self.chosen], WORKLOADS[self.workload.value[0]]
        common = tuple(option for option in row.all_options if option not in (*row.options, *INPUT_PIPELINE))
        pipeline = tuple(option for option in INPUT_PIPELINE if option.name not in row.lacks)
        own = workload.title.partition(":")[0]
        return (
            (row.title, row.options),
            ("All strategies", common),
            ("Input pipeline", pipeline),
            (own, workload.options),
        )

    def _disclosed(self, heading: str, group: tuple[Option, ...]) -> Iterator[ipywidgets.Widget]:
        """A heading, and each option of the group with its help text."""
        if group:
            yield ipywidgets.HTML(f'<div class="labkit-heading">{escape(heading)}</div>')
        for option in group:
            yield self._options[option.name]
            yield ipywidgets.HTML(f'<div class="labkit-help">{escape(option.help)}</div>')

    def _mark_further(self) -> None:
        mark = self.further.add_class if self.further.value else self.further.remove_class
        mark("mod-active")

    def _disclose(self, change: dict[str, Any]) -> None:
        self.popover.layout.display = "" if change["new"] else "none"

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
        return spec.on(machine)
    except SpecError as error:
        if error.field in ("nproc", "device", "strategy", "options") and error.extra is None:
            raise
        device = "cuda" if machine.gpus and spec.device != "cpu" else "cpu"
        return Spec(**spec.to_json() | {"device": device, "nproc": spec.nproc or machine.default_nproc(device)})


def _runs(machine: Machine | None = None, **asked: Any) -> bool:
    try:
        spec = Spec(**asked)
        if machine is not None:
            spec.on(machine)
    except SpecError as error:
        return error.field == "data"
    return True


def _no_gpu(machine: Machine) -> str:
    reason = machine.no_gpu_reason.removeprefix("this machine has ")
    return "no GPU here: CPU ranks over gloo" if reason == "no GPU" else f"{machine.no_gpu_reason}: CPU ranks over gloo"


def _gpus(machine: Machine) -> str:
    names = [gpu.name for gpu in machine.gpus]
    return " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def _widget(option: Option, values: dict[str, Any]) -> ipywidgets.ValueWidget:
    """A widget for the type of an option."""
    value, name = values.get(option.name, option.default), option.name
    common = {"value": value, "description": name, "tooltip": option.help}
    if option.choices:
        return ipywidgets.Dropdown(options=list(option.choices), **common)
    if isinstance(option.default, bool):
        return ipywidgets.Checkbox(indent=False, **common)
    if isinstance(option.default, (int, float)):
        kind = ipywidgets.BoundedIntText if isinstance(option.default, int) else ipywidgets.BoundedFloatText
        return kind(min=option.bounds.minimum, max=option.bounds.maximum, **common)
    return ipywidgets.Text(**common)
