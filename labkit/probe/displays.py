"""What IPython and ipywidgets show on a rank that stays: `display`, `clear_output`, and widgets, each of which has its
model on the rank and its view in the browser. Imported by the first cell that needs IPython.

A widget talks to its view in messages of a comm; those of a rank travel over the channel to the notebook, which has the
other end (`frontends/magic/group.py`).
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from typing import Any

import comm
from comm.base_comm import BaseComm
from IPython.core.displaypub import DisplayPublisher

CLEAR = "\x1b[2J"  # what a terminal does at these characters, a cell does too: the lines before are not shown
WIDGET = "application/vnd.jupyter.widget-view+json"
_PICTURES = ("image/png", "image/svg+xml")
_PAGES = (WIDGET, "application/vnd.plotly.v1+json", "text/html")


class Publisher(DisplayPublisher):  # type: ignore[misc]
    """Passes what is displayed on to the cell: `shows(kind, content, display_id)`; what has only text is printed. In
    an `Output` widget, as in those of `interact`, it belongs to the widget."""

    def __init__(self, shell: Any, shows: Callable[[str, bytes, str], None], clears: Callable[[], None]):
        super().__init__(parent=shell)
        self.shell, self._shows, self._clears = shell, shows, clears
        self._outputs: list[Any] = []  # `Output` widgets whose block is executed
        self._printed: list[tuple[redirect_stdout[io.StringIO], io.StringIO]] = []

    def publish(self, data: Any, metadata: Any = None, *, transient: Any = None, **_: Any) -> None:
        """Shows one bundle of MIME types."""
        if self._outputs:
            self._flush()
            shown = {"output_type": "display_data", "data": data, "metadata": metadata or {}}
            self._outputs[-1].outputs += (shown,)
            return
        kind = next((kind for kind in (*_PICTURES, *_PAGES) if kind in data), "")
        if kind:
            self._shows(kind, content_of(kind, data[kind]), (transient or {}).get("display_id", ""))
        elif "text/plain" in data:
            print(data["text/plain"])

    def clear_output(self, wait: bool = False) -> None:
        """Removes what the cell, or the `Output` widget, has shown so far."""
        if self._outputs:
            self._printed[-1][1].seek(0)
            self._printed[-1][1].truncate()
            self._outputs[-1].outputs = ()
            return
        print(CLEAR, end="", flush=True)
        self._clears()

    def enter(self, output: Any) -> Any:
        """`with output:`."""
        text = io.StringIO()
        self._outputs.append(output)
        self._printed.append((redirect_stdout(text), text))
        self._printed[-1][0].__enter__()
        return output

    def leave(self, output: Any, kind: Any, error: Any, trace: Any) -> None:
        """The end of `with output:`; an exception goes on."""
        self._printed[-1][0].__exit__(kind, error, trace)
        self._flush()
        self._outputs.pop()
        self._printed.pop()

    def _flush(self) -> None:
        text = self._printed[-1][1]
        if said := text.getvalue():
            text.seek(0)
            text.truncate()
            self._outputs[-1].append_stdout(said)


def content_of(kind: str, value: Any) -> bytes:
    """The content of one MIME type as bytes; IPython has pictures in base 64."""
    if isinstance(value, (dict, list)):
        return json.dumps(value).encode()
    if kind == "image/png" and isinstance(value, str):
        return base64.b64decode(value)
    return value.encode() if isinstance(value, str) else bytes(value)


def connect_widgets(publisher: Publisher, send: Callable[..., None]) -> None:
    """Lets widgets of this process talk to their views by `send(buffers, **message)`."""

    class RankComm(BaseComm):  # type: ignore[misc]
        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
        ) -> None:
            fields = {"kind": msg_type, "id": self.comm_id, "content": data or {}, "metadata": metadata or {}}
            send([bytes(buffer) for buffer in buffers or ()], did="comm", **fields, **keys)

    comm.create_comm = RankComm
    with suppress(ImportError):
        from ipywidgets import Output

        Output.__enter__ = lambda self: publisher.enter(self)  # type: ignore[method-assign]
        Output.__exit__ = lambda self, *how: publisher.leave(self, *how)  # type: ignore[method-assign]


def hear_view(name: str, content: Any, buffers: list[bytes]) -> None:
    """A message of the view of a widget: calls the functions that observe it."""
    found = comm.get_comm_manager().get_comm(name)
    if found is not None:
        found.handle_msg({"content": {"comm_id": name, "data": content}, "buffers": buffers})


def view_of(value: Any) -> tuple[str, bytes] | None:
    """The view of a widget; None for any other value."""
    widgets = sys.modules.get("ipywidgets")
    if widgets is None or not isinstance(value, widgets.DOMWidget):
        return None
    return WIDGET, content_of(WIDGET, value._repr_mimebundle_()[WIDGET])
