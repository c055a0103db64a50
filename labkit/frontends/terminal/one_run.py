"""The view of one run in the terminal: its state, the figures of each rank, findings, and the output of rank 0."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from labkit.analysis.diagnose import Finding, findings
from labkit.analysis.efficiency import efficiency
from labkit.analysis.guess import sentences as predicted
from labkit.analysis.ledger import ledger
from labkit.analysis.metrics import (
    gil_wait,
    phase_seconds,
    rank_throughput,
    replica_figures,
    seconds_left,
    step_seconds,
)
from labkit.common.text import visible_line, visible_log
from labkit.common.units import sizes
from labkit.figures.colours import rank_colour
from labkit.figures.profiled import timeline
from labkit.frontends.terminal.parts import BAR, PhaseBar, formatted, phase_legend
from labkit.record.folder import RunFolder
from labkit.record.ranks import RankState
from labkit.record.startup import in_words, is_starting
from labkit.record.startup import table as startup_rows
from labkit.record.state import RunState

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
    return visible_line(" · ".join(filter(None, [state.words, in_words(state), *_figures(state)])))


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
    parts += [_finding(finding, folder) for finding in findings(state)]
    tail = _tail(folder)
    if tail:
        lines = (Text(f"  {text}", no_wrap=True, overflow="ellipsis") for text in tail)
        parts += [Text("\noutput of rank 0", style="dim"), *lines]
    return Group(*parts)


# ---- the parts of the view


def _head(state: RunState, folder: RunFolder) -> RenderableType:
    spec = state.asked
    device = {"cpu": "CPU ", "cuda": "GPU "}.get(state.spec.device, "")
    ranks = f"{state.world_size} {device}rank{'s' if state.world_size > 1 else ''}"
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
    words = Text.assemble("● ", visible_line(state.words), style=style, no_wrap=True, overflow="ellipsis")
    figures = Text(" · ".join(_figures(state)), no_wrap=True, overflow="ellipsis")
    total = state.total_steps
    if state.over or not total:
        return Group(words, figures)
    grid = _grid(0, 1)
    waits = not state.step  # an indeterminate bar until the first step
    grid.add_row(
        words,
        ProgressBar(
            total=total, completed=min(state.step, total), pulse=waits, complete_style="cyan", finished_style="green"
        ),
    )
    return Group(grid, figures)


def _figures(state: RunState) -> list[str]:
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
        f"replica {one.replica} forward {1e3 * one.forward:.1f} ms ({1e3 * one.cpu:.1f} CPU)"
        for one in replica_figures(state)
    ]
    wait = gil_wait(state)
    if found and wait is not None:
        found.append(f"waiting for the GIL or a core {wait:.0%}")
    return [" · ".join(found)] if found else []


def _sampled(state: RunState) -> list[str]:
    """The newest profiled step in one line and, once the run is over, its traffic: measured and expected."""
    if not any(rank.timelines for rank in state.ranks.values()):
        return []
    chart = timeline(state)
    lines = [f"profiled {chart.title.lower()}: {chart.note}"]
    if state.over:
        for one in ledger(state):
            expected = "" if one.theory is None else f", expected {sizes(one.theory)}"
            reason = f" ({one.reason})" if one.reason else ""
            lines.append(f"{one.op}: {sizes(one.measured)} per step over all ranks{expected}{reason}")
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
    for number in range(min(rows, state.world_size)):
        table.add_row(*_row(state, number))
    hidden = state.world_size - rows
    return Group(table, Text(f"… and {hidden} more ranks", style="dim")) if hidden > 0 else table


def _row(state: RunState, number: int) -> list[RenderableType]:
    rank = state.ranks.get(number) or RankState(number)
    steps, code = rank.steps, state.exit_code(number)
    seconds, phases = step_seconds(state, number, now=True), phase_seconds(state, number, now=True)
    memory = [steps.memory[name][-1] if len(steps) else math.nan for name in ("allocated", "peak")]
    cells = (
        visible_line(str(rank.device)) if rank.started else "–",
        str(int(steps.step[-1])) if len(steps) else "–",
        formatted(steps.loss[-1] if len(steps) else None, ".4f"),
        formatted(rank_throughput(state, number, now=True), ",.0f"),
        formatted(seconds and 1000 * seconds, ".1f"),
        PhaseBar({phase: each or 0.0 for phase, each in phases.items()}),
        sizes(*memory),
        "" if code is None else str(code),
    )
    style = "bold red" if code else ""
    texts = [Text(cell, style=style) if isinstance(cell, str) else cell for cell in cells]
    return [Text(f"■ {number}", style=rank_colour(number)), *texts]


def _startup(state: RunState, rows: int) -> RenderableType:
    """The start-up milestones that each rank has reached, with the seconds since launch."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    head, *ranks = startup_rows(state)
    for name in head:
        table.add_column(name, justify="right" if name != head[0] else "left")
    for number, *texts in ranks[:rows]:
        table.add_row(Text(f"■ {number}", style=rank_colour(int(number))), *texts)
    return table


def _finding(finding: Finding, folder: RunFolder) -> RenderableType:
    style = "bold red" if finding.kind == "wrong" else "yellow"
    text = Text.assemble(
        ("\n", ""),
        (visible_line(finding.title), style),
        (f"\n  Evidence: {visible_line(finding.evidence)}", style),
        f"\n  Cause: {visible_line(finding.cause)}\n  Fix: {visible_line(finding.fix)}",
    )
    log = folder.log_of(finding.ranks[0], "stderr") if finding.ranks else None
    if log:
        path = log.relative_to(Path.cwd()) if log.is_relative_to(Path.cwd()) else log
        text.append(f"\n  {visible_line(str(path))}", style="dim")
    return text


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
