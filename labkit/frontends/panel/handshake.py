"""Widgets with our own JavaScript, whose comm is opened again until messages from the kernel arrive in the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets

STATIC = Path(__file__).parent / "static"
_WAITS = (5.0, 10.0, 20.0)  # seconds before each check


def program(name: str) -> str:
    """The source of a program in `static/`, for the `_esm` of a `HandshakeWidget`."""
    return "\n".join((STATIC / part).read_text(encoding="utf-8") for part in ("handshake.js", name))


class HandshakeWidget(anywidget.AnyWidget):
    """A widget with a `program`; put it into a box.

    anywidget gives a page two seconds to start a program. If a busy page needs longer, the view is rendered, but the
    model drops every later message from the kernel. The kernel therefore sends "ping" to each rendered view:
    `connected` is True once a "pong" has come back, and `reopen_until_connected` opens the widget again if none does.
    """

    def __init__(self, **traits: Any) -> None:
        self.connected = False
        super().__init__(**traits)
        self.on_msg(self._handshake)

    def _handshake(self, _, message, buffers) -> None:
        if message.get("kind") == "rendered":
            self.send({"kind": "ping"})
        elif message.get("kind") == "pong":
            self.connected = True


def reopen_until_connected(root: ipywidgets.Box, waits: Sequence[float] = _WAITS) -> threading.Thread:
    """Call this when `root` is displayed: a thread opens those of its `HandshakeWidget`s again that are not connected
    after each wait. It ends when all are, or after the last wait, for a page that cannot show widgets."""
    thread = threading.Thread(target=_open_again, args=(root, waits), daemon=True, name="labkit handshake")
    thread.start()
    return thread


def _open_again(root: ipywidgets.Box, waits: Sequence[float]) -> None:
    for seconds in waits:
        time.sleep(seconds)
        boxes = [box for box in _boxes(root) if any(map(_is_disconnected, box.children))]
        if not boxes:
            return
        for box in boxes:
            children = box.children
            box.children = [one for one in children if not _is_disconnected(one)]
            for one in filter(_is_disconnected, children):
                one.close()
                one.open()
            box.children = children


def _boxes(box: ipywidgets.Box) -> Iterator[ipywidgets.Box]:
    yield box
    for child in box.children:
        if isinstance(child, ipywidgets.Box):
            yield from _boxes(child)


def _is_disconnected(widget: ipywidgets.Widget) -> bool:
    return isinstance(widget, HandshakeWidget) and not widget.connected
