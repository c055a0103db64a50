"""Pictures of data parallelism: replicas, gradients, and communication that overlaps backward."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory.formulas import bucket_numbers, theory
from labkit.common.units import counted, size
from labkit.course.pictures import canvas
from labkit.course.pictures.canvas import (
    Arrow,
    Box,
    axis,
    bars,
    checked,
    lane_axis,
    lane_name,
    model_words,
    side_by_side,
    wide_layout,
)
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure, numbers
from labkit.plan.spec import Spec

if TYPE_CHECKING:
    import plotly.graph_objects as go


__all__ = ["average", "buckets", "ddp_step", "divide", "dp_step", "shares", "wires"]

# ---- gradient buckets that are all-reduced during backward


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together: their bytes, the fraction of backward (0 to 1) after which all are ready, and
    their number."""

    bytes: int
    ready: float
    gradients: int = 1


def filled(workload: str, bucket_mb: float, **options: Any) -> list[Bucket]:
    """The buckets of a model's gradients, last layer first, as DDP fills them; 0 MiB is torch's default.

    The backward time of a block is modelled as proportional to its forward cost (`Workload.costs`), and within a block
    to the size of each tensor.
    """
    spec = Spec(workload=workload, options=options)
    costs = spec.workload_row.costs(spec.options)
    gradients = [
        (4 * math.prod(shape), cost * math.prod(shape) / block.size)
        for block, cost in reversed(list(zip(spec.workload_row.blocks(spec.options), costs, strict=True)))
        for shape in reversed(block.parameters)
    ]
    buckets: list[Bucket] = []
    spent = 0.0
    numbers = bucket_numbers((gradient for gradient, _ in gradients), bucket_mb)
    for number, (gradient, cost) in zip(numbers, gradients, strict=True):
        spent += cost
        begun = buckets.pop() if len(buckets) > number else Bucket(0, 0.0, 0)
        buckets.append(Bucket(begun.bytes + gradient, spent / sum(costs), begun.gradients + 1))
    return buckets


def sent(
    in_order: Sequence[Bucket], backward: float, rate: float, latency: float, ranks: int
) -> list[tuple[float, float]]:
    """Start and end of each bucket's all-reduce, in seconds: sequentially, in a ring (Patarasuk and Yuan 2009).

    `backward` is in seconds, `rate` in bytes per second sent by a rank, and `latency` in seconds per round of the
    2(n−1) rounds.
    """
    spans, free = [], 0.0
    for bucket in in_order:
        start = max(free, bucket.ready * backward)
        free = start + 2 * (ranks - 1) * (latency + bucket.bytes / ranks / rate)
        spans.append((start, free))
    return spans


@checked
def buckets(
    workload: str = "gpt",
    bucket_mb: Sequence[float] = (25, 1),
    backward: float = 0.040,
    rate: float = 250e6,
    latency: float = 0.0003,
    ranks: int = 2,
    **options: Any,
) -> go.Figure:
    """Backward, the buckets that the hooks of its gradients fill, and the all-reduces of full ones, for each bucket
    size in MiB: modelled, in milliseconds.

    `backward` is in seconds; `rate` and `latency` are as in `sent`, and `options` are those of the workload, such as
    `size="10M"`.
    """
    boxes, names, ends = [], [], []
    for index, megabytes in enumerate(bucket_mb):
        lane, filling = 3 * index, 0.0
        in_order = filled(workload, megabytes, **options)
        spans = sent(in_order, backward, rate, latency, ranks)
        boxes.append(Box(lane, 0.0, 1000 * backward, "backward", "backward, last layer first"))
        for number, (bucket, (start, end)) in enumerate(zip(in_order, spans), 1):
            full = 1000 * backward * bucket.ready
            gradients = f": the hooks of {counted(bucket.gradients, 'gradient')} fill it"
            boxes.append(Box(lane + 1, filling, full, "batch", str(number), gradients))
            more = f": {size(bucket.bytes)}"
            boxes.append(Box(lane + 2, 1000 * start, 1000 * end, "all_reduce", str(number), more))
            filling = full
        during = sum(max(0.0, min(end, backward) - start) for start, end in spans)
        hidden = during / sum(end - start for start, end in spans)
        summary = f"  {counted(len(in_order), 'bucket')}, {hidden:.0%} overlapped"
        ends.append(canvas.note(1000 * spans[-1][1], lane + 2, summary, 13, anchor="left"))
        names += [f"<b>bucket_mb={megabytes:g}</b> ", "hooks fill bucket ", "all-reduce of bucket "]
    model = model_words(Spec(workload=workload, options=options))
    note = f"{model}; {ranks} ranks, {rate / 1e6:,.0f} MB/s, {1e3 * latency:g} ms per message"
    last = max(box.end for box in boxes)
    looks = wide_layout("Modelled: all-reduces during backward", note, 112 + 38 * len(names)) | {
        "annotations": ends,
        "xaxis": axis("ms") | {"range": [0, 1.25 * last]},
        "yaxis": lane_axis(names, -0.6),
        "margin": {"l": 150, "r": 12, "t": 56, "b": 40},
        "showlegend": False,
    }
    trace = bars(boxes)
    trace["marker"]["line"] = {"width": 1, "color": "#FFFFFF"}
    frames = []
    for moment in range(1, _MOMENTS + 1):
        now = last * moment / _MOMENTS
        lengths = [min(box.end, now) - box.start if box.start < now else None for box in boxes]
        frames.append((f"{now:.3g} ms", [{"x": numbers(lengths)}]))
    return canvas.played([trace], looks, frames)


_MOMENTS = 24  # in which the picture of the buckets is played


# ---- the steps of DP and DDP


@checked
def dp_step(devices: int = 2, workload: str = "cnn") -> go.Figure:
    """One step of `nn.DataParallel`: what each device does, and the five transfers with the bytes to or from device
    0."""
    spec = Spec(strategy="dp", workload=workload, nproc=devices)
    bytes_of = {flow.op: size(flow.theory) for flow in theory(spec)}
    moments = {"scatter": 1.25, "broadcast": 2.3, "gather": 4.35, "gradients": 6.1, "reduce": 8.15}
    boxes = [Box(0, 0.0, 1.1, "batch", f"{spec.global_batch} samples"), Box(0, 5.1, 5.85, "loss", "loss")]
    boxes.append(Box(0, 8.9, 9.8, "update", "update"))
    arrows = []
    for device in range(devices):
        boxes += [Box(device, 3.1, 4.15, "forward", "forward"), Box(device, 6.8, 7.95, "backward", "backward")]
        for op, moment in moments.items() if device else ():
            ends = (device, 0) if op in ("gather", "reduce") else (0, device)
            arrows.append(Arrow(*ends, moment + 0.45 * (device - 1) / max(devices - 2, 1)))
    words = ("① inputs", "② the model", "③ outputs", "④ output gradients", "⑤ gradients")
    sizes = (bytes_of["scatter"], bytes_of["broadcast"], bytes_of["gather"], bytes_of["gather"], bytes_of["reduce"])
    texts = zip(moments.values(), words, sizes)
    heads = [(moment + 0.22, f"<b>{name}</b><br>{bytes_}") for moment, name, bytes_ in texts]
    note = f"{model_words(spec)}, {spec.batch_per_rank} samples per device; bytes by formula"
    names = [lane_name(device, "device") for device in range(devices)]
    return side_by_side(f"A step of DP on {devices} devices", note, names, boxes, arrows, heads)


@checked
def ddp_step(ranks: int = 2, workload: str = "cnn", buckets: int = 3) -> go.Figure:
    """One step of DDP: every rank does the same, and the gradients are all-reduced while backward is still running."""
    spec = Spec(strategy="ddp", workload=workload, nproc=ranks)
    boxes, arrows = [], []
    for rank in range(ranks):
        boxes += [Box(rank, 1.3, 2.2, "batch", f"its {spec.batch_per_rank}"), Box(rank, 2.3, 3.9, "forward", "forward")]
        boxes += [Box(rank, 4.0, 7.4, "backward", "backward"), Box(rank, 8.4, 9.4, "update", "update")]
        if rank:
            arrows.append(Arrow(0, rank, 0.35 + 0.35 * (rank - 1) / max(ranks - 2, 1)))
            arrows += [Arrow(rank - 1, rank, 7.6 - 2.4 * left / buckets, both=True) for left in range(buckets)]
    gradients, *_ = theory(spec)
    heads = [
        (0.55, "<b>once: ① broadcast</b><br>rank 0’s weights"),
        (2.6, "<b>② forward</b><br>local samples and loss"),
        (5.2, "<b>③ backward</b><br>local gradients"),
        (7.4, f"<b>④ all-reduce</b><br>{size(gradients.theory / ranks)} per rank"),
        (8.95, "<b>⑤ update</b><br>identical"),
    ]
    note = f"{model_words(spec)}; bytes by formula, drawn with {buckets} all-reduces per step"
    names = [lane_name(rank) for rank in range(ranks)]
    return side_by_side(f"A step of DDP on {ranks} ranks", note, names, boxes, arrows, heads)


@checked
def wires(most: int = 8, workload: str = "cnn") -> go.Figure:
    """MiB per step over a device's link, in both directions, versus the number of devices: device 0 of DP, and a rank
    of DDP. With NCCL, parameters leave device 0 once and gradients arrive once."""
    counts = list(range(2, most + 1))
    copied, nccl, ddp = [], [], []
    for count in counts:
        flows = {flow.op: flow.theory for flow in theory(Spec(strategy="dp", workload=workload, nproc=count))}
        samples = flows["scatter"] + 2 * flows["gather"]  # the gradients of the outputs are as large as the outputs
        model = flows["broadcast"] + flows["reduce"]
        copied.append(samples + model)
        nccl.append(samples + model / (count - 1))
        reduced = sum(flow.theory for flow in theory(Spec(strategy="ddp", workload=workload, nproc=count)))
        ddp.append(2 * reduced / count)
    lines = [
        _line("DP, device 0, one copy per device", counts, copied, colours.RANKS[5], "solid", "circle"),
        _line("DP, device 0, with NCCL", counts, nccl, colours.RANKS[0], "dash", "square"),
        _line("DDP, every rank", counts, ddp, colours.RANKS[2], "solid", "diamond"),
    ]
    subtitle = f"{model_words(Spec(workload=workload))}; by formula, not measured"
    looks = wide_layout("Traffic per device and step", subtitle, 330) | {
        "xaxis": axis("devices") | {"dtick": 1},
        "yaxis": axis("MiB per step, sent and received") | {"rangemode": "tozero"},
        "margin": {"l": 62, "r": 12, "t": 56, "b": 44},
        "legend": {"x": 0.02, "y": 0.98, "bgcolor": "rgba(0,0,0,0)"},
    }
    return as_figure(lines, looks)


def _line(
    name: str, xs: Sequence[float], bytes_: Sequence[float], colour: str, dash: str, symbol: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(xs),
        "y": numbers(bytes_of_bucket / 2**20 for bytes_of_bucket in bytes_),
        "line": {"color": colour, "width": 2.5, "dash": dash},
        "marker": {"symbol": symbol, "size": 9},
        "hovertemplate": f"{name}: %{{y:.3~g}} MiB on %{{x}} devices<extra></extra>",
    }


# ---- the samples of each rank


@checked
def divide(order: Sequence[int], ranks: int) -> list[list[int]]:
    """The samples of each rank, as `DistributedSampler` divides them: round-robin, padded with the first samples."""
    whole = [order[place % len(order)] for place in range(math.ceil(len(order) / ranks) * ranks)]
    return [whole[rank::ranks] for rank in range(ranks)]


@checked
def shares(
    samples: int = 20, ranks: int = 2, batch: int = 5, epochs: int = 2, sampler: bool = True, set_epoch: bool = True
) -> go.Figure:
    """Which samples each rank gets, by step and epoch. Without a sampler every rank gets all samples, in the same
    order.

    Each sample has a number and a colour, so repeated samples are visible.
    """
    rows, names, notes = [], [], []
    for epoch in range(1, epochs + 1):
        order = random.Random(epoch if set_epoch else 0).sample(range(samples), samples)
        parts = divide(order, ranks) if sampler else [order] * ranks
        rows += parts
        names += [f"epoch {epoch} · {lane_name(rank)} " for rank in range(ranks)]
        notes.append(f"epoch {epoch}: {sum(map(len, parts))} samples, {len(set().union(*parts))} different")
    width = len(rows[0])
    steps = math.ceil(width / batch)
    cells = {
        "type": "heatmap",
        "z": rows,
        "x": list(range(1, width + 1)),
        "y": list(range(len(rows))),
        "texttemplate": "%{z}",
        "textfont": {"size": 13},
        "colorscale": "Cividis",
        "showscale": False,
        "xgap": 1,
        "ygap": 3,
        "hovertemplate": "sample %{z}<extra></extra>",
    }
    borders = [_border("x", place + 0.5) for place in range(batch, width, batch)]
    borders += [_border("y", row - 0.5) for row in range(ranks, len(rows), ranks)]
    middles = [(start + 1 + min(start + batch, width)) / 2 for start in range(0, width, batch)]
    what = "DistributedSampler" if sampler else "No sampler"
    per_step = f"{batch} per rank and step: {counted(steps, 'step')} per epoch"
    title = f"{what}: {samples} samples, {ranks} ranks, {per_step}"
    by_step = {"tickvals": middles, "ticktext": [f"step {step + 1}" for step in range(steps)]}
    by_rank = {"tickvals": list(range(len(rows))), "ticktext": names, "autorange": "reversed"}
    looks = wide_layout(title, " · ".join(notes), 104 + 34 * len(rows)) | {
        "shapes": borders,
        "xaxis": axis("") | by_step | {"showgrid": False},
        "yaxis": axis("") | by_rank | {"showgrid": False},
        "margin": {"l": 144, "r": 12, "t": 56, "b": 28},
    }
    return as_figure([cells], looks)


def _border(axis: str, at: float) -> dict[str, Any]:
    """A line between two steps, or between two epochs."""
    other = "y" if axis == "x" else "x"
    place = {f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return place | {"type": "line", "line": {"color": colours.INK, "width": 3}}


# ---- the average of gradients


@checked
def average(gradients: Sequence[Sequence[float]]) -> go.Figure:
    """The local gradient of each rank, weight by weight, and their average, which every rank has after the
    all-reduce."""
    mean = [math.fsum(column) / len(gradients) for column in zip(*gradients, strict=True)]
    edged = {"color": colours.COMMUNICATION, "line": {"color": colours.INK, "width": 3}}
    bars = [
        _gradient(f"rank {rank}", values, {"color": colours.rank_colour(rank)}) for rank, values in enumerate(gradients)
    ]
    title = "Local gradients, and their average after the all-reduce"
    looks = wide_layout(title, "every rank gets the average", 330) | {
        "barmode": "group",
        "bargap": 0.3,
        "xaxis": {"fixedrange": True, "showgrid": False},
        "yaxis": axis("gradient") | {"zeroline": True, "zerolinecolor": colours.INK},
        "margin": {"l": 62, "r": 12, "t": 56, "b": 34},
    }
    return as_figure([*bars, _gradient("average", mean, edged)], looks)


def _gradient(name: str, values: Sequence[float], marker: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": [f"weight {number}" for number in range(len(values))],
        "y": list(values),
        "text": [f"{value:.3g}" for value in values],
        "textposition": "outside",
        "cliponaxis": False,
        "textfont": {"size": 14},
        "marker": marker,
        "hovertemplate": f"{name}: %{{y:.4g}}<extra>%{{x}}</extra>",
    }
