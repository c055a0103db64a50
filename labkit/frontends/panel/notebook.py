"""The notebook around the panel: what stays in it when a run has ended."""

from __future__ import annotations

import json
from typing import Any

from labkit import figures
from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.analysis.summary import summarise
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.record.state import RunState


class Keepsake:
    """Places in the notebook, made when a panel is displayed, that its runs' plain figures and table go to when they end.

    A front end knows the places until its page is loaded again; from then on they hold what they hold, under the run's name.
    """

    def __init__(self) -> None:
        from IPython.display import display

        blank = {"text/html": "", "text/plain": ""}
        self._figure, self._table = (display(blank, raw=True, display_id=True) for _ in range(2))

    def fill(self, name: str, state: RunState) -> None:
        """Puts a run's figures there, which need no widget, no kernel and no network."""
        self._figure.update(figures_bundle(name, state), raw=True)
        self._table.update(table_bundle(name, state), raw=True)


def leave(name: str, state: RunState) -> None:
    """Displays a run's figures and table as plain outputs of the present cell."""
    from IPython.display import display

    display(table_bundle(name, state), raw=True)
    display(figures_bundle(name, state), raw=True)


def figures_bundle(name: str, state: RunState) -> dict[str, Any]:
    """All charts of a run, as plotly and as inline SVG: a front end takes what it can show."""
    sampled = any(rank.timelines for rank in state.ranks.values())
    shown = figures.NAMES if sampled else figures.LIVE
    pictures = "".join(figures.svg(name, state) for name in shown)
    plotly = json.loads(figures.overview(state).to_json())
    text = f"{', '.join(shown)} of {name}: {state.words}"
    return {"application/vnd.plotly.v1+json": plotly, "text/html": f"<div>{pictures}</div>", "text/plain": text}


def table_bundle(name: str, state: RunState) -> dict[str, Any]:
    """A run's figures in words and rows."""
    told = findings_html(findings(state)) + ranks_html(name, state) + ledger_html(ledger(state))
    return {"text/html": told, "text/plain": json.dumps(summarise(state, name), indent=2)}
