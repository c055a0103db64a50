"""Gradient buckets that are all-reduced during backward: how DDP fills them, and a model of when each one is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory import bucket_numbers
from labkit.common.units import size
from labkit.course.pictures import canvas
from labkit.course.pictures.checked import checked
from labkit.course.pictures.lanes import Box, axis, bars, lane_axis, layout, model_words
from labkit.figures.as_plotly import as_figure
from labkit.plan.spec import Spec

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together: their bytes, and the fraction of backward (0 to 1) after which all are
    ready."""

    bytes: int
    ready: float


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
    found: list[Bucket] = []
    spent = 0.0
    numbers = bucket_numbers((gradient for gradient, _ in gradients), bucket_mb)
    for number, (gradient, cost) in zip(numbers, gradients, strict=True):
        spent += cost
        earlier = found.pop().bytes if len(found) > number else 0
        found.append(Bucket(earlier + gradient, spent / sum(costs)))
    return found


def sent(
    found: Sequence[Bucket], backward: float, rate: float, latency: float, ranks: int
) -> list[tuple[float, float]]:
    """Start and end of each bucket's all-reduce, in seconds: sequentially, in a ring (Patarasuk and Yuan 2009).

    `backward` is in seconds, `rate` in bytes per second sent by a rank, and `latency` in seconds per round of the
    2(n−1) rounds.
    """
    spans, free = [], 0.0
    for bucket in found:
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
    """Backward and the buckets that are sent meanwhile, for each bucket size in MiB: modelled, in milliseconds.

    `backward` is in seconds; `rate` and `latency` are as in `sent`, and `options` are those of the workload, such as
    `size="10M"`.
    """
    boxes, names, ends = [], [], []
    for lane, each in enumerate(bucket_mb):
        found = filled(workload, each, **options)
        spans = sent(found, backward, rate, latency, ranks)
        boxes.append(Box(2 * lane, 0.0, 1000 * backward, "backward", "backward, last layer first"))
        for number, (bucket, (start, end)) in enumerate(zip(found, spans), 1):
            boxes.append(
                Box(2 * lane + 1, 1000 * start, 1000 * end, "all_reduce", str(number), f": {size(bucket.bytes)}")
            )
        hidden = sum(max(0.0, min(end, backward) - start) for start, end in spans) / sum(
            end - start for start, end in spans
        )
        summary = f"  {len(found)} bucket{'s' if len(found) > 1 else ''}, {hidden:.0%} overlapped"
        ends.append(canvas.note(1000 * spans[-1][1], 2 * lane + 1, summary, 13, anchor="left"))
        names += [f"<b>bucket_mb={each:g}</b> ", "all-reduce "]
    model = model_words(Spec(workload=workload, options=options))
    note = f"{model}; {ranks} ranks, {rate / 1e6:,.0f} MB/s, {1e3 * latency:g} ms per message"
    looks = layout("Modelled: all-reduces during backward", note, 112 + 46 * len(names)) | {
        "annotations": ends,
        "xaxis": axis("ms") | {"range": [0, 1.25 * max(box.end for box in boxes)]},
        "yaxis": lane_axis(names, -0.6),
        "margin": {"l": 112, "r": 12, "t": 56, "b": 40},
        "showlegend": False,
    }
    return as_figure([bars(boxes)], looks)
