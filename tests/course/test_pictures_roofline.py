"""The roofline: its roof, and the points below it."""

from __future__ import annotations

import pytest

from labkit.course.pictures.clusters import ceiling


def test_the_roof_rises_with_the_bandwidth_and_bends_at_the_peak():
    figure = ceiling({"sum": [1 / 12, 1e9], "product": [400.0, 9e10]}, peak=1e11, bandwidth=2e10)
    roof, *points = figure.data
    assert roof.y == pytest.approx([2e10 * roof.x[0], 1e11, 1e11])
    assert roof.x[1] == 5.0 and roof.x[0] < 1 / 12 and roof.x[2] > 400
    assert [(one.name, one.x[0], one.y[0]) for one in points] == [("sum", 1 / 12, 1e9), ("product", 400.0, 9e10)]
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak": 0.0}, "peak must be a number from 1"),
        ({"bandwidth": 0.0}, "bandwidth must be a number from 1"),
        ({"points": {"a": [1.0]}}, "pairs of FLOP per byte and FLOP/s, got 1 numbers for a"),
        ({"points": {"a": [0.0, 1.0]}}, "FLOP per byte of a must be a number from 1e-09"),
        ({"points": {"a": [1.0, 0.0]}}, "FLOP/s of a must be a number from 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        ceiling(**{"points": {"a": [1.0, 2.0]}, "peak": 1e9, "bandwidth": 1e9} | changes)
