"""Pictures of how training processes are started, what a failure costs, and how a job goes on after one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.analysis.theory.failures import PUBLISHED, best_interval, first_order_cost, goodput
from labkit.common.arguments import check_choice
from labkit.common.units import counted
from labkit.course.pictures.canvas import (
    EVERY,
    HIDDEN,
    Arrow,
    Box,
    arrow,
    axis,
    bars,
    box,
    checked,
    ink,
    lane_axis,
    lane_name,
    layout,
    note,
    side_by_side,
    wide_layout,
)
from labkit.figures import colours, rank_colour
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

__all__ = ["PUBLISHED", "best_interval", "first_order_cost", "goodput", "intervals", "recovery", "restart", "torchrun"]

_MOST = 8  # processes that have room
_ROW = 78  # px of a process
_GREY = "rgba(128, 128, 128, 0.9)"  # of arrows


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
        arrows += [arrow((2.9, middle), (4.0, rank), _GREY, 1.4), arrow((7.5, rank), (8.5, rank), _GREY, 1.4)]
        if rank:
            arrows.append(arrow((5.4, rank - 0.64), (5.4, rank - 0.36), _GREY, 1.4, both=True))
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


# ---- failures: what a checkpoint interval costs on clusters, and a restart next to recovery within a step


_MINUTES = [10 ** (exponent / 20) / 10 for exponent in range(81)]  # 6 seconds to 17 hours


@checked
def intervals(saving: float, restart: float, clusters: Sequence[int], rate: str = "llama3") -> go.Figure:
    """Goodput by the minutes between two checkpoints, modelled for `clusters` of so many devices, with the best
    interval of each. A checkpoint takes `saving` seconds, a restart `restart` seconds; failures come at the published
    `rate`."""
    check_choice("rate", rate, PUBLISHED)
    if saving <= 0:
        raise ValueError(f"saving must be more than 0 seconds, got {saving:g}: a free checkpoint has no best interval")
    observed = PUBLISHED[rate]
    traces = []
    for index, count in enumerate(clusters):
        between = observed.between(count)
        values = [100 * goodput(60 * minutes, saving, restart, between) for minutes in _MINUTES]
        best = best_interval(saving, between)
        colour = {"color": colours.rank_colour(index)}
        named = f"{count:,} devices, a failure every {_time(between)}"
        line = {"type": "scatter", "mode": "lines", "x": _MINUTES, "y": values, "line": colour, "name": named}
        line |= {"hovertemplate": "every %{x:.1f} min: %{y:.1f} %<extra></extra>"}
        peak = {"type": "scatter", "mode": "markers", "x": [best / 60], "showlegend": False}
        peak |= {"y": [100 * goodput(best, saving, restart, between)], "marker": colour | {"size": 10}}
        peak |= {"hovertemplate": f"best: every {_time(best)}, goodput %{{y:.1f}} %<extra></extra>"}
        traces += [line, peak]
    subtitle = f"modelled (Daly 2006): {saving:g} s to save, {restart:g} s to restart, failures as of {observed.name}"
    looks = wide_layout("Goodput by checkpoint interval", subtitle, 440) | {
        "xaxis": axis("minutes between two checkpoints") | {"type": "log"},
        "yaxis": axis("goodput, %") | {"range": [0, 101]},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
    looks["margin"] = looks["margin"] | {"l": 60, "t": 104, "b": 50}
    return as_figure(traces, looks)


def _time(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


_SAVE, _FAIL, _END = 2.8, 4.2, 10.0  # where a checkpoint and the failure are in the pictures


@checked
def recovery(replicas: int) -> go.Figure:
    """One replica of up to 6 is killed: first with a restart from the last checkpoint, then with recovery within a
    step. By rule, not to scale."""
    if not 2 <= replicas <= 6:
        raise ValueError(f"replicas must be 2 to 6, got {replicas}")
    victim, boxes = replicas - 1, list[Box]()
    for rank in range(replicas):
        boxes += [Box(rank, 0, _FAIL - 0.04, "forward", "train")]
        boxes += [Box(rank, _FAIL + 0.04, 5.0, "loss", "killed" if rank == victim else "terminated")]
        boxes += [Box(rank, 5.04, 6.0, "batch", "start"), Box(rank, 6.04, 6.9, "all_reduce", "rendezvous")]
        boxes += [Box(rank, 6.94, 6.94 + _FAIL - _SAVE - 0.04, "backward", "computed again")]
        boxes += [Box(rank, 6.94 + _FAIL - _SAVE, _END, "forward", "train")]
    lanes = replicas + 1
    for rank in range(replicas):
        lane = lanes + rank
        if rank != victim:
            words = f"train, mean over {replicas - 1}"
            boxes += [Box(lane, 0, _FAIL - 0.04, "forward", "train"), Box(lane, _FAIL + 0.3, 7.5, "forward", words)]
            boxes += [Box(lane, _FAIL, _FAIL + 0.26, "all_reduce", "", "a new quorum; the step goes on")]
        else:
            boxes += [Box(lane, 0, _FAIL - 0.04, "forward", "train"), Box(lane, _FAIL + 0.04, 5.0, "loss", "killed")]
            boxes += [Box(lane, 5.04, 7.5, "batch", "start")]
        sends = "heal: receives" if rank == victim else "heal: sends" if rank == 0 else "quorum"
        boxes += [Box(lane, 7.54, 8.5, "all_reduce", sends), Box(lane, 8.54, _END, "forward", "train")]
    ranks = range(replicas)
    names = [*map(lane_name, ranks), "", *(lane_name(rank, "replica") for rank in ranks)]
    title = f"A failure among {counted(replicas, 'replica')}"
    looks = wide_layout(title, "by rule, not to scale", 150 + 44 * len(names)) | {
        "annotations": [
            note(0, -0.75, "<b>restart</b>: every rank returns to the last checkpoint", 13, anchor="left"),
            note(0, replicas + 0.2, "<b>recovery within a step</b>: one replica is missing", 13, anchor="left"),
            note(_SAVE, -0.42, "checkpoint ▾", 11),
        ],
        "xaxis": HIDDEN | {"range": [-0.1, _END + 0.05]},
        "yaxis": lane_axis(names, -1.1),
        "shapes": [
            {"type": "line", "x0": _SAVE, "x1": _SAVE, "y0": -0.3, "y1": replicas - 0.6, "line": {"dash": "dot"}}
        ],
        "showlegend": False,
    }
    return as_figure([bars(boxes)], looks)
