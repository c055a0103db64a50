"""Pictures of how training processes are started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.common.units import counted
from labkit.course.pictures.canvas import (
    EVERY,
    HIDDEN,
    Arrow,
    Box,
    box,
    checked,
    ink,
    lane_name,
    layout,
    note,
    side_by_side,
)
from labkit.figures import rank_colour
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["restart", "torchrun"]

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


_WATCHES = "watches its ranks"


@checked
def restart(nodes: int = 1, per_node: int = 2) -> go.Figure:
    """What torchrun's agent, one per node, and its ranks do from the rendezvous on, when the last of up to 8 ranks is
    killed and `max_restarts` allows a restart. By rule, not to scale; agents and ranks exchange numbers and addresses
    through a store at the rendezvous endpoint."""
    ranks = nodes * per_node
    if not 2 <= ranks <= _MOST:
        raise ValueError(f"nodes × per_node must be 2 to {_MOST} ranks, got {nodes} × {per_node}")
    names: list[str] = []
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    for node in range(nodes):
        agent = node * (per_node + 1)
        names.append(f"<b>agent {node}</b> ")
        # the agents of other nodes learn from the store that one waits for a rendezvous
        notices = 5.4 if node == nodes - 1 else 5.5
        boxes += [Box(agent, 0.05, 1.15, "all_reduce", "rendezvous"), Box(agent, 1.2, notices, "batch", _WATCHES)]
        boxes += [Box(agent, notices + 0.05, 6.35, "loss", "ends ranks")]
        boxes += [Box(agent, 6.4, 7.3, "all_reduce", "rendezvous"), Box(agent, 7.35, 10, "batch", _WATCHES)]
        if node:
            arrows += [Arrow(agent - per_node - 1, agent, at, both=True) for at in (0.6, 6.85)]
        for local in range(per_node):
            lane, rank = agent + 1 + local, node * per_node + local
            names.append(lane_name(rank) + " ")
            boxes += [Box(lane, 1.4, 2.2, "update", "start"), Box(lane, 2.25, 3.2, "all_reduce", "init group")]
            boxes += [Box(lane, 3.25, 4.75, "forward", "train")]
            if rank == ranks - 1:
                boxes.append(Box(lane, 4.8, 5.35, "loss", "killed"))
            else:
                boxes += [Box(lane, 4.8, 5.55, "loss", "blocked"), Box(lane, 5.6, 6.4, "loss", "ended")]
            boxes += [Box(lane, 7.4, 7.9, "update", "start"), Box(lane, 7.95, 8.7, "all_reduce", "init group")]
            boxes += [Box(lane, 8.75, 9.4, "backward", "resume"), Box(lane, 9.45, 10, "forward", "train")]
    heads = [(0.6, "<b>① rendezvous</b><br>who takes part"), (2.3, "<b>② start</b><br>RANK, …")]
    heads += [(4.0, "<b>③ train</b><br>"), (5.3, "<b>④ failure</b><br>agent notices")]
    heads += [(6.95, "<b>⑤ rendezvous</b><br>again"), (8.7, "<b>⑥ all start again</b><br>from the checkpoint")]
    title = f"A restart by torchrun: {counted(nodes, 'node')} of {counted(per_node, 'rank')}"
    subtitle = "by rule, not to scale; torchrun restarts processes, the script restores their state"
    return side_by_side(title, subtitle, names, boxes, arrows, heads)


def _arrow(x0: float, y0: float, x1: float, y1: float, both: bool = False) -> dict[str, Any]:
    """An arrow from one point to another."""
    ends = {"ax": x0, "ay": y0, "axref": "x", "ayref": "y", "x": x1, "y": y1, "text": "", "showarrow": True}
    heads = {"arrowhead": 2, "arrowsize": 1, "arrowwidth": 1.4, "arrowcolor": "rgba(128, 128, 128, 0.9)"}
    return ends | heads | ({"startarrowhead": 2, "arrowside": "end+start"} if both else {})
