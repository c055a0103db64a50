"""What is known of a run as tables: pieces of HTML, every text escaped, for notebooks and handouts, which have styles of their own; and
lists that show themselves, as a table in a notebook and as text elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.analysis.diagnose import Finding
from labkit.analysis.ledger import Entry
from labkit.analysis.summary import summarise
from labkit.common.text import escape, visible
from labkit.common.units import size
from labkit.record.state import RunState


class Findings(tuple[Finding, ...]):
    """What was found about a run, the gravest first."""

    def __repr__(self) -> str:
        lines = [f"{one.title}\n    seen: {one.evidence}\n    because: {one.cause}\n    way out: {one.fix}" for one in self]
        return visible("\n".join(lines)) or "nothing was found"

    def _repr_html_(self) -> str:
        return findings_html(self) or "<p>nothing was found</p>"


class Ledger(tuple[Entry, ...]):
    """What the ranks sent in a step, by operation, beside what theory says, the largest first."""

    def __repr__(self) -> str:
        return visible("\n".join(map(_entry, self))) or "nothing was sent, or no step was looked at yet"

    def _repr_html_(self) -> str:
        return ledger_html(self) or "<p>nothing was sent, or no step was looked at yet</p>"


def _entry(one: Entry) -> str:
    theory = "" if one.theory is None else f", by theory {size(one.theory)}: {one.formula or 'nothing'}"
    return f"{one.op}: {one.calls:g} calls a rank, {size(one.measured)}{theory}" + (f" ({one.reason})" if one.reason else "")


def findings_html(found: Iterable[Finding]) -> str:
    """Findings, each with its evidence, cause and way out, as a list."""
    rows = []
    for one in found:
        parts = (("Seen", one.evidence), ("Because", one.cause), ("Way out", one.fix))
        told = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in parts)
        rows.append(f'<div class="labkit-diagnosis labkit-{one.kind}"><p>{escape(one.title)}</p>{told}</div>')
    return "".join(rows)


def ledger_html(entries: Iterable[Entry]) -> str:
    """The ledger as a table: bytes of a step by operation, as measured and by theory, with the reason where they differ; empty for none."""
    rows = []
    for one in entries:
        theory = "–" if one.theory is None else size(one.theory)
        cells = (one.op, f"{one.calls:g}", size(one.measured), theory, one.formula, one.reason)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    heads = ("sent in a step, all ranks", "calls a rank", "measured", "by theory", "formula", "why they differ")
    return f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def ranks_html(name: str, state: RunState) -> str:
    """The figures of the run called `name`, one row a rank, as an HTML table."""
    summary = summarise(state)
    head = ("rank", "exit code", "ms per step", "peak memory", *(f"{phase} (ms)" for phase in summary["ranks"][0]["phase_seconds"]))
    rows = []
    for rank in summary["ranks"]:
        peak = rank["peak_memory_bytes"]
        cells = [rank["rank"], rank["exit_code"], _ms(rank["step_seconds_median"]), None if peak is None else size(peak)]
        cells += [_ms(value) for value in rank["phase_seconds"].values()]
        rows.append("".join(f"<td>{'–' if cell is None else escape(str(cell))}</td>" for cell in cells))
    speed = summary["samples_per_second"]
    figures = [state.words, f"{summary['steps']:,} steps"]
    figures += [f"{speed:,.0f} samples/s"] if speed else []
    figures += [f"loss {summary['loss']:.4f}"] if summary["loss"] is not None else []
    figures += [f"accuracy {summary['accuracy']:.1%}"] if isinstance(summary["accuracy"], (int, float)) else []
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p><b>{escape(name)}</b> {escape(' · '.join(figures))}</p><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.2f}"
