"""Source code as HTML: highlighted by pygments, which escapes the text, in the colours of the page's theme."""

from __future__ import annotations

import anywidget
import ipywidgets
import traitlets
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from labkit.frontends.panel.charts import STATIC
from labkit.plan.script import diff_scripts, write_script
from labkit.plan.spec import Spec

_FORMAT = HtmlFormatter(classprefix="labkit-", cssclass="labkit-source")


class Command(anywidget.AnyWidget):
    """A command with a button that copies it."""

    _esm = (STATIC / "command.js").read_text(encoding="utf-8")
    text = traitlets.Unicode().tag(sync=True)


def sources(script: ipywidgets.Widget, diff: ipywidgets.Widget, pack: ipywidgets.Widget) -> ipywidgets.Box:
    """The script or its diff to the single-device script, one at a time, as wide as the panel, with `pack` next to the
    choice."""
    which = ipywidgets.ToggleButtons(options=[("train.py", script), ("Diff to one device", diff)])
    which.add_class("labkit-which")
    bar = ipywidgets.HBox([which, pack])
    bar.add_class("labkit-bar")
    box = ipywidgets.VBox([bar, script])
    box.add_class("labkit-sources")
    for widget in (script, diff):
        widget.add_class("labkit-code")
    which.observe(lambda change: setattr(box, "children", (bar, change["new"])), "value")
    return box


def script_html(spec: Spec) -> str:
    """The generated script of a Spec as HTML."""
    return source_html(write_script(spec))


def source_html(source: str) -> str:
    """Any Python source as HTML."""
    return highlight(source, PythonLexer(), _FORMAT)


def diff_html(spec: Spec) -> str:
    """The diff between the single-device script and the script of a Spec."""
    diff = diff_scripts(spec.on_one_device, spec)
    if not diff:
        return '<p class="labkit-empty">No difference: this is the single-device script.</p>'
    return highlight(diff, DiffLexer(), _FORMAT)
