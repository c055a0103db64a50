"""The picture of the machine as a widget: a page receives a film of one step, plays it while the run trains, and is
sent only what changes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from labkit.figures.machine import Changes, Film, as_json, film, still
from labkit.frontends.panel.charts import HandshakeWidget, Live, program
from labkit.record.state import RunState


class _MachineWidget(HandshakeWidget):
    """The browser side: sends "ready" for the film."""

    _esm = program("machine.js", "machine_widget.js")


class MachinePicture(Live):
    """The picture of the machine in one run: before it what is predicted, then the newest profiled step, over and over
    for as long as steps follow each other."""

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        super().__init__(_MachineWidget(), lock)
        self.widget.add_class("labkit-machine-box")
        self._sent: Film | None = None
        self._moved = False

    def _restart(self) -> None:
        self._sent = None

    def _message(self, state: RunState) -> dict[str, Any] | None:
        shown, before = film(state), self._sent
        moves = moving(state)
        self._sent, self._moved, moved = shown, moves, self._moved
        if before is None or not _continues(shown, before):
            return {"kind": "film", "moves": moves, **as_json(shown)}
        changes: Changes = {
            name: attributes
            for name, (tag, attributes) in shown.shapes.items()
            if before.shapes[name] != (tag, attributes)
        }
        message = {"kind": "shapes", "moves": moves, "shapes": changes, "label": shown.label}
        return message if changes or moves != moved else None

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
