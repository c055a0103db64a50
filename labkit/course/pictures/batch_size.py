"""Pictures of the batch size: squared norms of gradients, the noise scale of a training, steps against samples, and the
time that ranks save. Dots are measured by the caller; lines are formulas of McCandlish et al. 2018."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory.batch_size import fitted, noise_scale, steps
from labkit.course.pictures.canvas import axis, checked, level, wide_layout
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SMOOTH = 0.1  # weight of the newest step in the moving averages of squared norms
_POINTS = 61  # of a curve


@checked
def norms(pairs: Sequence[Sequence[float]]) -> go.Figure:
    """Measured `pairs` of batch and mean squared norm of the gradient, with the two parts that the smallest and the
    largest batch determine."""
    measured = _pairs(pairs)
    (few, high), (many, low) = measured[0], measured[-1]
    noise = (high - low) / (1 / few - 1 / many)
    signal = high - noise / few
    if noise <= 0 or signal <= 0:
        raise ValueError("the squared norms must fall with the batch, and to more than 0: average over more draws")
    x = _range(few, many)
    traces = [
        _line(x, [signal + noise / batch for batch in x], "|G|² + tr Σ / batch", colours.INK),
        _line(x, [noise / batch for batch in x], "noise: tr Σ / batch", colours.rank_colour(1), "dot"),
        _line(x, [signal] * len(x), "signal: |G|²", colours.rank_colour(2), "dot"),
        _dots(measured, "measured", colours.rank_colour(0), "batch %{x}: %{y:.3g}"),
    ]
    looks = _looks("Squared norm of a gradient", f"noise and signal are equal at a batch of {noise / signal:,.0f}")
    return as_figure(traces, looks | {"xaxis": _logarithmic("batch"), "yaxis": _logarithmic("mean of |g|²")})


@checked
def noise(small: Sequence[float], large: Sequence[float], batch: int, ranks: int) -> go.Figure:
    """The noise scale of each step, from the squared norms that ranks have: `small`, of a rank's gradient of `batch`
    samples, and `large`, of the mean over `ranks`. Both are smoothed before they are divided."""
    if len(small) != len(large):
        raise ValueError(f"small and large must have a number per step each, got {len(small)} and {len(large)}")
    if ranks < 2:
        raise ValueError(f"ranks must be 2 to 64, got {ranks}: the mean over one rank is its own gradient")
    averages: list[tuple[float, float]] = []
    for index, norms_of_step in enumerate(zip(small, large)):
        weight = max(_SMOOTH, 1 / (index + 1))
        before = averages[-1] if averages else norms_of_step
        low, high = (old + weight * (new - old) for old, new in zip(before, norms_of_step))
        averages.append((low, high))
    values = [noise_scale(low, high, batch, ranks) for low, high in averages]
    shown = [(step, value) for step, value in enumerate(values, 1) if 0 < value < math.inf]
    trace = _line([step for step, _ in shown], [value for _, value in shown], "noise scale", colours.rank_colour(0))
    total = ranks * batch
    subtitle = f"measured on {ranks} ranks with {batch} samples per step, smoothed"
    looks = _looks("Noise scale while the model trains", subtitle)
    looks |= level(total, "the batch of all ranks")
    looks["annotations"][0]["y"] = math.log10(total)  # other than those of shapes, their places are logarithms
    looks |= {"xaxis": axis("step"), "yaxis": _logarithmic("noise scale, samples"), "showlegend": False}
    return as_figure([trace], looks)


@checked
def hyperbola(pairs: Sequence[Sequence[float]]) -> go.Figure:
    """Measured `pairs` of batch and steps to a loss, as steps by samples, with the fitted hyperbola and its limits."""
    measured = _pairs(pairs)
    least_steps, least_samples = fitted(measured)
    critical = least_samples / least_steps
    batches = _range(measured[0][0] / 2, measured[-1][0] * 2)
    needed = [steps(batch, least_steps, least_samples) for batch in batches]
    samples = [batch * count for batch, count in zip(batches, needed)]
    points = [(batch * count, count) for batch, count in measured]
    dots = _dots(points, "measured", colours.rank_colour(0), "batch %{text}: %{y:,.0f} steps, %{x:,.0f} samples")
    dots |= {"mode": "markers+text", "text": [f"{batch:,g}" for batch, _ in measured], "textposition": "top right"}
    bottom, left = min(needed) * 0.7, min(samples) * 0.7
    colour = colours.rank_colour
    twice = 2 * least_samples, 2 * least_steps
    meeting = _dots([twice], f"critical batch: {critical:,.0f}", colour(3), "twice the least of both")
    meeting["marker"] |= {"size": 14, "symbol": "diamond-open", "line": {"width": 2}}
    floor, wall = [least_steps] * 2, [least_samples] * 2
    traces = [
        _line(samples, needed, "(S / least S − 1) (E / least E − 1) = 1", colours.INK),
        _line([left, max(samples)], floor, f"least steps: {least_steps:,.0f}", colour(1), "dot"),
        _line(wall, [bottom, max(needed)], f"least samples: {least_samples:,.0f}", colour(2), "dot"),
        dots,
        meeting,
    ]
    subtitle = "dots measured, labelled with their batch; line fitted to them"
    looks = _looks("Steps and samples to the same loss", subtitle)
    looks["margin"]["t"] = 128  # the legend may need two lines
    return as_figure(traces, looks | {"xaxis": _logarithmic("samples E"), "yaxis": _logarithmic("steps S")})


@checked
def seconds(pairs: Sequence[Sequence[float]], batch: int, compute: float, transfer: float) -> go.Figure:
    """Modelled time to the loss, and its cost, by the number of ranks, relative to one rank: each computes `batch`
    samples in `compute` seconds, and all gradients take `transfer` seconds over a link, 2 (n − 1) / n of it in a ring.
    The steps are a fit of the measured `pairs` of global batch and steps."""
    least = fitted(_pairs(pairs))
    if compute <= 0:
        raise ValueError(f"compute must be more than 0 seconds, got {compute:g}")
    ranks = [2**power for power in range(11)]
    alone = steps(batch, *least) * compute
    times = [steps(count * batch, *least) * (compute + transfer * 2 * (count - 1) / count) / alone for count in ranks]
    costs = [count * time for count, time in zip(ranks, times)]
    dotted = {"mode": "lines+markers"}
    traces = [
        _line(ranks, [1 / count for count in ranks], "ideal time", colours.INK, "dot"),
        _line(ranks, times, "time", colours.rank_colour(0)) | dotted,
        _line(ranks, costs, "cost: ranks × time", colours.rank_colour(1)) | dotted,
    ]
    subtitle = (
        f"modelled from measured steps: {batch} samples and {compute:g} s per rank, {transfer:g} s for all gradients"
    )
    looks = _looks("Time to the loss, and its cost, relative to one rank", subtitle)
    return as_figure(traces, looks | {"xaxis": _logarithmic("ranks"), "yaxis": _logarithmic("times that of one rank")})


def _pairs(pairs: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The pairs, by batch. Raises `ValueError` if there are no two batches, or a number is not positive."""
    for pair in pairs:
        if len(pair) != 2 or min(pair) <= 0:
            raise ValueError(
                f"pairs must be pairs of two numbers above 0, a batch and a measured value, got {list(pair)}"
            )
    measured = sorted((batch, value) for batch, value in pairs)
    if measured[0][0] == measured[-1][0]:
        raise ValueError(f"pairs must have at least two batches, got {measured[0][0]:g} alone")
    return measured


def _range(first: float, last: float) -> list[float]:
    """Numbers from the first to the last one with equal ratios."""
    return [first * (last / first) ** (index / (_POINTS - 1)) for index in range(_POINTS)]


def _line(x: Sequence[float], y: Sequence[float], name: str, colour: str, dash: str = "solid") -> dict[str, Any]:
    line = {"color": colour, "dash": dash}
    words = "%{x:,.3~g}: %{y:,.3~g}<extra></extra>"
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": name, "line": line, "hovertemplate": words}


def _dots(points: Sequence[tuple[float, float]], name: str, colour: str, words: str) -> dict[str, Any]:
    marks = {"type": "scatter", "mode": "markers", "name": name, "marker": {"color": colour, "size": 9}}
    return marks | {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "hovertemplate": f"{words}<extra></extra>",
    }


def _logarithmic(title: str) -> dict[str, Any]:
    ticks = [digit * 10**power for power in range(-3, 6) for digit in (1, 2, 5)]
    return axis(title) | {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}


def _looks(title: str, subtitle: str) -> dict[str, Any]:
    looks = wide_layout(title, subtitle, 420)
    looks["legend"] = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    looks["margin"] = looks["margin"] | {"l": 70, "t": 104, "b": 50}
    return looks
