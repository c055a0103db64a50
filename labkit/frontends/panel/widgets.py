"""The widgets of ipywidgets, with one layout and one style for all of a kind: a page needs milliseconds for every
model, and by default each widget has three. A widget that is hidden or sized gets a `layout` of its own.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import ipywidgets


def _made(kind: type[ipywidgets.Widget], *values: Any, **traits: Any) -> Any:
    return kind(*values, **{name: _shared(of) for name, of in _looks(kind).items() if name not in traits}, **traits)


@cache
def _looks(kind: type[ipywidgets.Widget]) -> dict[str, type[ipywidgets.Widget]]:
    """The widgets that say how one of this kind looks: its layout, and its style if it has one."""
    return {name: trait.klass for name, trait in kind.class_traits().items() if name in ("layout", "style")}


def _shared(kind: type[ipywidgets.Widget]) -> ipywidgets.Widget:
    widget = _one(kind)
    if widget.comm is None:  # somebody has closed all widgets
        widget.open()
    return widget


@cache
def _one(kind: type[ipywidgets.Widget]) -> ipywidgets.Widget:
    widget = kind()
    widget.observe(_refuse, [name for name in widget.keys if not name.startswith("_")])
    return widget


def _refuse(change: dict[str, Any]) -> None:
    raise TypeError(f"{change['name']} would change in many widgets; make this one with a layout of its own")


HTML = partial(_made, ipywidgets.HTML)
Box, HBox, VBox = (partial(_made, kind) for kind in (ipywidgets.Box, ipywidgets.HBox, ipywidgets.VBox))
Button, ToggleButton = partial(_made, ipywidgets.Button), partial(_made, ipywidgets.ToggleButton)
ToggleButtons, Dropdown = partial(_made, ipywidgets.ToggleButtons), partial(_made, ipywidgets.Dropdown)
Text, BoundedIntText = partial(_made, ipywidgets.Text), partial(_made, ipywidgets.BoundedIntText)
Combobox, Checkbox = partial(_made, ipywidgets.Combobox), partial(_made, ipywidgets.Checkbox)
FileUpload = partial(_made, ipywidgets.FileUpload)
