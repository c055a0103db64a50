"""The fields for the learner's own prediction of the next run, which may stay empty."""

from __future__ import annotations

import ipywidgets

from labkit.analysis.guessable import FIGURES
from labkit.runs.guesses import Guess, guess, withdraw

_NAMES = ("peak_mb", "step_ms")
_HINT = "What do you expect? The run stores your guess and compares it with the measurement"


class GuessFields:
    """A row with one field per figure, and behind them other widgets about the next run. `enter` makes what is written
    in the fields the prediction of that run."""

    def __init__(self, *others: ipywidgets.Widget) -> None:
        self.fields = {name: _field(name) for name in _NAMES}
        head = ipywidgets.HTML("<b>Your guess</b>")
        self.widget = ipywidgets.HBox([head, *self.fields.values(), *others], layout={"display": "none"})
        self.widget.add_class("labkit-guesses")
        self._entered: list[Guess] = []

    def show(self, shown: bool) -> None:
        """Shows or hides the row."""
        self.widget.layout.display = "" if shown else "none"

    def enter(self) -> None:
        """Predicts the figures of all fields that are not empty. Raises `ValueError` for a text that is no such
        value."""
        withdraw(self._entered)
        texts = {name: field.value.strip() for name, field in self.fields.items()}
        self._entered = [guess(name, _number(text)) for name, text in texts.items() if text]

    def clear(self) -> None:
        """Empties the fields, after a run has stored what they contained."""
        self._entered = []
        for field in self.fields.values():
            field.value = ""


def _field(name: str) -> ipywidgets.Text:
    figure = FIGURES[name]
    name = f"{figure.label} per rank ({figure.unit})"
    field = ipywidgets.Text(description=name, placeholder="optional", tooltip=_HINT)
    field.add_class("labkit-guess-field")
    return field


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
