"""Watching a run or a comparison in the terminal: live at 4 Hz, or as plain lines if the output is no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rich.live import Live
from rich.text import Text

from labkit.analysis.comparison import Row
from labkit.common.text import visible_line
from labkit.frontends.console import Console
from labkit.frontends.terminal.lists import comparison
from labkit.frontends.terminal.one_run import line, view
from labkit.record.folder import RunFolder
from labkit.record.follow import Source, polled
from labkit.record.startup import newest
from labkit.record.state import RunState
from labkit.runs.comparing import Comparing

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


def _plain(source: Source, folder: RunFolder, console: Console, leave: Callable[[], bool]) -> None:
    said, since = None, -math.inf
    for state in polled(source, _SECONDS, leave):
        words = state.words, newest(state)
        if words != said or time.monotonic() - since >= _PLAIN_SECONDS:
            console.print(Text(line(state)), soft_wrap=True)
            said, since = words, time.monotonic()
    console.print(view(source.state, folder))


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
                    console.print(
                        Text(visible_line(f"{row.title}: {row.words} · {row.steps} steps · {row.run}")), soft_wrap=True
                    )
        console.print(comparison(comparing.rows, comparing.left_out))
        return comparing.rows
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for rows in comparing.watched(_SECONDS):
            look()
            live.update(comparison(rows, comparing.left_out, final=False), refresh=True)
        live.update(comparison(comparing.rows, comparing.left_out), refresh=True)
    return comparing.rows
