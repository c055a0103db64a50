"""Pictures of how training processes are started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.common.units import counted
from labkit.course.pictures.canvas import EVERY, HIDDEN, box, checked, ink, layout, note
from labkit.figures import rank_colour
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["torchrun"]

_MOST = 8  # processes that have room
_ROW = 78  # px of a process


@checked
def torchrun(ranks: int) -> go.Figure:
    """What torchrun starts on one machine: a process for each of up to 8 `ranks`, with its numbers, its device, and the
    gradients that the processes exchange."""
    if ranks > _MOST:
        raise ValueError(f"ranks must be at most {_MOST}, got {ranks}")
    middle = (ranks - 1) / 2
    shapes = [box(0, middle - 0.36, 2.9, 0.72, EVERY)]
    words = [
        note(0.12, middle - 0.16, "<b>torchrun</b>", 13, anchor="left"),
        note(0.12, middle + 0.14, f"--nproc-per-node={ranks} train.py", 11, anchor="left"),
    ]
    arrows = []
    for rank in range(ranks):
        shapes += [box(4.0, rank - 0.36, 3.5, 0.72, rank_colour(rank)), box(8.5, rank - 0.36, 1.5, 0.72, EVERY)]
        numbers = f"RANK={rank} · LOCAL_RANK={rank} · WORLD_SIZE={ranks}"
        words += [
            note(4.12, rank - 0.16, "<b>process</b>: all of train.py", 12, ink(rank), "left"),
            note(4.12, rank + 0.14, numbers, 11, ink(rank), "left"),
            note(9.25, rank, f"device {rank}", 12),
        ]
        arrows += [_arrow(2.9, middle, 4.0, rank), _arrow(7.5, rank, 8.5, rank)]
        if rank:
            arrows.append(_arrow(5.4, rank - 0.64, 5.4, rank - 0.36, both=True))
    if ranks > 1:
        words += [note(5.55, rank - 0.5, "gradients", 11, anchor="left") for rank in range(1, ranks)]
    looks = layout(f"torchrun starts one script as {counted(ranks, 'process', 'es')}", 44 + _ROW * ranks) | {
        "shapes": shapes,
        "annotations": words + arrows,
        "xaxis": HIDDEN | {"range": [0, 10]},
        "yaxis": HIDDEN | {"range": [ranks - 0.5, -0.5]},
    }
    return as_figure([], looks)


def _arrow(x0: float, y0: float, x1: float, y1: float, both: bool = False) -> dict[str, Any]:
    """An arrow from one point to another."""
    ends = {"ax": x0, "ay": y0, "axref": "x", "ayref": "y", "x": x1, "y": y1, "text": "", "showarrow": True}
    heads = {"arrowhead": 2, "arrowsize": 1, "arrowwidth": 1.4, "arrowcolor": "rgba(128, 128, 128, 0.9)"}
    return ends | heads | ({"startarrowhead": 2, "arrowside": "end+start"} if both else {})
