"""The widgets for the options of a strategy and a workload and for the fault, in a box that a button opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ipywidgets

from labkit.common.text import escape
from labkit.training.faults import FAULTS
from labkit.training.options import INPUT_PIPELINE, Option
from labkit.training.rows import Strategy, Workload


class Options:
    """The options of the chosen strategy and workload; each keeps its value while another strategy is chosen.

    `values` and `fault` are the initial values; `on_change` is called with the change of each widget.
    """

    def __init__(self, values: Mapping[str, Any], fault: str | None, on_change: Callable[[dict[str, Any]], None]):
        self._on_change = on_change
        self._known: dict[str, Any] = dict(values)  # also of strategies that are not chosen now
        self._widgets: dict[str, ipywidgets.ValueWidget] = {}
        self.more = ipywidgets.ToggleButton(description="Options", tooltip="Options of the strategy and the workload")
        self.more.observe(self._disclose, "value")
        self.fault = ipywidgets.Dropdown(
            options=[("none", None), *((row.title, row.name) for row in FAULTS.values())],
            value=fault,
            description="Inject fault",
            tooltip="Inject a fault into the generated script",
        )
        self.popover = ipywidgets.VBox(layout={"display": "none"})
        self._shows = ipywidgets.HTML()
        self.more.add_class("labkit-more")
        self.popover.add_class("labkit-popover")
        self.widget = ipywidgets.Box([self.more, self.popover])
        self.widget.add_class("labkit-options")

    @property
    def values(self) -> dict[str, Any]:
        """The values of the displayed options, by name."""
        return {name: widget.value for name, widget in self._widgets.items()}

    def values_of(self, options: tuple[Option, ...]) -> dict[str, Any]:
        """The values of some options, displayed or not, by name."""
        return {option.name: self._known.get(option.name, option.default) for option in options}

    def fit(self, row: Strategy, workload: Workload) -> None:
        """Displays the options of a strategy and a workload."""
        self._known |= self.values
        wanted = {option.name: option for option in row.all_options + workload.options}
        if wanted.keys() != self._widgets.keys():
            self._widgets = {name: _widget(option, self._known) for name, option in wanted.items()}
            for widget in self._widgets.values():
                widget.observe(self._on_change, "value")
            listed = [one for heading, group in _groups(row, workload) for one in self._listed(heading, group)]
            heading = ipywidgets.HTML('<div class="labkit-heading">Fault injection</div>')
            self.popover.children = [*listed, heading, self.fault, self._shows]
        fault = FAULTS.get(self.fault.value)
        shows = fault.shows if fault else "Injects a typical fault into the generated script, so that you can study it."
        self._shows.value = f'<div class="labkit-help">{escape(shows)}</div>'
        self.more.description = "Fault" if fault else "Options"

    def _listed(self, heading: str, group: tuple[Option, ...]) -> Iterator[ipywidgets.Widget]:
        """A heading, and each option of the group with its help text."""
        if group:
            yield ipywidgets.HTML(f'<div class="labkit-heading">{escape(heading)}</div>')
        for option in group:
            yield self._widgets[option.name]
            yield ipywidgets.HTML(f'<div class="labkit-help">{escape(option.help)}</div>')

    def _disclose(self, change: dict[str, Any]) -> None:
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
        return ipywidgets.Dropdown(options=list(option.choices), **common)
    if isinstance(option.default, bool):
        return ipywidgets.Checkbox(indent=False, **common)
    if isinstance(option.default, (int, float)):
        kind = ipywidgets.BoundedIntText if isinstance(option.default, int) else ipywidgets.BoundedFloatText
        return kind(min=option.bounds.minimum, max=option.bounds.maximum, **common)
    return ipywidgets.Text(**common)
