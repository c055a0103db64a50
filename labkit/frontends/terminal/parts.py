"""What the tables of the terminal have in common: bars of the phases, their legend, and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from labkit.figures.colours import PHASES as PHASE_COLOURS
from labkit.frontends.console import Console
from labkit.record.writer import PHASES

BAR = (8, 40)  # minimum and maximum width of the bar of phases, in characters

_GLYPHS = dict(zip(PHASES, "·-░▒▓█"))  # distinguish the phases without colours


class PhaseBar:
    """A bar of the fractions of a step spent in each phase, as wide as the column allows."""

    def __init__(self, seconds: Mapping[str, float]):
        self._shares = {phase: value for phase, value in seconds.items() if value > 0}

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(BAR[0], min(BAR[1], options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, total = min(BAR[1], options.max_width), sum(self._shares.values())
        bar, done, at = Text(no_wrap=True), 0.0, 0
        for phase, seconds in self._shares.items():
            done += seconds
            end = round(width * done / total)
            bar.append(_GLYPHS[phase] * (end - at), style=PHASE_COLOURS[phase])
            at = end
        yield bar


def phase_legend() -> Text:
    legend = Text(justify="right", style="dim")
    for phase in PHASES:
        legend.append(f" {_GLYPHS[phase] * 2}", style=PHASE_COLOURS[phase])
        legend.append(f" {phase} ")
    return legend


def formatted(value: float | None, form: str) -> str:
    return "–" if not isinstance(value, (int, float)) or math.isnan(value) else format(value, form)
