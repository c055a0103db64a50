"""Pictures of meshes: the groups of ranks along each axis, the traffic of an axis, and the interconnect that it
uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import permutations
from typing import TYPE_CHECKING

from labkit.course.pictures.canvas import HIDDEN, SCALED, box, checked, ink, layout, note
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from labkit.runs.handle import Run

__all__ = ["by_axis", "grid", "groups", "modelled", "wires"]

_AXES = {
    "pp": "#CC6677",
    "dp": "#88CCEE",
    "fsdp": "#88CCEE",
    "shard": "#88CCEE",
    "replicate": "#DDCC77",
    "tp": "#44AA99",
}
_SHARES = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
}  # traffic in a ring, in units of (n−1)/n of the payload


@checked
def groups(axes: Mapping[str, int], axis: str) -> list[list[int]]:
    """The groups of ranks along an axis of a mesh, in row-major order as in `init_device_mesh`: neighbours differ in
    the last axis.

    >>> groups({"dp": 2, "tp": 2}, "dp")
    [[0, 2], [1, 3]]
    """
    names = list(axes)
    if axis not in names:
        raise ValueError(f"axis must be one of {', '.join(names)}, got {axis!r}")
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    firsts = [rank for rank in range(math.prod(axes.values())) if rank // stride % axes[axis] == 0]
    return [[first + step * stride for step in range(axes[axis])] for first in firsts]


@checked
def grid(axes: Mapping[str, int], per_node: int | None = None) -> go.Figure:
    """The ranks of a mesh, once per axis: ranks with the same colour and letter form a group. A row is a node of
    `per_node` ranks.

    Without `per_node`, a row is one coordinate on the first axis.
    """
    ranks = math.prod(axes.values())
    wide = per_node or ranks // next(iter(axes.values()))
    if ranks % wide:
        raise ValueError(f"per_node must be a divisor of the {ranks} ranks of the mesh, got {wide}")
    shapes, notes = [], []
    for panel, axis in enumerate(axes):
        left = panel * (wide + 1.4)
        groups_of_axis = groups(axes, axis)
        notes.append(
            note(
                left, -0.75, f"<b>{axis}</b>: {_summary(groups_of_axis, wide if per_node else None)}", 12, anchor="left"
            )
        )
        for number, group in enumerate(groups_of_axis):
            colour = colours.rank_colour(number)
            for rank in group:
                x, y = left + rank % wide, rank // wide
                shapes.append(box(x, y, 0.92, 0.88, colour))
                words = f"<b>{rank}</b> {_letter(number)}"
                notes.append(note(x + 0.46, y + 0.44, words, 11, ink(number)))
    rows = ranks // wide
    if per_node:
        notes += [note(-0.15, row + 0.44, f"node {row}", 11, anchor="right") for row in range(rows)]
    title = (
        f"<b>{' × '.join(f'{axis} {size}' for axis, size in axes.items())}</b>  number: rank; letter: group along the"
        " axis"
    )
    right = max(12, len(axes) * (wide + 1.4))
    axes_of = {
        "xaxis": HIDDEN | {"range": [-1.2 if per_node else -0.2, right]},
        "yaxis": HIDDEN | {"range": [rows + 0.1, -1.2]},
    }
    return as_figure(
        [],
        layout(title, 50 + 38 * (rows + 1.3)) | axes_of | {"shapes": shapes, "annotations": notes, "showlegend": False},
    )


@checked
def modelled(
    axes: Mapping[str, int], sent: Mapping[str, float], per_node: int, inside: float, between: float
) -> dict[tuple[str, ...], dict[str, tuple[float, bool]]]:
    """For each order of the axes, outermost first: the communication seconds per step of each axis, and whether it
    spans nodes.

    `sent` is in bytes per rank and step; `inside` and `between` are the bandwidths per rank, in bytes per second,
    within a node of `per_node` ranks and between nodes. An axis uses the slower interconnect if any of its groups spans
    two nodes. Nothing overlaps.
    """
    seconds = {}
    for names in permutations(axes):
        mesh = {name: axes[name] for name in names}
        seconds[names] = {}
        for axis in names:
            leaves = any(len({rank // per_node for rank in group}) > 1 for group in groups(mesh, axis))
            seconds[names][axis] = sent[axis] / (between if leaves else inside), leaves
    return seconds


@checked
def wires(
    axes: Mapping[str, int], sent: Mapping[str, float], per_node: int, inside: float, between: float
) -> go.Figure:
    """The result of `modelled`, with one bar per order of the axes, the fastest on top; traffic between nodes is
    hatched."""
    times = modelled(axes, sent, per_node, inside, between)
    best = sorted(times, key=lambda names: sum(seconds for seconds, _ in times[names].values()))
    lanes = [" × ".join(names) for names in best]
    traces = []
    for axis in axes:
        leaves = [times[names][axis][1] for names in best]
        where = ["between nodes" if is_between else "within a node" for is_between in leaves]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": axis,
                "y": lanes,
                "x": [float(f"{1000 * times[names][axis][0]:.5g}") for names in best],
                "customdata": where,
                "marker": {
                    "color": _AXES.get(axis, colours.OTHER_OPERATION),
                    "pattern": {
                        "shape": ["/" if is_between else "" for is_between in leaves],
                        "fillmode": "overlay",
                        "fgcolor": "#000000",
                        "size": 7,
                    },
                },
                "hovertemplate": f"{axis}: %{{x:.3s}} ms, %{{customdata}}<extra>%{{y}}</extra>",
            }
        )
    title = "<b>Communication per step</b>  modelled: bytes over bandwidth, no overlap · hatched: between nodes"
    order = {"type": "category", "categoryarray": lanes, "range": [len(lanes) - 0.5, -0.5], "automargin": True}
    return as_figure(
        traces,
        layout(title, 110 + 34 * len(lanes))
        | {
            "barmode": "stack",
            "xaxis": SCALED | {"title": {"text": "ms", "standoff": 4}, "rangemode": "tozero"},
            "yaxis": order,
        }
        | {"margin": {"l": 112, "r": 60, "t": 34, "b": 44}, "legend": {"x": 1.01, "y": 1, "title": {"text": "axis"}}},
    )


@checked
def by_axis(run: Run, axes: Mapping[str, int]) -> dict[str, float]:
    """Bytes that rank 0 sent along each axis in the latest profiled step, counted as in a ring.

    Messages between pipeline stages count for the axis pp. Traffic to all ranks, or to a group along no axis, is
    `other`. Raises `ValueError` if the run has no profiled step.
    """
    timeline = run.state.ranks[0].timeline if 0 in run.state.ranks else None
    if timeline is None:
        raise ValueError(f"run {run.name} has no profiled step yet; wait for it with .wait()")
    along = {tuple(group): axis for axis in axes for group in groups(axes, axis)}
    sent = dict.fromkeys(axes, 0.0)
    for call in timeline.comm:
        if call.op == "send":
            axis, bytes_ = "pp", call.bytes or 0
        else:
            ranks = call.ranks or []
            axis, size = along.get(tuple(ranks), "other"), len(ranks) or run.state.world_size
            bytes_ = _SHARES.get(call.op, 0) * (size - 1) / size * (call.bytes or 0)
        if bytes_:
            sent[axis] = sent.get(axis, 0.0) + bytes_
    return sent


def _summary(members: list[list[int]], per_node: int | None) -> str:
    if per_node is None:
        return " · ".join(" ".join(map(str, group)) for group in members[:4]) + (" …" if len(members) > 4 else "")
    leaves = any(len({rank // per_node for rank in group}) > 1 for group in members)
    return f"{len(members)} groups, {'between nodes' if leaves else 'within a node'}"


def _letter(number: int) -> str:
    return chr(ord("a") + number % 26)
