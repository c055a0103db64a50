"""Tables of a run: HTML fragments, in which every text is escaped, for notebooks and handouts, which add their own
styles; and lists that display themselves, as a table in a notebook and as text elsewhere.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from labkit.analysis.diagnose import Finding
from labkit.analysis.guess import own_sentences, sentences
from labkit.analysis.ledger import Entry
from labkit.analysis.metrics import efficiency
from labkit.analysis.summary import summarise
from labkit.common.text import escape, visible
from labkit.common.units import size
from labkit.record.state import RunState

_NO_TRAFFIC = "no traffic, or no profiled step yet"


class Findings(tuple[Finding, ...]):
    """The findings about a run, the most severe first."""

    def __repr__(self) -> str:
        lines = [
            f"{finding.title}\n    Evidence: {finding.evidence}\n    Cause: {finding.cause}\n    Fix: {finding.fix}"
            for finding in self
        ]
        return visible("\n".join(lines)) or "no findings"

    def _repr_html_(self) -> str:
        return findings_html(self) or "<p>no findings</p>"


class Ledger(tuple[Entry, ...]):
    """The bytes that the ranks sent per step, by operation, next to the expected bytes, the largest first."""

    def __repr__(self) -> str:
        return visible("\n".join(map(_entry, self))) or _NO_TRAFFIC

    def _repr_html_(self) -> str:
        return ledger_html(self) or f"<p>{_NO_TRAFFIC}</p>"


def _entry(one: Entry) -> str:
    theory = "" if one.theory is None else f", expected {size(one.theory)}: {one.formula or 'nothing'}"
    return f"{one.op}: {one.calls:g} calls per rank, {size(one.measured)}{theory}" + (
        f" ({one.reason})" if one.reason else ""
    )


def findings_html(found: Iterable[Finding]) -> str:
    """Findings, each with its evidence, cause and fix, as HTML; empty for none."""
    rows = []
    for finding in found:
        parts = (("Evidence", finding.evidence), ("Cause", finding.cause), ("Fix", finding.fix))
        details = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in parts)
        rows.append(
            f'<div class="labkit-diagnosis labkit-{finding.kind}"><p>{escape(finding.title)}</p>{details}</div>'
        )
    return "".join(rows)


def ledger_html(entries: Iterable[Entry]) -> str:
    """The ledger as a table: bytes per step by operation, measured and expected, and why they differ; empty for
    none."""
    rows = []
    for entry in entries:
        theory = "–" if entry.theory is None else size(entry.theory)
        cells = (entry.op, f"{entry.calls:g}", size(entry.measured), theory, entry.formula, entry.reason)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    heads = ("sent per step, all ranks", "calls per rank", "measured", "expected", "formula", "why they differ")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def ranks_html(name: str, state: RunState) -> str:
    """The figures of the run called `name` as an HTML table with one row per rank, and below it how well it was
    predicted."""
    summary = summarise(state)
    head = (
        "rank",
        "exit code",
        "ms per step",
        "95th percentile (ms)",
        "peak memory",
        *(f"{phase} (ms)" for phase in summary.ranks[0].phase_seconds),
    )
    rows = []
    for rank in summary.ranks:
        peak = rank.peak_memory_bytes
        cells = [
            rank.rank,
            rank.exit_code,
            _ms(rank.step_seconds_median),
            _ms(rank.step_seconds_p95),
            None if peak is None else size(peak),
        ]
        cells += [_ms(value) for value in rank.phase_seconds.values()]
        rows.append("".join(f"<td>{'–' if cell is None else escape(str(cell))}</td>" for cell in cells))
    figures = [state.words, f"{summary.steps:,} steps"]
    figures += efficiency(state).words
    figures += [f"loss {summary.loss:.4f}"] if summary.loss is not None else []
    figures += [f"accuracy {summary.accuracy:.1%}"] if isinstance(summary.accuracy, (int, float)) else []
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<p><b>{escape(name)}</b>"
        f" {escape(' · '.join(figures))}</p><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        + outcome_html(state)
    )


def outcome_html(state: RunState) -> str:
    """The learner's predictions with their outcome, how the lab predicted the run, and each miss, one sentence in a
    line; empty for a run without predictions."""
    return _notes(sentences(state))


def guess_html(state: RunState) -> str:
    """The learner's predictions, with their outcome once the run is over, without reasons; empty without
    predictions."""
    return _notes(own_sentences(state, reasons=False))


def speed_html(state: RunState) -> str:
    """The speed of a run that is over, down to MFU; empty if its FLOP/s are not known."""
    found = efficiency(state)
    said = " · ".join(found.words) if state.over and found.computed else ""
    return f'<span class="labkit-speed">{escape(said)}</span>' if said else ""


def _notes(said: Iterable[str]) -> str:
    lines = "".join(f"<p>{escape(sentence)}</p>" for sentence in said)
    return f'<div class="labkit-notes">{lines}</div>' if lines else ""


_COLOURS = {"right": "#009E73", "wrong": "#D55E00", "empty": "#8C8C8C"}


def marked_html(what: str, state: str, title: str, words: str) -> str:
    """Feedback on an answer or a prediction, `what`: `state` is right, wrong or empty and selects the colour."""
    style = f"border-left:4px solid {_COLOURS[state]};padding:4px 10px"
    text = f"<b>{escape(title)}</b> {escape(words)}"
    return f'<div role="status" class="labkit-{what} labkit-{state}" style="{style}">{text}</div>'


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.2f}"


def table_text(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str] = ()) -> str:
    """A table as text: names in the first column, figures in the others, except in the columns `words`."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    aligned = [str.ljust if head == heads[0] or head in words else str.rjust for head in heads]
    lines = [[align(cell, width) for align, cell, width in zip(aligned, row, widths)] for row in (heads, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)
