"""Tables: HTML fragments, in which every text is escaped, for notebooks and handouts, which add their own styles; and
what displays itself as tables in a notebook and as text elsewhere: findings and ledger of a run, a prediction, and what
files of a job say that ran anywhere.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose import Finding
from labkit.analysis.foreign import Page, Table
from labkit.analysis.guess import own_sentences, sentences
from labkit.analysis.ledger import Entry
from labkit.analysis.metrics import efficiency
from labkit.analysis.prediction import how_made, notes, ranges, step_in_words, time_made
from labkit.analysis.summary import summarise
from labkit.common.text import escape, visible
from labkit.common.units import counted, milliseconds, size
from labkit.figures import figure
from labkit.record.documents import Plan, PredictedRank, plain
from labkit.record.state import RunState
from labkit.record.writer import OWNERS

if TYPE_CHECKING:
    import plotly.graph_objects


# ---- any table, notes and feedback

Rows = Sequence[Sequence[str]]


def table_text(heads: Sequence[str], rows: Rows, words: Container[str] = ()) -> str:
    """A table as text: names in the first column, figures in the others, except in the columns `words`."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    aligned = [str.ljust if head == heads[0] or head in words else str.rjust for head in heads]
    lines = [[align(cell, width) for align, cell, width in zip(aligned, row, widths)] for row in (heads, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def table_html(heads: Sequence[str], rows: Rows, words: Container[str] = ()) -> str:
    """A table; every cell is escaped. The columns in `words` are aligned left."""
    styles = [' style="text-align: left"' if name in words else "" for name in heads]
    head = "".join(f"<th{style}>{escape(name)}</th>" for name, style in zip(heads, styles))
    cells = ["".join(f"<td{style}>{escape(cell)}</td>" for cell, style in zip(row, styles)) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def titled_html(table: Table) -> str:
    """A table below its title."""
    return f"<p><b>{escape(table.title)}</b></p>{table_html(table.heads, table.rows, table.words)}"


def notes_html(notes: Sequence[str]) -> str:
    """Sentences below a table; each is escaped."""
    return "".join(f'<p class="labkit-notes">{escape(note)}</p>' for note in notes)


_COLOURS = {"right": "#009E73", "wrong": "#D55E00", "empty": "#8C8C8C"}


def marked_html(what: str, state: str, title: str, words: str) -> str:
    """Feedback on an answer or a prediction, `what`: `state` is right, wrong or empty and selects the colour."""
    style = f"border-left:4px solid {_COLOURS[state]};padding:4px 10px"
    text = f"<b>{escape(title)}</b> {escape(words)}"
    return f'<div role="status" class="labkit-{what} labkit-{state}" style="{style}">{text}</div>'


def _notes(said: Iterable[str]) -> str:
    lines = "".join(f"<p>{escape(sentence)}</p>" for sentence in said)
    return f'<div class="labkit-notes">{lines}</div>' if lines else ""


class Tables:
    """What shows a title, tables and sentences: as HTML in a notebook, as text elsewhere."""

    @property
    def title(self) -> str:
        """What stands above the tables."""
        raise NotImplementedError

    def tables(self) -> Iterable[tuple[Sequence[str], Rows]]:
        """The heads and the rows of each table."""
        raise NotImplementedError

    @property
    def sentences(self) -> list[str]:
        """What follows the tables."""
        return []

    def __repr__(self) -> str:
        tables = (table_text(heads, rows) for heads, rows in self.tables())
        return visible("\n\n".join(filter(None, [self.title, *tables, "\n".join(self.sentences)])))

    def _repr_html_(self) -> str:
        tables = "".join(table_html(heads, rows) for heads, rows in self.tables())
        return f"{_notes([self.title])}{tables}{_notes(self.sentences)}"


# ---- a run: findings, ledger, ranks, and how well it was predicted

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


def _entry(entry: Entry) -> str:
    theory = "" if entry.theory is None else f", expected {size(entry.theory)}: {entry.formula or 'nothing'}"
    return f"{entry.op}: {entry.calls:g} calls per rank, {size(entry.measured)}{theory}" + (
        f" ({entry.reason})" if entry.reason else ""
    )


def findings_html(findings: Iterable[Finding]) -> str:
    """Findings, each with its evidence, cause and fix, as HTML; empty for none."""
    rows = []
    for finding in findings:
        parts = (("Evidence", finding.evidence), ("Cause", finding.cause), ("Fix", finding.fix))
        details = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in parts)
        rows.append(
            f'<div class="labkit-diagnosis labkit-{finding.kind}"><p>{escape(finding.title)}</p>{details}</div>'
        )
    return "".join(rows)


def ledger_html(entries: Iterable[Entry]) -> str:
    """The ledger as a table: bytes per step by operation, measured and expected, and why they differ; empty for
    none."""
    heads = ("sent per step, all ranks", "calls per rank", "measured", "expected", "formula", "why they differ")
    rows = []
    for entry in entries:
        theory = "–" if entry.theory is None else size(entry.theory)
        rows.append((entry.op, f"{entry.calls:g}", size(entry.measured), theory, entry.formula, entry.reason))
    return table_html(heads, rows) if rows else ""


def ranks_html(name: str, state: RunState) -> str:
    """The figures of the run called `name` as an HTML table with one row per rank, and below it how well it was
    predicted."""
    summary = summarise(state)
    phases = (f"{phase} (ms)" for phase in summary.ranks[0].phase_seconds)
    heads = ("rank", "exit code", "ms per step", "95th percentile (ms)", "peak memory", *phases)
    rows = []
    for rank in summary.ranks:
        code, peak = rank.exit_code, rank.peak_memory_bytes
        cells = [str(rank.rank), "–" if code is None else str(code)]
        cells += [_ms(rank.step_seconds_median), _ms(rank.step_seconds_p95), "–" if peak is None else size(peak)]
        rows.append(cells + [_ms(value) for value in rank.phase_seconds.values()])
    figures = [state.words, f"{summary.steps:,} steps"]
    figures += efficiency(state).words
    figures += [f"loss {summary.loss:.4f}"] if summary.loss is not None else []
    figures += [f"accuracy {summary.accuracy:.1%}"] if isinstance(summary.accuracy, (int, float)) else []
    head = f"<p><b>{escape(name)}</b> {escape(' · '.join(figures))}</p>"
    return f"{head}{table_html(heads, rows)}{outcome_html(state)}"


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
    figures = efficiency(state)
    said = " · ".join(figures.words) if state.over and figures.computed else ""
    return f'<span class="labkit-speed">{escape(said)}</span>' if said else ""


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.2f}"


# ---- a prediction

PREDICTION_HEADS = ("rank", "peak memory", "in the phase", *OWNERS, "sent per step")


class Prediction:
    """The predicted memory and traffic of every rank, and the time of a step and of its exposed communication; displays
    itself as a table in a notebook, as text elsewhere."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.heads: tuple[str, ...] = PREDICTION_HEADS
        self._times: dict[int, tuple[str, ...]] = {}  # by rank
        self._on = f"; {plan.untimed}" if plan.untimed else ""
        if plan.time:
            self._on = f"; {step_in_words(plan)} ({time_made(plan)})"
        for part in plan.classes:
            if part.timeline:
                times = part.timeline.seconds, sum(part.timeline.exposed.values())
                self.heads = (*PREDICTION_HEADS, "step", "exposed")
                self._times |= dict.fromkeys(part.ranks, tuple(map(milliseconds, times)))

    @property
    def state(self) -> RunState:
        """A run that has nothing but this prediction, for charts."""
        state = RunState()
        state.apply(self.plan.spec)
        state.apply(self.plan)
        return state

    def figure(self) -> plotly.graph_objects.Figure:
        """The memory at the peak of a step, by owner, per rank."""
        return figure("memory_by_owner", self.state)

    def timeline(self) -> plotly.graph_objects.Figure:
        """The timeline of a step; without bars if its time was not predicted."""
        return figure("timeline", self.state)

    def to_json(self) -> dict[str, Any]:
        """The plan as a dict that can be written as JSON, with `seconds_per_step`: its `seconds`, and the range from
        `low` to `high`; None without the time of a step."""
        time = self.plan.time
        step = {"seconds": time.seconds, "low": time.low, "high": time.high} if time else None
        return plain(self.plan) | {"seconds_per_step": step}

    @property
    def title(self) -> str:
        """What was predicted, and how."""
        spec, ranks = self.plan.spec, counted(len(self.plan.ranks), "rank")
        what = spec.script or f"{spec.strategy} · {spec.workload}"
        return f"{what} on {ranks}: predicted {how_made(self.plan)}{self._on}"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells below `heads`, a row for each group of equal ranks."""
        groups: dict[int, list[PredictedRank]] = {}
        for rank in self.plan.ranks:
            groups.setdefault(rank.like, []).append(rank)
        return [(*_prediction_cells(ranks), *self._times.get(like, ())) for like, ranks in groups.items()]

    @property
    def notes(self) -> list[str]:
        """Sentences below the table: the formula next to the trace, and estimates of what a GPU needs in addition."""
        return notes(self.plan)

    def __repr__(self) -> str:
        rows = [self.heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        return visible("\n".join([self.title, *lines, *self.notes]))

    def _repr_html_(self) -> str:
        return f"{_notes([self.title])}{table_html(self.heads, self.rows)}{notes_html(self.notes)}"


def _prediction_cells(ranks: Sequence[PredictedRank]) -> tuple[str, ...]:
    first = ranks[0]
    peak, sent = first.peak_memory_bytes, first.comm_bytes_per_step
    held = first.at_peak or first.memory_bytes  # without a trace: what outlives a step
    return (
        ranges(rank.rank for rank in ranks),
        "–" if peak is None else size(peak),
        first.phase_at_peak or "–",
        *(size(held[owner]) if owner in held else "–" for owner in OWNERS),
        "–" if sent is None else size(sent),
    )


# ---- files of a job that ran anywhere

NO_FINDINGS = "Nothing stands out."


class Explained:
    """The pages about some files, one for each kind of files: findings first, then tables, then what cannot be told.
    `run` is the name of the run that they were kept as, empty if they were not."""

    def __init__(self, pages: Sequence[Page], run: str = ""):
        self.pages = tuple(pages)
        self.run = run

    @property
    def findings(self) -> Findings:
        """What happened, the most important first."""
        return Findings(finding for page in self.pages for finding in page.findings)

    def to_json(self) -> dict[str, Any]:
        """The pages as plain values. Times are in seconds, sizes in bytes."""
        pages = []
        for page in self.pages:
            found = [asdict(finding) for finding in page.findings]
            pages.append({"title": page.title, "findings": found, "notes": list(page.notes), **page.figures})
        return ({"run": self.run} if self.run else {}) | {"pages": pages}

    def __repr__(self) -> str:
        parts = []
        for page in self.pages:
            parts += [page.title, repr(Findings(page.findings)) if page.findings else NO_FINDINGS]
            parts += [f"{table.title}\n{table_text(table.heads, table.rows, table.words)}" for table in page.tables]
            parts.append("\n".join(page.notes))
        return visible("\n\n".join(filter(None, parts)))

    def _repr_html_(self) -> str:
        parts = []
        for page in self.pages:
            parts += [f"<h4>{escape(page.title)}</h4>", findings_html(page.findings) or f"<p>{NO_FINDINGS}</p>"]
            parts += map(titled_html, page.tables)
            parts += [f"<p>{escape(note)}</p>" for note in page.notes]
        return "".join(parts)
