"""Pictures of precision: in which format the numbers of a step are stored, sent and computed with."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.common.arguments import check_choice
from labkit.course.pictures.canvas import HIDDEN, box, checked, layout, note
from labkit.figures.as_plotly import as_figure
from labkit.figures.colours import INK, ink_on

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["BYTES", "flow"]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # per number
_COLOURS = {"fp32": "#6357CF", "bf16": "#E69F00", "fp16": "#CC79A7", "fp8": "#D55E00"}
_ROWS = ("stored from step to step", "sent between ranks", "computed with")  # from the top down
_WIDTH, _GAP, _UNIT, _ROW = 1.0, 0.5, 0.2, 1.15  # of a box, between boxes, height per byte, between rows


@checked
def flow(param: str = "bf16", reduce: str = "fp32", master: str = "fp32") -> go.Figure:
    """The way of the numbers through one step of FSDP2 with a `MixedPrecisionPolicy`, by rule: the parameters are in
    `master`, gathered and computed with in `param`, and their gradients reduced in `reduce`. A box is as high as one
    number has bytes. Raises `ValueError` for a format that is not in `BYTES`."""
    for name, value in (("param", param), ("reduce", reduce), ("master", master)):
        check_choice(name, value, BYTES)
    stations = (  # row, format, what it is
        (0, master, "shard of<br>parameters"),
        (1, param, "all-gather"),
        (2, param, "forward and<br>activations"),
        (2, "fp32", "sums of a<br>product, loss"),
        (1, param, "all-gather<br>again"),
        (2, param, "backward and<br>gradients"),
        (1, reduce, "reduce-<br>scatter"),
        (0, master, "shard of<br>gradients"),
        (0, master, "moments,<br>update"),
    )
    shapes, notes, middles = [], [], []
    for number, (row, kind, words) in enumerate(stations):
        left, height = number * (_WIDTH + _GAP), _UNIT * BYTES[kind]
        middle = -row * _ROW
        shapes.append(box(left, middle - height / 2, _WIDTH, height, _COLOURS[kind]))
        notes.append(note(left + _WIDTH / 2, middle, f"<b>{kind}</b>", 12, ink_on(_COLOURS[kind])))
        notes.append(note(left + _WIDTH / 2, middle - height / 2 - 0.04, words, 11) | {"yanchor": "top"})
        middles.append((left, middle))
    for (left, middle), (following, next_middle) in pairwise(middles):
        ends = {"ax": left + _WIDTH, "ay": middle, "x": following, "y": next_middle}
        look = {"showarrow": True, "text": "", "arrowhead": 2, "arrowwidth": 1.5, "arrowcolor": INK}
        notes.append(ends | look | {"xref": "x", "yref": "y", "axref": "x", "ayref": "y"})
    for row, words in enumerate(_ROWS):
        notes.append(note(-0.25, -row * _ROW, words.replace(" ", "<br>", 1), 12, anchor="right"))
    title = f"One step of FSDP2, param_dtype={param}, reduce_dtype={reduce}; height: bytes per number"
    looks = layout(title, 400) | {
        "shapes": shapes,
        "annotations": notes,
        "xaxis": HIDDEN | {"range": [-2.0, len(stations) * (_WIDTH + _GAP) - _GAP + 0.2]},
        "yaxis": HIDDEN | {"range": [-2 * _ROW - 0.85, 0.6]},
    }
    return as_figure([], looks)
