"""Widgets with a program of ours, opened again in the page until it hears them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets

STATIC = Path(__file__).parent / "static"
_WAITS = (5.0, 10.0, 20.0)  # seconds before each look at the widgets


def program(name: str) -> str:
    """The source of a program in `static/`, for the `_esm` of an `OwnWidget`."""
    return "\n".join((STATIC / part).read_text(encoding="utf-8") for part in ("own.js", name))


class OwnWidget(anywidget.AnyWidget):
    """A widget with a `program`; put it into a box.

    anywidget gives a page two seconds to start a program. If a busy page needs longer, the widget is shown, but ignores
    all messages for ever. It is therefore asked for an answer: `heard` says whether one has come, and
    `open_until_heard` opens the widget again.
    """

    def __init__(self, **traits: Any) -> None:
        self.heard = False
        super().__init__(**traits)
        self.on_msg(self._handshake)

    def _handshake(self, _, message, buffers) -> None:
        if message.get("kind") == "here":
            self.send({"kind": "hello"})
        elif message.get("kind") == "heard":
            self.heard = True


def open_until_heard(root: ipywidgets.Box, waits: Sequence[float] = _WAITS) -> threading.Thread:
    """Call this when `root` is displayed: a thread opens its `OwnWidget`s again that no page has answered for after a
    while. It ends when all have been heard, or after the last wait, for a page that cannot show them."""
    thread = threading.Thread(target=_open_again, args=(root, waits), daemon=True, name="labkit own widgets")
    thread.start()
    return thread


def _open_again(root: ipywidgets.Box, waits: Sequence[float]) -> None:
    for seconds in waits:
        time.sleep(seconds)
        boxes = [box for box in _boxes(root) if any(map(_is_unheard, box.children))]
        if not boxes:
            return
        for box in boxes:
            children = box.children
            box.children = [one for one in children if not _is_unheard(one)]
            for one in filter(_is_unheard, children):
                one.close()
                one.open()
            box.children = children


def _boxes(box: ipywidgets.Box) -> Iterator[ipywidgets.Box]:
    yield box
    for child in box.children:
        if isinstance(child, ipywidgets.Box):
            yield from _boxes(child)


def _is_unheard(widget: ipywidgets.Widget) -> bool:
    return isinstance(widget, OwnWidget) and not widget.heard
