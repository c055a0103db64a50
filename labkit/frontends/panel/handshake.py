"""Widgets with our own JavaScript, which are opened again if messages from the kernel do not arrive in the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import ipywidgets

STATIC = Path(__file__).parent / "static"
_ATTEMPTS = 5  # to open a widget again: in some clients its messages may never arrive


def program(name: str) -> str:
    """The source of a program in `static/`, for the `_esm` of a `HandshakeWidget`."""
    return "\n".join((STATIC / part).read_text(encoding="utf-8") for part in ("handshake.js", name))


class HandshakeWidget(anywidget.AnyWidget):
    """A widget with a `program`. Display its `box`.

    anywidget gives a page two seconds to start a program. If a busy page needs longer, the view is rendered, but the
    model drops every later message from the kernel. Each rendered view therefore waits for a "ping" and answers "pong",
    or says that it is "lost": then the widget is opened again, with another model in the page.
    """

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.box = ipywidgets.Box([self])
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
