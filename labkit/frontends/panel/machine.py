"""The picture of the machine as a widget: a page receives a film of one step, plays it while the run trains, and is
sent only what changes."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import traitlets

from labkit.figures.machine import Changes, Film, as_json, film, player, still
from labkit.frontends.panel.charts import HandshakeWidget, Live, program
from labkit.record.state import RunState

_PACE = 20_000  # bytes of films per second: after a long one only words are sent for some time


class _MachineWidget(HandshakeWidget):
    """The browser side: sends "ready" for the film, and shows `still` until it comes."""

    _esm = program("machine_widget.js", player())
    still = traitlets.Unicode().tag(sync=True)


class MachinePicture(Live):
    """The picture of the machine in one run: before it what is predicted, then the newest profiled step, over and over
    for as long as steps follow each other."""

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        super().__init__(_MachineWidget(), lock)
        self.widget.add_class("labkit-machine-box")
        self._sent: Film | None = None  # what the page has
        self._moved = False
        self._next = 0.0  # when the next film may be sent

    def shown(self) -> None:
        """As for any widget; a still comes with it, because a busy page asks for a film only much later."""
        self.page.still = self._plain(self._state)
        super().shown()

    def _restart(self) -> None:
        self._sent = None

    def _message(self, state: RunState) -> dict[str, Any] | None:
        shown, before, moves = film(state), self._sent, moving(state)
        continues = before is not None and _continues(shown, before)
        if before is None:
            self.page.still = ""  # a page that is reloaded should not begin with it
        if before is None or not (continues or (time.monotonic() < self._next and not state.over)):
            self._sent, self._moved = shown, moves
            message = {"kind": "film", "moves": moves, **as_json(shown)}
            self._next = time.monotonic() + len(json.dumps(message)) / _PACE
            return message
        changed = {
            name: shape
            for name, shape in shown.shapes.items()
            if name in before.shapes and before.shapes[name] != shape and (continues or shape[0] == "text")
        }
        self._sent = replace(before, shapes=before.shapes | changed)
        moved, self._moved = self._moved, moves
        if not changed and moves == moved:
            return None
        attributes: Changes = {name: shape[1] for name, shape in changed.items()}
        return {"kind": "shapes", "moves": moves, "shapes": attributes, "label": shown.label}

    def _plain(self, state: RunState) -> str:
        shown = film(state)
        return still(shown, shown.peak)


def moving(state: RunState) -> bool:
    """Whether the ranks finish steps now, as far as is known: none of them waits without progress."""
    waits = any(rank.waiting or rank.silent for rank in state.ranks.values())
    return state.status.state == "running" and state.step > 0 and not waits


def _continues(shown: Film, before: Film) -> bool:
    """Whether only texts and places of the same shapes have changed."""
    same = shown.frames is before.frames and shown.height == before.height
    return same and shown.shapes.keys() == before.shapes.keys()
