"""Pictures of failures: what a checkpoint interval costs on clusters, and a restart next to recovery within a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.analysis.theory.failures import PUBLISHED, best_interval, first_order_cost, goodput
from labkit.common.arguments import check_choice
from labkit.common.units import counted
from labkit.course.pictures.canvas import Box, axis, bars, checked, lane_axis, lane_name, note, wide_layout
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

__all__ = ["PUBLISHED", "best_interval", "first_order_cost", "goodput", "intervals", "recovery"]

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
        peak = {"type": "scatter", "mode": "markers", "x": [best / 60], "showlegend": False}
        peak |= {"y": [100 * goodput(best, saving, restart, between)], "marker": colour | {"size": 10}}
        words = f"best: every {_time(best)}, goodput %{{y:.1f}} %<extra></extra>"
        traces += [line | {"hovertemplate": "every %{x:.1f} min: %{y:.1f} %<extra></extra>"}]
        traces += [peak | {"hovertemplate": words}]
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
    names = [
        *(lane_name(rank) for rank in range(replicas)),
        "",
        *(lane_name(rank, "replica") for rank in range(replicas)),
    ]
    title = f"A failure among {counted(replicas, 'replica')}"
    looks = wide_layout(title, "by rule, not to scale", 150 + 44 * len(names)) | {
        "annotations": [
            note(0, -0.75, "<b>restart</b>: every rank returns to the last checkpoint", 13, anchor="left"),
            note(0, replicas + 0.2, "<b>recovery within a step</b>: one replica is missing", 13, anchor="left"),
            note(_SAVE, -0.42, "checkpoint ▾", 11),
        ],
        "xaxis": {"visible": False, "range": [-0.1, _END + 0.05], "fixedrange": True},
        "yaxis": lane_axis(names, -1.1),
        "shapes": [
            {"type": "line", "x0": _SAVE, "x1": _SAVE, "y0": -0.3, "y1": replicas - 0.6, "line": {"dash": "dot"}},
        ],
        "showlegend": False,
    }
    return as_figure([bars(boxes)], looks)
