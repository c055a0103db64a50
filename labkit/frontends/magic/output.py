"""The current output of a cell's ranks as a value, which renders as HTML (all text escaped) and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.common.text import escape, visible, visible_log
from labkit.figures import rank_colour

_TONES = {"good": "#009E73", "bad": "#D55E00", "busy": "#0A86D8", "waiting": "#E69F00", "quiet": "#8C8C8C"}
_MONO = "font:12px/1.45 var(--jp-code-font-family,monospace)"
_BLOCK = (
    "border:1px solid rgba(128,128,128,.35);border-left:5px solid {colour};border-radius:6px;padding:4px"
    " 10px;min-width:0"
)
# keeps the newest line visible
_LINES = f"{_MONO};max-height:20em;overflow:auto;display:flex;flex-direction:column-reverse"
_PRE = f"{_MONO};margin:0;padding:0;background:none;white-space:pre-wrap;overflow-wrap:anywhere"
_DIGITS = 6  # significant digits of a number in the table


@dataclass(frozen=True)
class RankOutput:
    """The output of one rank: the newest lines of both streams, the number of earlier lines, and how the rank ended."""

    rank: int
    stdout: str
    stderr: str = ""
    passed: int = 0
    fate: str = ""  # in words, such as "failed first"
    aside: bool = False  # whether its errors are only a consequence of another rank's failure

    @property
    def heading(self) -> str:
        """The rank and how it ended."""
        return f"rank {self.rank}" + (f" · {self.fate}" if self.fate else "")


@dataclass(frozen=True)
class Shown:
    """The whole output: a title with a tone, the ranks, and their reports by rank."""

    title: str
    tone: str
    ranks: Sequence[RankOutput] = ()
    reports: Mapping[int, Mapping[str, Any]] | None = None
    hint: str = ""

    @property
    def _said(self) -> Sequence[RankOutput]:
        """The ranks whose output is shown: all of them, or none if they reported values and wrote nothing."""
        return (
            self.ranks if not self.reports or any(one.stdout or one.stderr or one.passed for one in self.ranks) else ()
        )

    def html(self) -> str:
        """The whole output as HTML with inline styles only."""
        dot = f'<span aria-hidden="true" style="color:{_TONES[self.tone]}">●</span>'
        hint = f'<div style="opacity:.8">{escape(self.hint)}</div>' if self.hint else ""
        head = f'<div role="status" class="labkit-cell-state">{dot} <b>{escape(self.title)}</b>{hint}</div>'
        blocks = "".join(_block(one) for one in self._said)
        grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(190px,100%),1fr));gap:6px;margin:4px 0"
        table = table_html(self.reports or {}, len(self.ranks))
        return f'<div class="labkit-cell">{head}<div style="{grid}">{blocks}</div>{table}</div>'

    def text(self) -> str:
        """The whole output as plain text."""
        parts = [self.title, self.hint]
        for one in self._said:
            passed = f"… {one.passed:,} earlier lines\n" if one.passed else ""
            said = passed + "\n".join(filter(None, (one.stdout, one.stderr)))
            parts.append(f"── {one.heading}\n{_plain(said) or '(no output)'}")
        parts.append(table_text(self.reports or {}, len(self.ranks)))
        return visible("\n".join(filter(None, parts)))


def _block(one: RankOutput) -> str:
    colour = rank_colour(one.rank)
    passed = f'<div style="opacity:.7">… {one.passed:,} earlier lines are in the log</div>' if one.passed else ""
    said = f'<pre style="{_PRE}">{_clean(one.stdout)}</pre>' if one.stdout else ""
    errors = (
        f'<pre class="labkit-cell-stderr" style="{_PRE};border-top:1px dashed'
        f' {_TONES["bad"]}">{_clean(one.stderr)}</pre>'
    )
    if not one.stderr:
        errors = ""
    elif one.aside:
        errors = f"<details><summary>stderr</summary>{errors}</details>"
    nothing = "" if said or errors or passed else '<span style="opacity:.6">(no output)</span>'
    mark = f'<span aria-hidden="true" style="color:{colour}">■</span> <b>{escape(one.heading)}</b>'
    lines = f'<div style="{_LINES}" tabindex="0"><div>{passed}{said}{errors}{nothing}</div></div>'
    style = _BLOCK.format(colour=colour)
    return (
        f'<div role="group" aria-label="rank {one.rank}" class="labkit-cell-rank" style="{style}">{mark}{lines}</div>'
    )


def script_html(script: str) -> str:
    """The generated script in a collapsible section."""
    code = f'<pre style="{_PRE};padding:4px 10px">{escape(script)}</pre>'
    return f'<details class="labkit-cell-script"><summary>The script that every rank runs</summary>{code}</details>'


def columns(reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The names that any rank reported, in order of first occurrence."""
    return list(dict.fromkeys(name for rank in sorted(reports) for name in reports[rank]))


def table_html(reports: Mapping[int, Mapping[str, Any]], ranks: int) -> str:
    """The table of ranks as HTML; empty if nothing was reported."""
    names = columns(reports)
    if not names:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("rank", *names))
    rows = []
    for rank in range(ranks):
        mark = f'<span aria-hidden="true" style="color:{rank_colour(rank)}">■</span> {rank}'
        cells = "".join(f"<td>{escape(value_text(reports.get(rank, {}).get(name)))}</td>" for name in names)
        rows.append(f"<tr><td>{mark}</td>{cells}</tr>")
    head, body = f"<thead><tr>{heads}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<table class="labkit-cell-reports" style="font-variant-numeric:tabular-nums">{head}{body}</table>'


def table_text(reports: Mapping[int, Mapping[str, Any]], ranks: int) -> str:
    """The table of ranks as aligned text; empty if nothing was reported."""
    names = columns(reports)
    if not names:
        return ""
    rows = [["rank", *names]]
    rows += [[str(rank), *(value_text(reports.get(rank, {}).get(name)) for name in names)] for rank in range(ranks)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def value_text(value: Any) -> str:
    """A reported value as the table shows it; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)


def _plain(text: str) -> str:
    return visible_log(text).rstrip()


def _clean(text: str) -> str:
    return escape(_plain(text))
