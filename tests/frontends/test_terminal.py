"""The terminal view: what it draws of a run, at any width and height."""

from __future__ import annotations

import io

import pytest
from commands import recorded_run
from fabricate import FakeRun
from rich.console import Console
from rich.text import Text

from labkit.common.units import sizes
from labkit.frontends import terminal
from labkit.frontends.terminal import FigureTable
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, Recording


@pytest.fixture
def recorded(runs) -> FakeRun:
    return recorded_run(runs)


def drawn(state, folder, width: int, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=height or 25, force_terminal=True, color_system=None)
    console.print(terminal.view(state, folder, height))
    return console.file.getvalue()


def followed(run: FakeRun):
    follower = Follower(run.folder)
    follower.poll()
    return follower.state


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_view_fits_and_does_not_move(runs, width, device):
    run = FakeRun(runs, nproc=2, steps=12_345, device=device)
    run.start()
    run.step(9)
    first = drawn(followed(run), run.folder, width).splitlines()
    run.step(30)
    second = drawn(followed(run), run.folder, width).splitlines()
    assert all(len(line) <= width for line in first + second)
    table = [line for line in first if line.startswith("rank ")]
    assert table == [line for line in second if line.startswith("rank ")]
    for word in ("rank", "device", "step", "loss", "samples/s", "ms/step", "phases", "memory / peak", "exit"):
        assert word in table[0]
    text = "\n".join(second)
    assert "step 39/12345" in text
    assert ("cuda:1" if device == "cuda" else "cpu") in text
    assert "12.0 / " in text


def test_the_figures_of_a_run_that_is_over_are_whole(recorded):
    state = followed(recorded)
    assert state.over
    seen = " ".join(drawn(state, recorded.folder, 40).split())
    assert all(figure in seen for figure in terminal.line(state).split(" · "))


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_figure_of_a_table_is_cut(width):
    """Where there is no room for all columns, they stand below each other, each time with the first one."""
    heads = ("strategy", *(f"figure {letter}" for letter in "abcdefgh"), "in words")
    table = FigureTable(heads, wrapped=("in words",))
    rows = [(name, *(f"{name}-{number:,}" for number in range(10_000, 10_008)), "some words " * 8) for name in "xyz"]
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("strategy")
    assert all(any(figure in line for line in lines) for _, *figures, _ in rows for figure in figures)
    assert {line.split()[0] for line in lines if "-10,00" in line} == {"x", "y", "z"}


def test_view_shows_no_more_ranks_than_the_screen_holds(runs):
    run = FakeRun(runs, nproc=64)
    run.start()
    text = drawn(followed(run), run.folder, 80, height=24)
    assert "more ranks" in text
    assert len(text.splitlines()) <= 24


def test_first_failure_stands_out_and_says_where_to_read_more(runs):
    run = FakeRun(runs)
    run.start()
    run.step(3)
    run.say(1, "Traceback …\n", "stderr")
    run.writers[1].write(
        "error", type="ValueError", message="bad [red]shape[/red]\x1b]0;title\x07\x1b[2J", traceback=""
    )
    run.status("failed", ended=run.began + 5, failures={"0": {"exit_code": -15, "signal": "SIGTERM"}})
    text = drawn(followed(run), run.folder, 200)
    assert "rank 1 failed first: " in text and "rank 0 was terminated because rank 1 failed" in " ".join(text.split())
    assert "ValueError: bad [red]shape[/red]" in text
    assert "\x1b" not in text


def test_the_log_of_a_failed_rank_is_named_once_and_can_be_copied(runs):
    run = FakeRun(runs)
    run.start()
    run.say(1, "Traceback …\n", "stderr")
    run.writers[1].write("error", type="ValueError", message="bad shape", traceback="")
    run.status("failed", ended=run.began + 5, failures={"1": {"exit_code": 1}})
    console = Console(file=io.StringIO(), width=40)
    terminal.watch(Follower(run.folder), run.folder, console)
    lines = [line for line in console.file.getvalue().splitlines() if "stderr.log" in line]
    assert lines == [f"  stderr of rank 1: {run.logs[1] / 'stderr.log'}"]


def test_live_view_leaves_its_last_picture(recorded):
    console = Console(file=io.StringIO(), width=80, height=25, force_terminal=True, color_system="truecolor")
    state = terminal.watch(Recording(recorded.folder, speed=1000.0), recorded.folder, console)
    assert state.over
    drawn = console.file.getvalue()
    assert "\x1b[?25h" in drawn, "the cursor is shown again"
    assert "step 30/30" in drawn[drawn.rindex("DDP · cnn") :]


def test_phases_fill_the_bar(runs):
    run = FakeRun(runs)
    run.start()
    run.step(5)
    row = next(line for line in drawn(followed(run), run.folder, 120).splitlines() if line.startswith("■ 0"))
    bar = [letter for letter in row if letter in "·░▒▓█"]
    assert len(bar) == 40
    assert bar.count("▒") == pytest.approx(40 * 0.5, abs=2)


def test_run_without_events_can_be_drawn(tmp_path):
    folder = RunFolder(tmp_path / "x")
    follower = Follower(folder)
    follower.poll()
    assert "ready" in drawn(follower.state, folder, 80)
    assert terminal.line(follower.state) == "ready"


@pytest.mark.parametrize(
    ("counts", "words"),
    [((float("nan"),), "–"), ((512.0,), "512 B"), ((5e6, 9e6), "4.8 / 8.6 MiB"), ((2e12,), "1.8 TiB"), ((0.0,), "0 B")],
)
def test_sizes(counts, words):
    assert sizes(*counts) == words
