"""What all parts of the panel share: the widgets of ipywidgets with one layout and one style for all of a kind, widgets
with a program of our own in the page, and the state of a run as short HTML fragments, all text escaped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from labkit.analysis.diagnose import findings
from labkit.analysis.metrics import seconds_left
from labkit.common.text import escape
from labkit.common.units import counted
from labkit.record.state import RunState
from labkit.training.strategies import STRATEGIES

# ---- the widgets of ipywidgets: a page needs milliseconds for every model, and by default each widget has three. One
# that is hidden or sized gets a `layout` of its own


def _made(kind: type[ipywidgets.Widget], *values: Any, css: str = "", **traits: Any) -> Any:
    """A widget with the classes `css` of the style sheet, separated by spaces."""
    looks = {name: _shared(of) for name, of in _looks(kind).items() if name not in traits}
    return kind(*values, _dom_classes=css.split(), **looks, **traits)


@cache
def _looks(kind: type[ipywidgets.Widget]) -> dict[str, type[ipywidgets.Widget]]:
    """The widgets that say how one of this kind looks: its layout, and its style if it has one."""
    return {name: trait.klass for name, trait in kind.class_traits().items() if name in ("layout", "style")}


def _shared(kind: type[ipywidgets.Widget]) -> ipywidgets.Widget:
    widget = _of_all(kind)
    if widget.comm is None:  # somebody has closed all widgets
        widget.open()
    return widget


@cache
def _of_all(kind: type[ipywidgets.Widget]) -> ipywidgets.Widget:
    widget = kind()
    widget.observe(_refuse, [name for name in widget.keys if not name.startswith("_")])
    return widget


def _refuse(change: dict[str, Any]) -> None:
    raise TypeError(f"{change['name']} would change in many widgets; make this one with a layout of its own")


def button(name: str, hint: str | None, press: Callable[[], object], **traits: Any) -> Any:
    """A button that calls `press` when it is clicked; `hint` is its tooltip."""
    made = _made(ipywidgets.Button, description=name, tooltip=hint, **traits)
    made.on_click(lambda _: press())
    return made


def toggle(name: str, hint: str, turned: Callable[[bool], object], **traits: Any) -> Any:
    """A button that stays pressed; `turned` is called with whether it is."""
    made = _made(ipywidgets.ToggleButton, description=name, tooltip=hint, **traits)
    made.observe(lambda change: turned(change["new"]), "value")
    return made


def dropdown(name: str, options: Sequence[Any], value: Any, **traits: Any) -> Any:
    """A list of options, of which `value` is chosen."""
    return _made(ipywidgets.Dropdown, description=name, options=options, value=value, **traits)


def show(widget: ipywidgets.Widget, shown: bool) -> None:
    """Shows or hides a widget, which has a layout of its own."""
    widget.layout.display = "" if shown else "none"


HIDDEN = {"display": "none"}
HTML = partial(_made, ipywidgets.HTML)
Box, HBox, VBox = (partial(_made, kind) for kind in (ipywidgets.Box, ipywidgets.HBox, ipywidgets.VBox))
ToggleButtons, FileUpload = partial(_made, ipywidgets.ToggleButtons), partial(_made, ipywidgets.FileUpload)
Text, BoundedIntText = partial(_made, ipywidgets.Text), partial(_made, ipywidgets.BoundedIntText)
Combobox, Checkbox = partial(_made, ipywidgets.Combobox), partial(_made, ipywidgets.Checkbox)


def in_thread(name: str, work: Callable[..., object], *args: Any) -> threading.Thread:
    """Starts `work` outside the kernel's main thread, which stays responsive; it ends with the kernel."""
    thread = threading.Thread(target=work, args=args, daemon=True, name=f"labkit {name}")
    thread.start()
    return thread


def later(seconds: float, work: Callable[..., object], *args: Any) -> None:
    """Starts `work` after some seconds, outside the kernel's main thread."""
    timer = threading.Timer(seconds, work, args)
    timer.daemon = True
    timer.start()


# ---- widgets with a program of our own

STATIC = Path(__file__).parent / "static"
_ATTEMPTS = 5  # to open a widget again: in some clients its messages may never arrive


def program(name: str, *libraries: str) -> str:
    """The source of a program in `static/` with the sources that it needs, for the `_esm` of a `HandshakeWidget`."""
    own = ((STATIC / part).read_text(encoding="utf-8") for part in ("handshake.js", name))
    return "\n".join((*libraries, *own))


class HandshakeWidget(anywidget.AnyWidget):
    """A widget with a `program`. Display its `box`.

    anywidget gives a page two seconds to start a program. If a busy page needs longer, the view is rendered, but the
    model drops every later message from the kernel. Each rendered view therefore waits for a "ping" and answers "pong",
    or says that it is "lost": then the widget is opened again, with another model in the page.
    """

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.box = Box([self])
        self.box.add_class("labkit-program")
        self._attempts = _ATTEMPTS
        self.on_msg(self._handshake)

    def _handshake(self, _, message, buffers) -> None:
        if message.get("kind") == "rendered":
            self.send({"kind": "ping"})
        elif message.get("kind") == "lost" and self._attempts:
            self._attempts -= 1
            self.box.children = ()
            self.close()
            self.open()
            self.box.children = (self,)


class Presentation(HandshakeWidget):
    """A button that switches the enclosing panel to presentation mode; it also handles the panel's keyboard shortcuts.

    Everything runs in the page, so that it responds while the kernel is busy.
    """

    _esm = program("presentation.js")
    on = traitlets.Bool(False).tag(sync=True)


# ---- the state of a run

_TONES = {
    "finished": "good",
    "failed": "bad",
    "stopped": "quiet",
    "ready": "quiet",
    "lost": "bad",
    "running": "busy",
    "imported": "quiet",
}


def state_html(words: str, tone: str) -> str:
    """The state in words, with a dot: `tone` is quiet, waiting, busy, good or bad. The enclosing widget has the role
    "status".
    """
    text = escape(words, quote=True)
    return f'<div class="labkit-state labkit-{tone}" title="{text}"><i></i><span>{text}</span></div>'


def tone_of(state: RunState) -> str:
    """The tone (colour class) of a run's state."""
    return _TONES.get(state.status.state, "waiting")


def what_html(state: RunState) -> str:
    """What a run trains: strategy, workload and ranks, or its script."""
    spec = state.spec
    row = STRATEGIES.get(spec.strategy or "")
    script = spec.script if state.imported and spec.script else "train.py"  # of an imported run it is its name
    parts = [row.title if row else script, spec.workload or "", counted(state.world_size, "rank")]
    return escape(" · ".join(filter(None, parts)))


def progress_html(state: RunState) -> str:
    """Step i/n, a progress bar, and the time left or, at the end, the total time."""
    total, step = state.total_steps, state.step
    steps = f"step {step:,}/{total:,}" if total else f"step {step:,}"
    share = min(100.0, 100 * step / total) if total else 0.0
    inner = f'<div style="width:{share:.1f}%"></div>'
    value = f'aria-valuemin="0" aria-valuemax="100" aria-valuenow="{share:.0f}" aria-valuetext="{steps}"'
    bar = f'<div class="labkit-progress" role="progressbar" aria-label="steps" {value}>{inner}</div>'
    return f'<div class="labkit-advance"><span>{steps}</span>{bar}<span>{_time(state)}</span></div>'


def _time(state: RunState) -> str:
    if state.over:
        return "" if state.seconds is None else f"{_clock(state.seconds)} in total"
    left = seconds_left(state)
    return "" if left is None else f"{_clock(math.ceil(left))} left"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def finding_html(state: RunState) -> str:
    """The most severe finding in one line; empty if there is none."""
    first = next(iter(findings(state)), None)
    if first is None and state.status.state in ("failed", "lost"):
        return sentence_html(state.words)
    if first is None:
        return ""
    more = "" if first.evidence in first.title else f": {first.evidence}"
    return sentence_html(f"{first.title}{more}", first.fix, first.kind)


def sentence_html(text: str, fix: str = "", kind: str = "wrong") -> str:
    """An error message, or one of another `kind` of finding; the tooltip adds the fix."""
    hint = escape(f"{text}\n{fix}".strip(), quote=True)
    return f'<div class="labkit-finding labkit-{kind}" role="alert" title="{hint}">{escape(text)}</div>' if text else ""
