"""Static figures and tables, which stay in the notebook when a run is over."""

from __future__ import annotations

import json
from typing import Any

from labkit import figures
from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.analysis.summary import summarise
from labkit.figures.controls import CONFIG
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.record.documents import plain
from labkit.record.state import RunState


class StaticFigures:
    """Two empty outputs below a panel, filled with the static figures and the table of a run when it ends.

    They can be updated until the page is reloaded; after that they keep their last contents, under the run's name.
    """

    def __init__(self) -> None:
        from IPython.display import display

        blank = {"text/html": "", "text/plain": ""}
        self._figure, self._table = (display(blank, raw=True, display_id=True) for _ in range(2))

    def fill(self, name: str, state: RunState) -> None:
        """Shows a run's figures and table, which need no widget, kernel or network."""
        self._figure.update(figures_bundle(name, state), raw=True)
        self._table.update(table_bundle(name, state), raw=True)


def display_static(name: str, state: RunState) -> None:
    """Displays a run's table and figures as static outputs of the current cell."""
    from IPython.display import display

    display(table_bundle(name, state), raw=True)
    display(figures_bundle(name, state), raw=True)


def figures_bundle(name: str, state: RunState) -> dict[str, Any]:
    """All charts of a run, both as plotly and as inline SVG; the notebook client shows the format it supports."""
    shown = figures.of_run(state)
    pictures = "".join(figures.svg(name, state) for name in shown)
    plotly = json.loads(figures.overview(state).to_json()) | {"config": CONFIG}
    text = f"{', '.join(shown)} of {name}: {state.words}"
    return {"application/vnd.plotly.v1+json": plotly, "text/html": f"<div>{pictures}</div>", "text/plain": text}


def table_bundle(name: str, state: RunState) -> dict[str, Any]:
    """A run's findings, its table of ranks and its communication ledger."""
    html = findings_html(findings(state)) + ranks_html(name, state) + ledger_html(ledger(state))
    return {"text/html": html, "text/plain": json.dumps(plain(summarise(state, name)), indent=2)}
