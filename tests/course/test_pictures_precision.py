"""The picture of precision: boxes are as high as their numbers have bytes, and follow the policy."""

from __future__ import annotations

from collections import Counter

import pytest

from labkit.course import pictures
from labkit.course.pictures.sharding import BYTES


@pytest.mark.parametrize(("param", "reduce"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp8", "bf16"), ("fp32", "fp32")])
def test_boxes_are_as_high_as_a_number_has_bytes(param, reduce):
    figure = pictures.precision.flow(param, reduce)
    heights = [round(shape.y1 - shape.y0, 6) for shape in figure.layout.shapes]
    unit = min(heights) / min(BYTES[param], BYTES[reduce])
    counted = Counter(round(height / unit) for height in heights)
    # two all-gathers, forward and backward in `param`; the reduce-scatter; sums, and the three things that are stored
    assert counted == Counter([BYTES[param]] * 4 + [BYTES[reduce]] + [4] * 4)
    assert f"param_dtype={param}, reduce_dtype={reduce}" in figure.layout.title.text


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="reduce"):
        pictures.precision.flow(reduce="int4")
