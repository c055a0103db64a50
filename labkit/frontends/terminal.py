"""The terminal front end: draws a RunState with rich, and shows the same facts as the panel."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from labkit.analysis.changes import Difference
from labkit.analysis.comparison import HEADS, Row, cells, recorded_elsewhere, sentences
from labkit.analysis.diagnose import Finding, findings
from labkit.analysis.foreign import Table as TitledTable
from labkit.analysis.guess import sentences as predicted
from labkit.analysis.ledger import ledger
from labkit.analysis.metrics import (
    efficiency,
    gil_wait,
    phase_seconds,
    rank_throughput,
    replica_figures,
    seconds_left,
    step_seconds,
)
from labkit.analysis.profiled import newest as newest_step
from labkit.analysis.profiled import step_in_words
from labkit.common.text import visible_line, visible_log
from labkit.common.units import counted, sizes
from labkit.course.classroom import page as class_page
from labkit.course.classroom.overview import Overview
from labkit.figures.atlas import EVIDENCE_HEADS
from labkit.figures.charts import timeline
from labkit.figures.colours import PHASES as PHASE_COLOURS
from labkit.figures.colours import rank_colour
from labkit.figures.tables import NO_FINDINGS, Explained, Prediction, Tables
from labkit.frontends.console import Console
from labkit.launch.leases import Ticket, devices, duration
from labkit.record.documents import Summary, UnreadableRun
from labkit.record.folder import RunFolder
from labkit.record.follow import Source, polled
from labkit.record.ranks import RankState
from labkit.record.state import RunState, is_starting, newest_milestone, start_in_words, start_table
from labkit.record.writer import PHASES
from labkit.runs.comparing import Comparing

# ---- what the tables of the terminal have in common

BAR = (8, 40)  # minimum and maximum width of the bar of phases, in characters

_GAP = 2  # characters between two columns
_GLYPHS = dict(zip(PHASES, "·-░▒▓█"))  # distinguish the phases without colours


class PhaseBar:
    """A bar of the fractions of a step spent in each phase, as wide as the column allows."""

    def __init__(self, seconds: Mapping[str, float]):
        self._shares = {phase: value for phase, value in seconds.items() if value > 0}

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(BAR[0], min(BAR[1], options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, total = min(BAR[1], options.max_width), sum(self._shares.values())
        bar, done, at = Text(no_wrap=True), 0.0, 0
        for phase, seconds in self._shares.items():
            done += seconds
            end = round(width * done / total)
            bar.append(_GLYPHS[phase] * (end - at), style=PHASE_COLOURS[phase])
            at = end
        yield bar


class FigureTable:
    """A table in which no figure is cut: where a terminal is too narrow for all columns, they stand in several tables
    below each other, each with the first column. The columns in `words` are aligned left, those in `wrapped` fold."""

    def __init__(self, heads: Sequence[str], words: Container[str] = (), wrapped: Container[str] = ()):
        self._heads, self._wrapped = heads, wrapped
        self._left = [number == 0 or head in words or head in wrapped for number, head in enumerate(heads)]
        self._rows: list[tuple[Sequence[RenderableType], str | None]] = []

    def add_row(self, *row: RenderableType, style: str | None = None) -> None:
        """Adds a row, with a cell for each head."""
        self._rows.append((row, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for columns in self._columns(console, options):
            table = Table(box=None, padding=(0, _GAP, 0, 0))
            for column in columns:
                justify = "left" if self._left[column] else "right"
                table.add_column(self._heads[column], justify=justify, no_wrap=self._heads[column] not in self._wrapped)
            for row, style in self._rows:
                table.add_row(*(row[column] for column in columns), style=style)
            yield table

    def _columns(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """The columns of each table."""
        widths = []
        for column, head in enumerate(self._heads):
            cells = [Text(head), *(row[column] for row, _ in self._rows)]
            measured = [Measurement.get(console, options, cell) for cell in cells]
            folds = head in self._wrapped
            widths.append(max(cell.minimum if folds else cell.maximum for cell in measured) + _GAP)
        tables, left = [[0]], options.max_width - widths[0]
        for column, width in enumerate(widths[1:], 1):
            if width > left and len(tables[-1]) > 1:
                tables.append([0])
                left = options.max_width - widths[0]
            tables[-1].append(column)
            left -= width
        return tables


def phase_legend() -> Text:
    legend = Text(justify="right", style="dim")
    for phase in PHASES:
        legend.append(f" {_GLYPHS[phase] * 2}", style=PHASE_COLOURS[phase])
        legend.append(f" {phase} ")
    return legend


def formatted(value: float | None, form: str) -> str:
    return "–" if not isinstance(value, (int, float)) or math.isnan(value) else format(value, form)


# ---- tables of several runs in the terminal


def runs_table(rows: Sequence[Summary | UnreadableRun]) -> RenderableType:
    """A table of recorded runs from their summaries, newest last, followed by the reasons why some cannot be read."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "state", "workload"):
        table.add_column(name, no_wrap=True, overflow="fold" if name == "run" else "ellipsis")
    for name in ("ranks", "steps", "seconds", "samples/s", "loss", "accuracy"):
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


def class_tables(found: Overview) -> RenderableType:
    """A class: its learners, the runs that have just failed, and what most got wrong."""
    learners = FigureTable(class_page.HEADS, (), ("learner", "newest run"))
    for row in found.rows:
        style = "yellow" if row.trouble else "red" if row.state in ("failed", "lost") else None
        learners.add_row(*(Text(visible_line(cell)) for cell in class_page.cells(row, found)), style=style)
    parts: list[RenderableType] = [Text(f"{class_page.title(found)}, {class_page.about(found)}", style="bold")]
    parts += [learners] if found.rows else [Text(class_page.EMPTY)]
    parts += [Text("\nHands up", style="bold")] if found.hands else []
    for hand in found.hands:
        when = class_page.ago(hand.when, found.at)
        parts.append(Text(f"{hand.learner} ({when}, {hand.run}): {hand.title}", style="red"))
        parts += [Text(f"    Fix: {hand.fix}")] if hand.fix else []
    wrong = [entry for entry in found.asked if entry.wrong]
    asked = FigureTable(class_page.ASKED_HEADS, (), ("exercise or guess", "lab, section"))
    for entry in wrong:
        asked.add_row(*map(Text, class_page.asked_cells(entry)))
    parts += [Text("\nWhat most got wrong", style="bold"), asked] if wrong else []
    parts += [Text("\nGuesses against the measured value", style="bold")] if found.guesses else []
    for group in found.guesses:
        counts = [f"{word}: {len(those)}" for word, those in zip(group.words, group.groups) if those]
        parts.append(Text(f"{group.lab}, {group.what}, measured {group.measured}: {', '.join(counts)}"))
    return Group(*parts)


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
    table = FigureTable(found.heads, words=("in the phase",))
    for row in found.rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    notes = (Text(visible_line(note), style="dim") for note in found.notes)
    return Group(Text(visible_line(found.title)), table, *notes)


def tables_of(found: Tables) -> RenderableType:
    """A title, tables, and the sentences about them."""
    tables = [part for heads, rows in found.tables() for part in (Text(""), _figures(heads, rows))]
    said = [Text(visible_line(sentence)) for sentence in found.sentences]
    return Group(Text(visible_line(found.title)), *tables, *([Text("")] if said else []), *said)


def explanation(found: Explained) -> RenderableType:
    """What some files are, what happened, tables, and what cannot be told."""
    parts: list[RenderableType] = []
    for page in found.pages:
        parts.append(Text(visible_line(page.title), style="bold"))
        parts += [_finding(finding) for finding in page.findings] or [Text(f"\n{NO_FINDINGS}")]
        for table in page.tables:
            parts += _titled(table)
        parts += [Text("")] + [Text(visible_line(note), style="dim") for note in page.notes]
    return Group(*parts)


def _titled(table: TitledTable) -> list[RenderableType]:
    return [Text(f"\n{visible_line(table.title)}", style="bold"), _figures(table.heads, table.rows, table.words)]


def _figures(
    heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = EVIDENCE_HEADS[-1:]
) -> FigureTable:
    """A table whose first column names something and whose other columns are figures, except for `words`, which
    fold."""
    table = FigureTable(heads, wrapped=words)
    for row in rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    return table


def comparison(
    rows: Sequence[Row], left_out: Mapping[str, str], final: bool = True, changed: Difference | None = None
) -> RenderableType:
    """The table of a comparison with bars of the phases, recorded results of the same workload, the sentences about
    them, and what changed between two runs.
    """
    phases = "phases of a step"
    table = FigureTable((*HEADS, phases), wrapped=(HEADS[-1], phases))
    for row in rows:
        style = "red" if row.failed else "dim" if not row.run else None
        table.add_row(*(Text(visible_line(cell)) for cell in cells(row)), PhaseBar(row.phases), style=style)
    for row in recorded_elsewhere(rows):
        table.add_row(*(Text(cell) for cell in (*cells(row)[:-1], "recorded elsewhere")), Text(""), style="dim")
    said: list[RenderableType] = []
    if final:
        said += [Text(f"  {visible_line(sentence)}", style="dim") for sentence in sentences(rows, left_out)]
    if changed:
        said.append(Text(f"\n{visible_line(changed.sentence)}", style="bold"))
        for part in changed.tables:
            said += _titled(part)
    return Group(table, phase_legend(), *said)


# ---- the view of one run in the terminal

_TAIL = 5  # lines of rank 0's output that are shown

_TAIL_BYTES = 8192

_LINES_AROUND = 16  # of the view, without the rows of the ranks

_STYLES = {
    "finished": "bold green",
    "failed": "bold red",
    "stopped": "bold yellow",
    "stopping": "bold yellow",
    "lost": "bold yellow",
}


def line(state: RunState) -> str:
    """Summarises the state in one line: `training · step 120/470 · 0:32 left · 1,650 samples/s · loss 0.4321`."""
    return visible_line(" · ".join(filter(None, [state.words, start_in_words(state), *_figures_of_run(state)])))


def view(state: RunState, folder: RunFolder, height: int | None = None) -> RenderableType:
    """The whole view; with a `height` in lines it shows only as many ranks as fit."""
    rows = state.world_size if height is None else max(2, height - _LINES_AROUND)
    starting = is_starting(state)
    if starting and height is not None:
        rows = max(2, (rows - 3) // 2)  # two tables
    parts = [_head(state, folder), _progress(state), Text(""), _table(state, rows), phase_legend()]
    if starting:
        parts.append(_startup(state, rows))
    parts += [
        Text(visible_line(text), style="dim") for text in (*_replicas(state), *_sampled(state), *predicted(state))
    ]
    parts += [_finding(finding) for finding in findings(state)]
    tail = _tail(folder)
    if tail:
        lines = (Text(f"  {text}", no_wrap=True, overflow="ellipsis") for text in tail)
        parts += [Text("\noutput of rank 0", style="dim"), *lines]
    return Group(*parts)


# ---- the parts of the view


def _head(state: RunState, folder: RunFolder) -> RenderableType:
    spec = state.asked
    device = {"cpu": "CPU ", "cuda": "GPU "}.get(state.spec.device, "")
    ranks = counted(state.world_size, f"{device}rank")
    if spec is None:
        title, batch = f"{Path(state.spec.script or folder.name).name} · {ranks}", state.note
    else:
        title = f"{spec.strategy_row.title} · {spec.workload} on {spec.data} · {spec.precision} · {ranks}"
        batch = "\n".join(filter(None, (spec.batch_sentence, state.note)))
    grid = _grid(1, 0)
    grid.add_row(Text(visible_line(title), style="bold"), Text(visible_line(folder.name), style="dim"))
    return Group(grid, Text(batch, style="dim")) if batch else grid


def _progress(state: RunState) -> RenderableType:
    style = _STYLES.get(state.status.state, "bold cyan")
    # one line each while they change; afterwards as many as they need
    words = Text.assemble("● ", visible_line(state.words), style=style, no_wrap=not state.over, overflow="ellipsis")
    figures = Text(" · ".join(_figures_of_run(state)), no_wrap=not state.over, overflow="ellipsis")
    total = state.total_steps
    if state.over or not total:
        return Group(words, figures)
    grid = _grid(0, 1)
    waits = not state.step  # an indeterminate bar until the first step
    look = {"complete_style": "cyan", "finished_style": "green"}
    grid.add_row(words, ProgressBar(total, min(state.step, total), pulse=waits, **look))
    return Group(grid, figures)


def _figures_of_run(state: RunState) -> list[str]:
    total, left, loss, accuracy = state.total_steps, seconds_left(state), state.loss_at(), state.metric("accuracy")
    speed, *further = efficiency(state, now=True).words or [""]
    figures = []
    if total or state.step:
        figures.append(f"step {state.step}/{total}" if total else f"step {state.step}")
    if left is not None and not state.over:
        figures.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
    if state.over and state.seconds is not None:
        figures.append(f"{state.seconds:.1f} s in total")
    if speed:
        figures.append(speed)
    if loss is not None:
        figures.append(f"loss {loss:.4f}")
    if isinstance(accuracy, (int, float)):
        figures.append(f"accuracy {accuracy:.1%}")
    return figures + further


def _replicas(state: RunState) -> list[str]:
    """One line if replicas run in threads: the time of each replica's forward pass and of waiting for the GIL."""
    found = [
        f"replica {replica.replica} forward {1e3 * replica.forward:.1f} ms ({1e3 * replica.cpu:.1f} CPU)"
        for replica in replica_figures(state)
    ]
    wait = gil_wait(state)
    if found and wait is not None:
        found.append(f"waiting for the GIL or a core {wait:.0%}")
    return [" · ".join(found)] if found else []


def _sampled(state: RunState) -> list[str]:
    """The newest profiled step in one line and, once the run is over, its traffic: measured and expected."""
    if not any(rank.timelines for rank in state.ranks.values()):
        return []
    step = newest_step(state)
    lines = [f"{step_in_words(state, step)}: {timeline(state, step).note}"] if step is not None else []
    if state.over:
        for entry in ledger(state):
            expected = "" if entry.theory is None else f", expected {sizes(entry.theory)}"
            reason = f" ({entry.reason})" if entry.reason else ""
            lines.append(f"{entry.op}: {sizes(entry.measured)} per step over all ranks{expected}{reason}")
    return lines


def _table(state: RunState, rows: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True)
    for name in ("rank", "device"):
        table.add_column(name, no_wrap=True)
    # fixed widths: columns do not shift
    for name, least in (("step", 6), ("loss", 7), ("samples/s", 9), ("ms/step", 7)):
        table.add_column(name, justify="right", no_wrap=True, min_width=least)
    table.add_column("phases", ratio=1, min_width=BAR[0])
    table.add_column("memory / peak", justify="right", no_wrap=True, min_width=16)
    table.add_column("exit", justify="right", no_wrap=True)
    for number in state.listed_ranks[:rows]:
        table.add_row(*_row(state, number))
    hidden = len(state.listed_ranks) - rows
    return Group(table, Text(f"… and {hidden} more ranks", style="dim")) if hidden > 0 else table


def _row(state: RunState, number: int) -> list[RenderableType]:
    rank = state.ranks.get(number) or RankState(number)
    steps, code = rank.steps, state.exit_code(number)
    seconds, phases = step_seconds(state, number, now=True), phase_seconds(state, number, now=True)
    memory = [steps.memory[name][-1] for name in ("allocated", "peak")] if len(steps) else [math.nan] * 2
    if not len(steps) and rank.peak_memory is not None:
        memory[1] = float(rank.peak_memory)
    cells = (
        visible_line(str(rank.device)) if rank.started is not None else "–",
        str(int(steps.step[-1])) if len(steps) else "–",
        formatted(steps.loss[-1] if len(steps) else None, ".4f"),
        formatted(rank_throughput(state, number, now=True), ",.0f"),
        formatted(seconds and 1000 * seconds, ".1f"),
        PhaseBar({phase: duration or 0.0 for phase, duration in phases.items()}),
        sizes(*memory),
        "" if code is None else str(code),
    )
    style = "bold red" if code else ""
    texts = [Text(cell, style=style) if isinstance(cell, str) else cell for cell in cells]
    return [Text(f"■ {number}", style=rank_colour(number)), *texts]


def _startup(state: RunState, rows: int) -> RenderableType:
    """The start-up milestones that each rank has reached, with the seconds since launch."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    head, *ranks = start_table(state)
    for name in head:
        table.add_column(name, justify="right" if name != head[0] else "left")
    for number, *texts in ranks[:rows]:
        table.add_row(Text(f"■ {number}", style=rank_colour(int(number))), *texts)
    return table


def _finding(finding: Finding) -> Text:
    style = "bold red" if finding.kind == "wrong" else "yellow"
    return Text.assemble(
        ("\n", ""),
        (visible_line(finding.title), style),
        (f"\n  Evidence: {visible_line(finding.evidence)}", style),
        f"\n  Cause: {visible_line(finding.cause)}\n  Fix: {visible_line(finding.fix)}",
    )


def _print_logs(state: RunState, folder: RunFolder, console: Console) -> None:
    """Prints where the logs are of the ranks that findings name: each once, in one line that can be copied."""
    ranks = sorted({finding.ranks[0] for finding in findings(state) if finding.ranks})
    for rank in ranks:
        log = folder.log_of(rank, "stderr")
        if log:
            path = log.relative_to(Path.cwd()) if log.is_relative_to(Path.cwd()) else log
            console.print(Text(f"  stderr of rank {rank}: {visible_line(str(path))}", style="dim"), soft_wrap=True)


def _tail(folder: RunFolder) -> list[str]:
    """The last `_TAIL` lines of rank 0's log."""
    path = folder.log_of(0)
    lines = visible_log(folder.end_of(path, _TAIL_BYTES)).expandtabs(4).split("\n") if path else []
    return [line for line in lines if line.strip()][-_TAIL:]


def _grid(*ratios: int) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for ratio in ratios:
        grid.add_column(ratio=ratio or None, no_wrap=True, overflow="ellipsis")
    return grid


# ---- watching a run or a comparison in the terminal

_SECONDS = 0.25  # between two redraws
_PLAIN_SECONDS = 5.0  # between two lines, if the output is not a terminal


def watch(source: Source, folder: RunFolder, console: Console, leave: Callable[[], bool] = lambda: False) -> RunState:
    """Shows a run until it is over and returns its final state; the last view stays on the screen.

    `leave` is called before every redraw; if it returns True, the watch ends early.
    """
    _read(source, console)
    show = _live if console.is_terminal else _plain
    show(source, folder, console, leave)
    return source.state


def _read(source: Source, console: Console) -> None:
    """Reads the events recorded so far, and reports progress if that takes long."""
    status, before = console.status("reading the run"), source.progress
    said = -math.inf

    def say(share: float) -> None:
        nonlocal said
        words = f"reading the run: {share:.0%}"
        if console.is_terminal:
            status.update(words)
            status.start()
        elif time.monotonic() - said >= _PLAIN_SECONDS:
            console.print(words)
            said = time.monotonic()

    source.progress = say
    try:
        source.poll()
    finally:
        status.stop()
        source.progress = before


def _live(source: Source, folder: RunFolder, console: Console, leave: Callable[[], bool]) -> None:
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for state in polled(source, _SECONDS, leave):
            live.update(view(state, folder, height=console.height), refresh=True)
        live.update(view(source.state, folder), refresh=True)
    _print_logs(source.state, folder, console)


def _plain(source: Source, folder: RunFolder, console: Console, leave: Callable[[], bool]) -> None:
    said, since = None, -math.inf
    found: set[str] = set()  # names: while a run hangs, the figures of its finding change
    for state in polled(source, _SECONDS, leave):
        for finding in findings(state):
            if finding.kind == "wrong" and finding.name not in found and not state.over:
                console.print(_finding(finding))
                found.add(finding.name)
        words = state.words, newest_milestone(state)
        if words != said or time.monotonic() - since >= _PLAIN_SECONDS:
            console.print(Text(line(state)), soft_wrap=True)
            said, since = words, time.monotonic()
    console.print(view(source.state, folder))
    _print_logs(source.state, folder, console)


def watch_comparison(comparing: Comparing, console: Console, look: Callable[[], None] = lambda: None) -> Sequence[Row]:
    """Shows a comparison until all its runs are over and returns its final rows; `look` is called before every
    redraw."""
    if not console.is_terminal:
        said: set[str] = set()
        for rows in comparing.watched(_SECONDS):
            look()
            for row in rows:
                if row.over and row.run and row.run not in said:
                    said.add(row.run)
                    words = f"{row.title}: {row.words} · {row.steps} steps · {row.run}"
                    console.print(Text(visible_line(words)), soft_wrap=True)
        console.print(comparison(comparing.rows, comparing.left_out))
        return comparing.rows
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for rows in comparing.watched(_SECONDS):
            look()
            live.update(comparison(rows, comparing.left_out, final=False), refresh=True)
        live.update(comparison(comparing.rows, comparing.left_out), refresh=True)
    return comparing.rows
