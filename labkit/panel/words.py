"""The state of a run as small pieces of HTML, every text escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from labkit.diagnose import findings
from labkit.ledger import Entry
from labkit.state import RunState
from labkit.summary import summarise

_TONES = {"finished": "good", "failed": "bad", "stopped": "quiet", "ready": "quiet", "running": "busy"}


def state_html(words: str, tone: str) -> str:
    """The state in words, with a dot: `tone` is quiet, waiting, busy, good or bad."""
    text = escape(words, quote=True)
    return f'<div class="labkit-state labkit-{tone}" role="status" title="{text}"><i></i><span>{text}</span></div>'


def tone_of(state: RunState) -> str:
    """The tone of a run's state."""
    return _TONES.get(state.status.get("state", "ready"), "waiting")


def progress_html(state: RunState) -> str:
    """Step i/n, a bar, and the time left or, at the end, taken."""
    total, step = state.total_steps, state.step
    steps = f"step {step:,}/{total:,}" if total else f"step {step:,}"
    share = min(100.0, 100 * step / total) if total else 0.0
    inner = f'<div style="width:{share:.1f}%"></div>'
    bar = f'<div class="labkit-progress" role="progressbar" aria-label="steps" aria-valuenow="{share:.0f}">{inner}</div>'
    return f'<div class="labkit-advance"><span>{steps}</span>{bar}<span>{_time(state)}</span></div>'


def _time(state: RunState) -> str:
    if state.over:
        started, ended = state.status.get("started"), state.status.get("ended")
        return f"{_clock(ended - started)} in all" if started and ended else ""
    left = state.seconds_left
    return "" if left is None else f"{_clock(math.ceil(left))} left"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def finding_html(state: RunState) -> str:
    """The gravest finding in one line; empty where there is none."""
    first = next(iter(findings(state)), None)
    if first is None and state.status.get("state") == "failed":
        return sentence_html(state.words)
    if first is None:
        return ""
    return sentence_html(f"{first.title}: {first.evidence}", first.way_out, first.kind)


def findings_html(state: RunState) -> str:
    """Every finding with its evidence, cause and way out, as a list; empty where there is none."""
    rows = []
    for one in findings(state):
        parts = (("Seen", one.evidence), ("Because", one.cause), ("Way out", one.way_out))
        told = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in parts)
        rows.append(f'<div class="labkit-diagnosis labkit-{one.kind}"><p>{escape(one.title)}</p>{told}</div>')
    return "".join(rows)


def ledger_html(entries: Sequence[Entry]) -> str:
    """The ledger as a table: bytes of a step by operation, as measured and by theory, with the reason where they differ."""
    if not entries:
        return ""
    rows = []
    for one in entries:
        theory = "–" if one.theory is None else kib(one.theory)
        cells = (one.op, f"{one.calls:g}", kib(one.measured), theory, one.formula, one.reason)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = ("sent in a step, all ranks", "calls a rank", "measured", "by theory", "formula", "why they differ")
    return f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def kib(count: float) -> str:
    """Bytes as `1,234.5 KiB`."""
    return f"{count / 1024:,.1f} KiB"


def sentence_html(text: str, way_out: str = "", kind: str = "wrong") -> str:
    """One sentence that something is wrong, or of another `kind` of finding; the way out is what it says when it is pointed at."""
    hint = escape(f"{text}\n{way_out}".strip(), quote=True)
    return f'<div class="labkit-finding labkit-{kind}" role="alert" title="{hint}">{escape(text)}</div>' if text else ""


def ranks_table(name: str, state: RunState) -> str:
    """The figures of the run called `name`, one row a rank, as an HTML table."""
    summary = summarise(state)
    head = ("rank", "exit code", "ms per step", "peak memory (MiB)", *(f"{phase} (ms)" for phase in summary["ranks"][0]["phase_seconds"]))
    rows = []
    for rank in summary["ranks"]:
        peak = rank["peak_memory_bytes"]
        cells = [rank["rank"], rank["exit_code"], _ms(rank["step_seconds_median"]), None if peak is None else f"{peak / 2**20:,.1f}"]
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
