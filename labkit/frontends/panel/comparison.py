"""The view of a comparison, in the Compare tab or below a cell: its table, charts and remarks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from labkit.analysis.comparison import HEADS, Row, cells, recorded_elsewhere, sentences
from labkit.common.text import escape
from labkit.figures import comparison as pictures
from labkit.frontends.panel.view import style
from labkit.runs.comparing import Comparing
from labkit.runs.notebook import headless

_REDRAW = 0.5  # seconds between two redraws
_TONES = {"equal": "good", "reference": "quiet", "differs": "bad"}


class ComparisonView:
    """Shows a comparison: its table, charts and remarks, updated while it runs."""

    def __init__(self) -> None:
        self._html = ipywidgets.HTML()
        self._html.add_class("labkit-comparison")
        self._shown: tuple[Any, ...] | None = None
        self.widget = self._html

    def follow(self, comparing: Comparing, on_over: Callable[[], None] = lambda: None) -> threading.Thread:
        """Shows a comparison until all its runs are over, in a thread, which is returned."""
        thread = threading.Thread(
            target=self._watch, args=(comparing, on_over), daemon=True, name="labkit view of a comparison"
        )
        thread.start()
        return thread

    def _watch(self, comparing: Comparing, on_over: Callable[[], None]) -> None:
        try:
            for rows in comparing.watched(_REDRAW):
                self.show(rows, comparing.left_out)
            self.show(comparing.rows, comparing.left_out)
        finally:
            on_over()

    def show(self, rows: Sequence[Row], left_out: Mapping[str, str], first: str = "") -> None:
        """Shows the rows, with the sentence `first` above them; draws nothing if they are shown already."""
        what = tuple(rows), dict(left_out), first
        if what == self._shown:
            return
        self._shown = what
        self._html.value = (f"<p>{escape(first)}</p>" if first else "") + comparison_html(rows, left_out)

    def say(self, text: str) -> None:
        """Shows a text instead of a comparison."""
        self._shown = None
        self._html.value = f'<p class="labkit-empty">{escape(text)}</p>'


def show_comparison_in_notebook(comparing: Comparing) -> None:
    """Shows a comparison live and returns immediately. If headless, waits for the end and displays static outputs."""
    from IPython.display import display

    if headless():
        comparing.wait()
        display(comparison_bundle(comparing), raw=True)
        return
    view = ComparisonView()
    widget = ipywidgets.VBox([style(), view.widget])
    widget.add_class("labkit")
    display(widget)
    static = display({"text/html": "", "text/plain": ""}, raw=True, display_id=True)
    view.follow(comparing, lambda: static.update(comparison_bundle(comparing), raw=True))


def comparison_bundle(comparing: Comparing) -> dict[str, Any]:
    """The table and the charts as a static output, which needs no widget, kernel or network.

    A page that shows the widget hides it, because both show the same.
    """
    html = f'<div class="labkit-static">{comparison_html(comparing.rows, comparing.left_out)}</div>'
    return {"text/html": html, "text/plain": json.dumps(comparing.to_json(), indent=2)}


def comparison_html(rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """The table, the charts and the remarks as HTML, all text escaped."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(rows, left_out))
    drawn = pictures.svg(rows, recorded_elsewhere(rows), height=169)
    return f'{_table(rows)}<div class="labkit-plain">{drawn}</div><div class="labkit-notes">{said}</div>'


def _table(rows: Sequence[Row]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
    body = "".join(_row(row, cells(row)) for row in rows)
    body += "".join(
        _row(row, (*cells(row)[:-1], "recorded elsewhere"), "labkit-recorded") for row in recorded_elsewhere(rows)
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: Row, texts: Sequence[str], kind: str = "") -> str:
    verdict = row.badge.verdict if row.badge else ""
    hint = escape(row.badge.sentence if row.badge else row.words, quote=True)
    *figures, last = (escape(text) for text in texts)
    tone = "bad" if row.failed else _TONES.get(verdict, "waiting" if verdict else "quiet")
    badge = f'<td class="labkit-badge labkit-{tone}" title="{hint}"><i></i>{last}</td>'
    return f'<tr class="{kind}">' + "".join(f"<td>{text}</td>" for text in figures) + badge + "</tr>"
