"""Source code as HTML: highlighted by pygments, which escapes the text, in the colours of the page's theme."""

from __future__ import annotations

import ipywidgets
import traitlets
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from labkit.engines.job_files import PORT
from labkit.frontends.panel.handshake import HandshakeWidget, program
from labkit.frontends.panel.words import sentence_html
from labkit.plan.commands import node_commands
from labkit.plan.fields import SpecError
from labkit.plan.script import diff_scripts, write_script
from labkit.plan.spec import Spec

_FORMAT = HtmlFormatter(classprefix="labkit-", cssclass="labkit-source")


class Command(HandshakeWidget):
    """A command with a button that copies it."""

    _esm = program("command.js")
    text = traitlets.Unicode().tag(sync=True)


class NodeCommands:
    """The command for each of several machines like this one, with a button that copies it."""

    def __init__(self) -> None:
        self.nodes = ipywidgets.BoundedIntText(value=2, min=2, max=64, description="Nodes")
        self.endpoint = ipywidgets.Text(value=f"node0:{PORT}", description="Node 0", continuous_update=False)
        self.said, self._list = ipywidgets.HTML(), ipywidgets.VBox()
        self.widget = ipywidgets.VBox([ipywidgets.HBox([self.nodes, self.endpoint]), self.said, self._list])
        self._list.add_class("labkit-nodes")
        self._commands: list[Command] = []
        for one in (self.nodes, self.endpoint):
            one.observe(lambda _: self._show(), "value")
        self._spec: Spec | None = None

    def of(self, spec: Spec) -> None:
        """Shows the commands of a Spec."""
        self._spec = spec
        self._show()

    @property
    def texts(self) -> list[str]:
        """The commands that are shown, in the order of the nodes."""
        return [one.text for one in self._commands]

    def _show(self) -> None:
        """Widgets that are there are used again, because each one loads its program in the page."""
        try:
            texts = node_commands(self._spec, self.nodes.value, self.endpoint.value) if self._spec else []
            self.said.value = ""
        except SpecError as error:
            texts, self.said.value = [], sentence_html(str(error))
        there = self._commands[: len(texts)]
        for one, text in zip(there, texts):
            one.text = text
        self._commands = there + [Command(text=text) for text in texts[len(there) :]]
        self._list.children = [one.box for one in self._commands]


def sources(
    script: ipywidgets.Widget, diff: ipywidgets.Widget, nodes: ipywidgets.Widget, pack: ipywidgets.Widget
) -> ipywidgets.Box:
    """The script, its diff to the single-device script or the commands of several nodes, one at a time, as wide as the
    panel, with `pack` next to the choice."""
    choices = [("train.py", script), ("Diff to one device", diff), ("Several nodes", nodes)]
    which = ipywidgets.ToggleButtons(options=choices)
    which.add_class("labkit-which")
    bar = ipywidgets.HBox([which, pack])
    bar.add_class("labkit-bar")
    box = ipywidgets.VBox([bar, script])
    box.add_class("labkit-sources")
    for widget in (script, diff, nodes):
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
