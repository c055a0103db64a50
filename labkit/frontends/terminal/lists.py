"""Tables of several runs in the terminal: recorded runs, and a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.analysis.comparison import HEADS, Row, cells, recorded_elsewhere, sentences
from labkit.common.text import visible_line
from labkit.figures.advice import HEADS as ADVICE_HEADS
from labkit.figures.advice import MISFIT_HEADS, Advised
from labkit.figures.prediction import Prediction
from labkit.figures.scaling import Scaled
from labkit.frontends.terminal.parts import PhaseBar, formatted, phase_legend
from labkit.launch.leases import Ticket, devices, duration
from labkit.record.documents import Summary, UnreadableRun


def runs_table(rows: Sequence[Summary | UnreadableRun]) -> RenderableType:
    """A table of recorded runs from their summaries, newest last, followed by the reasons why some cannot be read."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, justify in (
        ("run", "left"),
        ("state", "left"),
        ("workload", "left"),
        ("ranks", "right"),
        ("steps", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True, overflow="fold" if name == "run" else "ellipsis")
    for name in ("seconds", "samples/s", "loss", "accuracy"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if isinstance(row, UnreadableRun):
            table.add_row(*(Text(visible_line(cell)) for cell in (row.run, "unreadable")), style="yellow")
            continue
        what = row.workload or Path(row.script or "").name
        figures = (formatted(row.seconds.total, ".1f"), formatted(row.samples_per_second, ",.0f"))
        figures += (formatted(row.loss, ".4f"), formatted(row.accuracy, ".1%"))
        cells = (row.run, row.state, what, str(row.world_size), str(row.steps), *figures)
        table.add_row(*(Text(visible_line(cell)) for cell in cells), style=None if row.state != "failed" else "red")
    reasons = [f"{row.run} cannot be read: {row.reason}" for row in rows if isinstance(row, UnreadableRun)]
    return Group(table, *(Text(visible_line(reason), style="yellow") for reason in reasons))


def leases_table(found: Sequence[Ticket]) -> RenderableType:
    """The devices that runs of all users hold, and those that wait, with their position in the queue."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("user", "run", "devices", "state", "for"):
        table.add_column(name, no_wrap=True, overflow="fold" if name == "run" else "ellipsis")
    waiting: Counter[str] = Counter()
    for ticket in found:
        state = "running"
        if not ticket.granted:
            waiting[ticket.kind] += 1
            state = f"waits, position {waiting[ticket.kind]}"
        cells = (ticket.user, ticket.run, devices(ticket), state, duration(ticket))
        table.add_row(*(Text(visible_line(cell)) for cell in cells), style=None if ticket.granted else "yellow")
    return table


def prediction_table(found: Prediction) -> RenderableType:
    """The predicted figures, a row for each group of equal ranks, between a title that says how they were made and
    notes."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in found.heads:
        table.add_column(name, justify="left" if name in ("rank", "in the phase") else "right", no_wrap=True)
    for row in found.rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    notes = (Text(visible_line(note), style="dim") for note in found.notes)
    return Group(Text(visible_line(found.title)), table, *notes)


def advice_tables(found: Advised) -> RenderableType:
    """What fits and what does not, and the sentences about them."""
    tables = [(ADVICE_HEADS, found.rows), (MISFIT_HEADS, found.misfits)]
    shown = [part for heads, rows in tables if rows for part in (_figures(heads, rows), Text(""))]
    said = [Text(visible_line(sentence)) for sentence in found.sentences]
    return Group(Text(visible_line(found.title)), Text(""), *shown, *said)


def scaling_tables(found: Scaled) -> RenderableType:
    """Weak and strong scaling."""
    tables = [part for heads, rows in found.tables() for part in (Text(""), _figures(heads, rows))]
    return Group(Text(visible_line(found.title)), *tables)


def _figures(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column names something and whose other columns are figures."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(heads):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    return table


def comparison(rows: Sequence[Row], left_out: Mapping[str, str], final: bool = True) -> RenderableType:
    """The table of a comparison with bars of the phases, recorded results of the same workload, and the sentences about
    them.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, head in enumerate((*HEADS, "phases of a step")):
        is_figure = 0 < number < len(HEADS) - 1
        table.add_column(head, justify="right" if is_figure else "left", no_wrap=number != len(HEADS) - 1)
    for row in rows:
        style = "red" if row.failed else "dim" if not row.run else None
        table.add_row(*(Text(visible_line(cell)) for cell in cells(row)), PhaseBar(row.phases), style=style)
    for row in recorded_elsewhere(rows):
        table.add_row(*(Text(cell) for cell in (*cells(row)[:-1], "recorded elsewhere")), Text(""), style="dim")
    said = [Text(f"  {visible_line(sentence)}", style="dim") for sentence in sentences(rows, left_out)] if final else []
    return Group(table, phase_legend(), *said)
