"""A prediction as text, HTML table, and figure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.prediction import how_made, notes, ranges, step_in_words, time_made
from labkit.common.text import escape, visible
from labkit.common.units import counted, milliseconds, size
from labkit.figures import figure
from labkit.record.documents import Plan, PredictedRank, plain
from labkit.record.state import RunState
from labkit.record.writer import OWNERS

if TYPE_CHECKING:
    import plotly.graph_objects

HEADS = ("rank", "peak memory", "in the phase", *OWNERS, "sent per step")


class Prediction:
    """The predicted memory and traffic of every rank, and the time of a step and of its exposed communication; displays
    itself as a table in a notebook, as text elsewhere."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.heads: tuple[str, ...] = HEADS
        self._times: dict[int, tuple[str, ...]] = {}  # by rank
        self._on = f"; {plan.untimed}" if plan.untimed else ""
        if plan.time:
            self._on = f"; {step_in_words(plan)} ({time_made(plan)})"
        for part in plan.classes:
            if part.timeline:
                times = part.timeline.seconds, sum(part.timeline.exposed.values())
                self.heads = (*HEADS, "step", "exposed")
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
        return [(*_cells(ranks), *self._times.get(like, ())) for like, ranks in groups.items()]

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
        title = f'<div class="labkit-notes"><p>{escape(self.title)}</p></div>'
        return f"{title}{table_html(self.heads, self.rows)}{notes_html(self.notes)}"


def _cells(ranks: Sequence[PredictedRank]) -> tuple[str, ...]:
    one = ranks[0]
    peak, sent = one.peak_memory_bytes, one.comm_bytes_per_step
    held = one.at_peak or one.memory_bytes  # without a trace: what outlives a step
    return (
        ranges(rank.rank for rank in ranks),
        "–" if peak is None else size(peak),
        one.phase_at_peak or "–",
        *(size(held[owner]) if owner in held else "–" for owner in OWNERS),
        "–" if sent is None else size(sent),
    )


def notes_html(notes: Sequence[str]) -> str:
    """Sentences below a table; each is escaped."""
    return "".join(f'<p class="labkit-notes">{escape(note)}</p>' for note in notes)


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str] = ()) -> str:
    """A table; every cell is escaped. The columns in `words` are aligned left."""
    styles = [' style="text-align: left"' if name in words else "" for name in heads]
    head = "".join(f"<th{style}>{escape(name)}</th>" for name, style in zip(heads, styles))
    cells = ["".join(f"<td{style}>{escape(cell)}</td>" for cell, style in zip(row, styles)) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
