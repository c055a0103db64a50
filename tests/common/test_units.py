"""Formatting of bytes: one function for all front ends, always with significant digits."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from folded import apply
from rich.console import Console

import labkit
from labkit.common.units import scale, size, sizes
from labkit.figures import CHARTS
from labkit.figures.as_plotly import parts
from labkit.figures.as_svg import drawing
from labkit.figures.tables import ranks_html
from labkit.frontends import terminal
from labkit.frontends.panel.charts import Feed
from labkit.record.state import RunState

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALL, LARGE = int(4.6 * MIB), int(1.9 * GIB)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"), (1023, "1023 B"), (KIB, "1.0 KiB"),
        (312 * KIB, "312.0 KiB"), (MIB - 1, "1.0 MiB"), (SMALL, "4.6 MiB"),
        (1023.96 * KIB, "1.0 MiB"), (LARGE, "1.9 GiB"), (-3 * MIB, "-3.0 MiB"), (2**60, "1024.0 PiB"),
        (math.nan, "–"), (math.inf, "–"),
    ],
)  # fmt: skip
def test_a_size_in_words(count, words):
    assert size(count) == words


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((int(4.8 * MIB), int(8.6 * MIB)), "4.8 / 8.6 MiB"),
        ((SMALL, LARGE), "4.6 MiB / 1.9 GiB"),
        ((300 * KIB, 2 * MIB), "300.0 KiB / 2.0 MiB"),
        ((0, 2 * MIB), "0 / 2.0 MiB"),
        ((math.nan, 2 * MIB), "– / 2.0 MiB"),
        ((math.nan, math.nan), "– / –"),
        ((0, 0), "0 / 0 B"),
        ((900,), "900 B"),
    ],
)
def test_sizes_next_to_each_other(counts, words):
    assert sizes(*counts) == words


@pytest.mark.parametrize(
    ("largest", "unit"), [(0, "KiB"), (900 * KIB, "KiB"), (9 * MIB, "MiB"), (GIB, "GiB"), (math.nan, "KiB")]
)
def test_the_unit_of_an_axis(largest, unit):
    each, name = scale(largest)
    assert (name == unit and largest / each < 1024) or math.isnan(largest)


@pytest.fixture
def mixed():
    """Two ranks, with 4.6 MiB and 1.9 GiB."""
    state = RunState()
    apply(state, {"kind": "spec", "spec": {"script": "train.py", "nproc": 2}})
    for rank, peak in enumerate((SMALL, LARGE)):
        apply(state, {"kind": "start", "t": 1.0, "rank": rank, "device": "cpu"})
        add_step(state, rank, 1, peak)
        owners = {"parameters": [peak]}
        curve = {
            "t0": 1.0,
            "seconds": 0.1,
            "phases": [],
            "times": [0.0],
            "owners": owners,
            "peak": peak,
            "at_peak": {"parameters": peak},
        }
        apply(state, {"kind": "memory_step", "t": 2.0, "rank": rank, "step": 1} | curve)
    return state


def add_step(state: RunState, rank: int, step: int, peak: int) -> None:
    memory = {"allocated": peak, "peak": peak}
    apply(
        state, {"kind": "step", "t": 1.0 + step, "rank": rank, "step": step, "seconds": {"step": 0.1}, "memory": memory}
    )


def test_a_small_rank_next_to_a_large_one_is_readable_in_every_front_end(mixed):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(terminal._table(mixed, 2))
    assert "4.6 / 4.6 MiB" in console.file.getvalue() and "1.9 / 1.9 GiB" in console.file.getvalue()
    assert "<td>4.6 MiB</td>" in ranks_html("run", mixed) and "<td>1.9 GiB</td>" in ranks_html("run", mixed)
    for name in ("memory", "memory_by_owner"):
        drawn = CHARTS[name](mixed).drawn()
        assert drawn.chart.y.title == "GiB"
        shown = [words for trace in parts(drawn)[0] for words in trace["text"]]
        assert "4.6 MiB" in shown and "1.9 GiB" in shown
        assert all("%{text}" in trace["hovertemplate"] for trace in parts(drawn)[0])
    assert "rank 0: parameters 4.6 MiB" in drawing(CHARTS["memory_by_owner"](mixed).drawn(), 560, 220)


def test_new_points_of_a_live_chart_come_in_words(mixed):
    feed = Feed({"memory": CHARTS["memory"]})
    (whole,) = feed.message(mixed)["charts"]
    assert whole["whole"]["data"][0]["text"] == ["4.6 MiB"]
    add_step(mixed, 0, 2, 5 * MIB)
    (more,) = feed.message(mixed)["charts"]
    assert [words for *_, words in more["more"]["points"]] == [["5.0 MiB"], ["5.0 MiB"]]


def test_an_axis_of_small_figures_is_in_kib():
    state = RunState()
    apply(state, {"kind": "start", "t": 1.0, "rank": 0, "device": "cpu"})
    add_step(state, 0, 1, 300 * KIB)
    drawn = CHARTS["memory"](state).drawn()
    assert drawn.chart.y.title == "KiB" and drawn.points[0][1] == [300.0]


def test_no_other_place_formats_mib_or_gib():
    own = re.compile(r"""\}\s*[KMG]iB|\d\s*\* ?\d+:?[^"]*[KMG]iB\b""")
    allowed = {"units.py", "data_parallel.py"}  # the axis of a picture, which has a fixed unit
    found = [
        path.name for path in Path(labkit.__file__).parent.rglob("*.py") if own.search(path.read_text(encoding="utf-8"))
    ]
    assert set(found) <= allowed
