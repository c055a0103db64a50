"""Figures: the same data as plotly and as SVG, bounded, with stable axes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from fabricate import FakeRun
from folded import apply

from labkit import figures
from labkit.figures.as_plotly import parts
from labkit.figures.as_svg import drawing
from labkit.figures.model import LIMIT, Axis, Bars, Chart, Line, Marks, ceiling, ticks
from labkit.record.follow import Follower
from labkit.record.state import RunState


@pytest.fixture
def fake(runs):
    """A fabricated run of two CPU ranks and 200 steps, of which 120 are done."""
    run = FakeRun(runs)
    run.start()
    run.step(120)
    yield run
    run.close()


def state_of(run: FakeRun) -> RunState:
    follower = Follower(run.folder)
    follower.poll()
    return follower.state


@pytest.mark.parametrize("name", figures.LIVE)
def test_figure_and_svg_show_the_same_lines(fake, name):
    state = state_of(fake)
    figure = figures.figure(name, state)
    picture = ElementTree.fromstring(figures.svg(name, state))
    words = "".join(picture.itertext())
    for trace in figure.data:
        assert trace.showlegend is False or trace.name in words
    assert figure.layout.yaxis.title.text in words
    assert "script" not in {element.tag.rpartition("}")[2] for element in picture.iter()}


def test_loss_has_a_line_per_rank_in_its_colour_and_the_mean(fake):
    state = state_of(fake)
    *ranks, mean = figures.figure("loss", state).data
    assert [trace.line.color for trace in ranks] == [figures.rank_colour(0), figures.rank_colour(1)]
    expected = [sum(pair) / 2 for pair in zip(*(rank.steps.loss for rank in state.ranks.values()))]
    assert mean.y == pytest.approx(expected, rel=1e-5)


def test_throughput_counts_every_rank_once(fake):
    (line,) = figures.figure("throughput", state_of(fake)).data
    assert line.y[-1] == pytest.approx(2 * 128 / 0.05)


def test_memory_is_in_the_unit_that_its_axis_says(fake):
    figure = figures.figure("memory", state_of(fake))
    assert figure.layout.yaxis.title.text == "MiB"
    assert "live tensors" in figure.layout.title.text
    assert {trace.name: trace.y[-1] for trace in figure.data}["rank 1"] == pytest.approx(13)
    assert figure.data[0].x[0] == pytest.approx(1.05)


def test_memory_on_cuda_shows_the_whole_device(runs):
    run = FakeRun(runs, device="cuda")
    run.start()
    run.step(3)
    run.system.write("system", gpus=[{"index": index, "memory_used": (index + 2) << 30} for index in range(2)])
    run.close()
    figure = figures.figure("memory", state_of(run))
    by_name = {trace.name: trace for trace in figure.data}
    assert figure.layout.title.text.startswith("<b>Memory per GPU")
    assert figure.layout.yaxis.title.text == "GiB"
    assert by_name["device of rank 1"].y == (3.0,)
    assert by_name["device of rank 1"].line.color == figures.rank_colour(1)


def test_phases_add_up_to_the_step(fake):
    figure = figures.figure("phases", state_of(fake))
    assert [trace.name for trace in figure.data] == ["data", "forward", "backward", "optimizer", "other"]
    assert sum(trace.y[0] for trace in figure.data) == pytest.approx(0.98 * 50)
    assert figure.layout.barmode == "stack"


def test_a_long_run_stays_small_and_keeps_its_spike():
    losses = [1.0] * 100_000
    losses[77_777] = 9.0
    line = Line("rank0", "rank 0", list(range(100_000)), losses, keep="extremes")
    xs, ys = line.points()
    assert len(xs) <= LIMIT
    assert ys[xs.index(77_777)] == 9.0
    assert xs[-1] > 99_000


def test_values_that_are_not_known_are_gaps():
    _, ys = Line("a", "a", [1, 2, 3], [0.5, math.nan, math.inf]).points()
    assert ys == [0.5, None, None]


def test_a_rank_that_starts_anew_breaks_its_line():
    xs, ys = Line("a", "a", [1, 2, 3, 2, 3], [5, 4, 3, 4, 3]).points()
    assert (xs, ys) == ([1, 2, 3, 2, 2, 3], [5, 4, 3, None, 4, 3])


def test_axes_know_their_end_and_grow_in_steps(fake):
    state = state_of(fake)
    assert figures.figure("loss", state).layout.xaxis.range == (0, 200)
    axis = Axis("y")
    spans = {axis.span(0, value / 10)[1] for value in range(1, 1000)}
    assert len(spans) < 25
    assert axis.span(-0.3, 5) == (-0.3, 5)
    assert axis.span(-1.1, 5) == (-1.5, 5)


def test_the_axis_of_steps_grows_with_the_run_and_ignores_a_guess():
    axis = Axis("step", end=100_000, least=10, grows=True)
    assert [axis.span(0, step)[1] for step in (1, 202, 90_000, 100_000)] == [10, 500, 100_000, 100_000]
    run = Line("rank0", "rank 0", [1.0, 2.0], [3.0, 2.0])
    guess = Line("guess", "yours", [0.0, 100_000.0], [5.0, 5.0], is_level=True)
    drawn = Chart("loss", "Loss", axis, Axis("loss"), (run, guess)).drawn()
    assert (drawn.x.high, drawn.y.high) == (2.0, 5.0)


def test_round_numbers():
    assert ceiling(0) == 0
    assert [ceiling(value) for value in (0.011, 1, 1.01, 2.3, 99, 101)] == pytest.approx([0.015, 1, 1.5, 2.5, 100, 150])
    assert ticks(0, 2.5) == pytest.approx([0, 1, 2])


@pytest.mark.parametrize("name", figures.LIVE)
def test_a_run_of_which_nothing_is_known_yet_has_pictures(name):
    assert figures.figure(name, RunState()).data is not None
    assert figures.svg(name, RunState()).startswith("<svg")


def test_svg_escapes_what_it_is_given(fake):
    from dataclasses import replace

    from labkit.figures.as_svg import drawing

    drawn = figures.chart("loss", state_of(fake)).drawn()
    chart = replace(drawn.chart, title="<script>alert(1)</script>", note='"&<b>')
    text = drawing(replace(drawn, chart=chart), 400, 200)
    assert "<script>" not in text
    ElementTree.fromstring(text)


def test_the_overview_has_every_chart(fake):
    figure = figures.overview(state_of(fake))
    assert len(figure.layout.annotations) == len(figures.LIVE)
    assert len(figure.data) == sum(len(figures.figure(name, state_of(fake)).data) for name in figures.LIVE)
    assert len(figure.to_json()) < 200_000


DISPLAYED = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from labkit import pictures
shell = InteractiveShell.instance()
figure = pictures.data_parallel.ddp_step(ranks=2)
with capture_output() as shown:
    shell.display_formatter.format(figure)
assert ("plotly.io._renderers" in sys.modules) == (sys.argv[1] != "plotly_mimetype")
import plotly.graph_objects as go
import plotly.io
if len(sys.argv) > 2:
    plotly.io.renderers.default = sys.argv[2]
    with capture_output() as shown:
        shell.display_formatter.format(figure)
with capture_output() as by_plotly:
    shell.display_formatter.format(go.Figure(figure))
print(*sorted({kind for output in shown.outputs for kind in output.data}))
assert [output.data for output in shown.outputs] == [output.data for output in by_plotly.outputs]
"""


@pytest.mark.parametrize(
    ("renderers", "kind"),
    [
        (["plotly_mimetype"], "application/vnd.plotly.v1+json"),
        (["json"], "application/json"),
        (["plotly_mimetype", "json"], "application/json"),  # chosen later, by the script
    ],
)
def test_a_figure_is_displayed_as_by_plotly_with_fewer_imports(renderers, kind):
    environment = os.environ | {"PLOTLY_RENDERER": renderers[0]}
    argv = [sys.executable, "-c", DISPLAYED, *renderers]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [kind], done.stderr


def test_an_unknown_figure_names_those_there_are():
    with pytest.raises(LookupError, match="loss, throughput, memory, phases"):
        figures.figure("gpu", RunState())


def test_figures_load_neither_widgets_nor_launch_nor_plotly():
    code = (
        "import sys, labkit.figures; print([m for m in ('ipywidgets', 'plotly', 'labkit.launch', 'torch') if m in"
        " sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_attempts_are_lines_of_their_own():
    state = RunState()
    for attempt, steps in ((0, (1, 2, 3)), (1, (3, 4))):
        apply(state, {"kind": "start", "t": 0.0, "rank": 0, "attempt": attempt})
        for step in steps:
            apply(state, {"kind": "step", "t": float(step), "rank": 0, "step": step, "loss": attempt + step / 10})
    broken, newest = figures.chart("loss", state).lines
    assert (list(broken.x[0:3]), list(newest.x[0:2])) == ([1, 2, 3], [3, 4])
    assert list(newest.y[0:2]) == [1.3, 1.4]
    assert (broken.dash, broken.in_legend, newest.dash, newest.name) == ("dot", False, "solid", "rank 0, attempt 1")


def test_every_further_optimizer_has_a_line_at_its_own_steps():
    state = RunState()
    for rank in (0, 1):
        for number, name, sets_pace in ((0, "optD", True), (1, "optG", False)):
            apply(
                state,
                {
                    "kind": "optimizer",
                    "t": 0.0,
                    "rank": rank,
                    "optimizer": number,
                    "name": name,
                    "sets_pace": sets_pace,
                },
            )
        for step in (1, 2, 3, 4):  # the generator steps once for two steps of the critic
            apply(state, {"kind": "step", "t": float(step), "rank": rank, "step": step, "loss": 10.0 + step})
            if step % 2 == 0:
                apply(
                    state,
                    {"kind": "losses", "t": float(step), "rank": rank, "optimizer": 1, "points": [[step, step + rank]]},
                )
    lines = {line.name: line for line in figures.chart("loss", state).lines}
    assert list(lines) == ["rank 0, optD", "rank 1, optD", "mean, optD", "mean, optG"]
    assert lines["mean, optD"].points() == ([1, 2, 3, 4], [11, 12, 13, 14])
    assert lines["mean, optG"].points() == ([2, 4], [2.5, 4.5])
    assert lines["mean, optG"].dash != lines["mean, optD"].dash
    assert "optG" in figures.svg("loss", state) and state.broken == 0
    apply(state, {"kind": "losses", "t": 5.0, "rank": 0, "optimizer": 1, "points": [[6, None]]})
    assert figures.chart("loss", state).lines[-1].points() == ([2, 4], [2.5, 4.5])  # as far as all ranks have come


@pytest.mark.parametrize(("level", "end"), [(15.0, 20.0), (500.0, 15.0)])
def test_a_mark_far_above_the_bars_stands_at_the_edge_with_its_number(level, end):
    x, y = Axis("", categories=("rank 0", "rank 1")), Axis("ms per step")
    chart = Chart("phases", "Phases", x, y, (), (Bars("forward", "#000000", (10.0, 8.0)),))
    drawn = replace(chart, marks=(Marks("guess", "#E6007A", (level, None)),)).drawn()
    assert drawn.y_span == (0.0, end) and 10 < drawn.height_of(level) < end
    data, layout = parts(drawn)
    assert data[-1]["text"] == [f"{level:g} ms"]
    assert layout["annotations"][0]["text"] == ("guess ↑ 500 ms" if level == 500 else "guess")
    assert ("↑ 500 ms" in drawing(drawn, 560, 220)) == (level == 500)


def test_a_mark_comes_back_from_the_edge_when_the_bars_have_grown():
    x, y, mark = Axis("", categories=("rank 0",)), Axis("ms"), (Marks("guess", "#E6007A", (50.0,)),)
    low, high = (
        Chart("phases", "Phases", x, y, (), (Bars("forward", "#000000", (top,)),), marks=mark) for top in (10.0, 40.0)
    )
    assert low.signature != high.signature, "a page that continued the chart would leave the mark at the edge"
    assert high.drawn().height_of(50.0) == 50.0
