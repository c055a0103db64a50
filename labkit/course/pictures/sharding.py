"""Pictures of sharded states: what each rank stores, gathers and frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory.formulas import RECIPES
from labkit.common.arguments import check_choice
from labkit.common.units import counted
from labkit.course.pictures.canvas import HIDDEN, SCALED, arrow, box, checked, layout, level, note
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.figures.colours import INK, OPERATIONS, OWNERS, PHASES, ink_on
from labkit.prediction.scale.layouts import SHARDINGS

if TYPE_CHECKING:
    import plotly.graph_objects as go


# ---- A step of FSDP


_UNSCALED = {"showgrid": False, "zeroline": False}  # an axis of names
TITLE = {"x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 8}, "font": {"size": 13}}


@dataclass(frozen=True)
class Turn:
    """A unit's turn in forward or backward. Times are in the unit of the model; None if the operation does not
    happen."""

    unit: int
    phase: str
    gather: tuple[float, float] | None
    compute: tuple[float, float]
    scatter: tuple[float, float] | None


GATHER, FORWARD, BACKWARD, SCATTER = 1.0, 2.0, 4.0, 1.0  # modelled durations for one unit


@checked
def turns(units: int, reshard: bool = True, prefetch: int = 1) -> list[Turn]:
    """A model of an FSDP step with two streams: units are gathered sequentially, `prefetch` of them in advance.

    An all-gather starts when the turn `prefetch` + 1 before its own is over, but not before its unit has been freed. A
    reduce-scatter starts when the backward of its unit is over.
    """
    order = [(unit, "forward") for unit in range(units)] + [(unit, "backward") for unit in reversed(range(units))]
    done: list[Turn] = []
    gathered = scattered = 0.0
    for number, (unit, phase) in enumerate(order):
        computed, earlier = (
            done[back].compute[1] if back >= 0 else 0.0 for back in (number - 1, number - 1 - prefetch)
        )
        gather = scatter = None
        if phase == "forward" or reshard:
            freed = max((turn.compute[1] for turn in done if turn.unit == unit), default=0.0)
            start = max(gathered, earlier, freed)
            gather = start, start + GATHER
            gathered = gather[1]
        begin = max(computed, gathered)
        compute = begin, begin + (FORWARD if phase == "forward" else BACKWARD)
        if phase == "backward":
            start = max(scattered, compute[1])
            scatter = start, start + SCATTER
            scattered = scatter[1]
        done.append(Turn(unit, phase, gather, compute, scatter))
    return done


@checked
def whole(step: Sequence[Turn], reshard: bool = True) -> list[tuple[int, float, float]]:
    """The intervals in which a unit's parameters are whole on a rank: (unit, start, end)."""
    last = {turn.unit: turn.compute[1] for turn in step}
    return [
        (turn.unit, turn.gather[0], turn.compute[1] if reshard else last[turn.unit]) for turn in step if turn.gather
    ]


@checked
def gather_compute_drop(units: int = 6, ranks: int = 4, reshard: bool = True, prefetch: int = 1) -> go.Figure:
    """A modelled FSDP step on one rank: communication and computation, which units are whole, and the parameters in
    memory.

    All units have the same size. `reshard=False` keeps parameters from forward to backward; `prefetch` units are
    gathered in advance. Raises `ValueError` if a number is too small.
    """
    step = turns(units, reshard, prefetch)
    held = whole(step, reshard)
    end = max(turn.scatter[1] for turn in step if turn.scatter)
    times, gathered = _gathered(held, units, end)
    most = 1 / ranks + max(gathered)
    curves = [_area("own shards", OWNERS["parameters"], times, [1 / ranks] * len(times))]
    curves.append(_area("gathered", OPERATIONS["all_gather"], times, gathered))
    lanes = ["all-gather", "compute", "reduce-scatter", *(f"unit {unit + 1}" for unit in range(units))]
    title = f"An FSDP step on one of {ranks} ranks: at most {most:.0%} of the parameters in memory (modelled)"
    time = f"time (per unit: all-gather {GATHER:g}, forward {FORWARD:g}, backward {BACKWARD:g})"
    names = _UNSCALED | {"tickvals": [*range(len(lanes))], "ticktext": lanes, "range": [len(lanes) - 0.5, -0.5]}
    memory = SCALED | {"title": {"text": "parameters in memory"}, "tickformat": ".0%"}
    looks = plain_look(12) | {
        "title": {"text": title, **TITLE},
        "barmode": "overlay",
        "height": 300 + 30 * (3 + units),
        "xaxis": SCALED | {"title": {"text": time}, "range": [0, end], "anchor": "y2"},
        "yaxis": names | {"domain": [0.38, 1]},
        "yaxis2": memory | {"range": [0, max(1.25, 1.1 * most)], "domain": [0, 0.3]},
        "legend": {"orientation": "h", "y": -0.17, "x": 0, "traceorder": "normal"},
        "margin": {"l": 100, "r": 10, "t": 34, "b": 70},
    }
    return as_figure(
        _lanes(step, held, units, ranks, end) + curves, looks | level(1, "all parameters, as in DDP", "y2")
    )


def _lanes(
    step: Sequence[Turn], held: Sequence[tuple[int, float, float]], units: int, ranks: int, end: float
) -> list[dict[str, Any]]:
    """The bars: communication, computation, and below them one lane per unit, which always contains its shard."""
    gathers = [(0, turn.unit, *turn.gather) for turn in step if turn.gather]
    forwards, backwards = (
        [(1, turn.unit, *turn.compute) for turn in step if turn.phase == phase] for phase in ("forward", "backward")
    )
    scatters = [(2, turn.unit, *turn.scatter) for turn in step if turn.scatter]
    gathered = [(3 + unit, unit, start, stop) for unit, start, stop in held]
    shards = [(3 + unit, unit, 0.0, end) for unit in range(units)]
    quiet = {"showlegend": False, "textposition": "none"}
    return [
        _spans("all-gather", OPERATIONS["all_gather"], gathers),
        _spans("forward", PHASES["forward"], forwards),
        _spans("backward", PHASES["backward"], backwards),
        _spans("reduce-scatter", OPERATIONS["reduce_scatter"], scatters),
        _spans("gathered", OPERATIONS["all_gather"], gathered) | quiet,
        _spans("own shard", OWNERS["parameters"], shards) | quiet | {"width": 0.8 / ranks},
    ]


def _area(name: str, colour: str, times: Sequence[float], shares: Sequence[float]) -> dict[str, Any]:
    """One component of the memory over time; the components are stacked."""
    look = {"stackgroup": "held", "fillcolor": colour, "line": {"shape": "hv", "color": colour, "width": 0.5}}
    words = {"name": name, "hovertemplate": f"{name}: %{{y:.0%}} of the parameters<extra></extra>"}
    return {"type": "scatter", "mode": "lines", "x": [*times], "y": [*shares], "yaxis": "y2", **look, **words}


def _gathered(held: Sequence[tuple[int, float, float]], units: int, end: float) -> tuple[list[float], list[float]]:
    """Times, and the fraction of all parameters that is gathered from each time on, in addition to the rank's own
    shards."""
    times = sorted({0.0, end, *(moment for _, start, stop in held for moment in (start, stop))})
    return times, [sum(start <= time < stop for _, start, stop in held) / units for time in times]


def _spans(name: str, colour: str, spans: Sequence[tuple[int, int, float, float]]) -> dict[str, Any]:
    """Bars for intervals: (lane, unit, start, end)."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [lane for lane, *_ in spans],
        "base": [start for *_, start, _ in spans],
        "x": [stop - start for *_, start, stop in spans],
        "width": 0.8,
        "text": [str(unit + 1) for _, unit, *_ in spans],
        "textposition": "inside",
        "textangle": 0,
        "insidetextanchor": "middle",
        "marker": {"color": colour, "line": {"color": INK, "width": 0.6}},
        "hovertemplate": f"{name}, unit %{{text}}<extra></extra>",
    }


# ---- pictures of ZeRO and FSDP


STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
ADAM = (4, 4, 8)  # bytes of a parameter, its gradient and its two moments, all in 32 bits
_STATES = ("parameters", "gradients", "optimizer")
_SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}  # the first stage that shards it


@checked
def share(owner: str, stage: int, ranks: int) -> float:
    """The fraction of an owner's bytes ("parameters", "gradients" or "optimizer") that one rank stores."""
    check_choice("owner", owner, _STATES)
    return 1 / ranks if stage >= _SHARDED_FROM[owner] else 1.0


@checked
def who_holds_what(ranks: int = 4, held: Sequence[int] = ADAM) -> go.Figure:
    """The model states on every rank, for DDP and each ZeRO stage; the empty part of a column is stored on other ranks.

    `held` are the bytes per parameter of the parameter, its gradient and its optimizer state; they are the widths of
    the columns. Raises `ValueError` if `ranks` is not positive.
    """
    line = {"color": INK, "width": 0.6}
    parts, full = _boxes(ranks, held)
    empty = {"marker": {"color": "rgba(0,0,0,0)", "line": line}, "hoverinfo": "skip", "showlegend": False}
    data = [{"type": "bar", **full, **empty}]
    for owner, size in zip(_STATES, held):
        words = {"name": f"{_words(owner)} ({size} bytes per parameter)", "hovertemplate": "%{text}<extra></extra>"}
        look = {"marker": {"color": OWNERS[owner], "line": line}, "textposition": "none"}
        data.append({"type": "bar", **parts[owner], **words, **look})
    shown = range(0, ranks, max(1, -(-ranks // 16)))
    columns = {"tickvals": [rank + 0.45 for rank in shown], "ticktext": [f"rank {rank}" for rank in shown]}
    rows = {
        "tickvals": [_foot(stage) + 0.5 for stage in range(len(STAGES))],
        "ticktext": [f"<b>{name}</b><br>{_sum_of(held, stage, ranks)}" for stage, name in enumerate(STAGES)],
    }
    title = f"Model states on each of {counted(ranks, 'rank')}, P parameters (by formula)"
    looks = plain_look(12) | {
        "title": {"text": title, **TITLE},
        "barmode": "overlay",
        "height": 420,
        "xaxis": _UNSCALED | columns | {"range": [-0.06, ranks - 0.04]},
        "yaxis": _UNSCALED | rows | {"range": [-0.05, _foot(0) + 1.05]},
        "legend": {"orientation": "h", "y": -0.09, "x": 0},
        "margin": {"l": 150, "r": 10, "t": 34, "b": 60},
    }
    return as_figure(data, looks)


def _foot(stage: int) -> float:
    """The lower edge of a stage's row."""
    return 1.3 * (len(STAGES) - 1 - stage)


def _boxes(ranks: int, held: Sequence[int]) -> tuple[dict[str, dict[str, list[Any]]], dict[str, list[Any]]]:
    """The bars of the stored states, by owner, and the whole columns behind them: rank r has shard r, counted from the
    top."""
    full: dict[str, list[Any]] = {"x": [], "y": [], "base": [], "width": []}
    parts: dict[str, dict[str, list[Any]]] = {
        owner: {"x": [], "y": [], "base": [], "width": [], "text": []} for owner in _STATES
    }
    for stage, rank, number in product(range(len(STAGES)), range(ranks), range(len(_STATES))):
        owner, part = _STATES[number], share(_STATES[number], stage, ranks)
        left, width = (0.9 * size / sum(held) for size in (sum(held[:number]), held[number]))
        place = {"x": rank + left + width / 2, "width": 0.94 * width}
        which = "all" if part == 1 else f"shard {rank} of {ranks}"
        words = f"{STAGES[stage]}, rank {rank}: {which} of the {_words(owner)}"
        foot = _foot(stage)
        for key, value in (
            place | {"y": part, "base": foot if part == 1 else foot + 1 - part * (rank + 1), "text": words}
        ).items():
            parts[owner][key].append(value)
        for key, value in (place | {"y": 1.0, "base": foot}).items():
            full[key].append(value)
    return parts, full


def _sum_of(held: Sequence[int], stage: int, ranks: int) -> str:
    """The bytes of a rank as a sum of three terms, and its value."""
    fractions = [share(owner, stage, ranks) for owner in _STATES]
    terms = " + ".join(f"{size}P" + (f"/{ranks}" if part < 1 else "") for size, part in zip(held, fractions))
    return f"{terms}<br>= {sum(size * part for size, part in zip(held, fractions)):.4g} P bytes"


@checked
def bytes_by_ranks(
    parameters: float = 7e9,
    ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    held: Sequence[int] = ADAM,
    limit: float | None = None,
) -> go.Figure:
    """Bytes of model states on one rank versus the number of ranks, for DDP and each ZeRO stage, by formula.

    `limit` draws a line at the memory of a device, in bytes. Activations, buffers and gathered parameters are not
    included. Raises `ValueError` if a number of ranks is not positive.
    """
    places = [(name, stage, count) for stage, name in enumerate(STAGES) for count in ranks]
    largest = max(parameters * sum(held), limit or 0)
    unit, word = next(
        (unit, word)
        for unit, word in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
        if largest >= unit or unit == 1
    )
    axis = [[name for name, _, _ in places], [str(count) for _, _, count in places]]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": _words(owner),
            "x": axis,
            "y": [parameters * size * share(owner, stage, count) / unit for _, stage, count in places],
            "marker": {"color": OWNERS[owner], "line": {"color": INK, "width": 0.6}},
            "hovertemplate": f"{_words(owner)}: %{{y:.3~g}} {word}<extra>%{{x}} ranks</extra>",
        }
        for owner, size in zip(_STATES, held)
    ]
    per_parameter = " + ".join(map(str, held))
    title = f"Model states on one rank, {_count(parameters)} parameters × ({per_parameter}) bytes (by formula)"
    grouped = {"type": "multicategory", "dividercolor": INK, "tickangle": 0, "showgrid": False}
    looks = plain_look(12) | {
        "title": {"text": title, **TITLE},
        "barmode": "stack",
        "bargap": 0.15,
        "height": 380,
        "xaxis": grouped | {"title": {"text": "number of ranks"}},
        "yaxis": SCALED | {"title": {"text": f"{word} per rank"}},
        "legend": {"orientation": "h", "y": 1.1, "x": 0, "traceorder": "normal"},
        "margin": {"l": 60, "r": 10, "t": 60, "b": 64},
    }
    if limit is not None:
        looks |= level(limit / unit, f"{limit / unit:.3g} {word} device memory", width=1.5)
    return as_figure(data, looks)


def _words(owner: str) -> str:
    return "optimizer state" if owner == "optimizer" else owner


def _count(number: float) -> str:
    return next(
        (f"{number / unit:.3g}{letter}" for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= unit),
        f"{number:g}",
    )


# ---- will it fit: the bytes of a device's states, by formula (Rajbhandari et al. 2020, section 3.1)


@checked
def states(parameters: float, devices: int, recipe: str = "mixed", memory: float | None = None) -> go.Figure:
    """Bytes of model states per device under DDP and the ZeRO stages, by owner, by formula; `memory` draws a line."""
    bytes_per_parameter = RECIPES[check_choice("recipe", recipe, RECIPES)]
    unit, word = (1e9, "GB") if sum(bytes_per_parameter.values()) * parameters >= 1e9 else (2**20, "MiB")
    shown = {sharding.title: sharding.owners for sharding in SHARDINGS.values() if not sharding.across}
    shares = {
        owner: [size * parameters / (devices if owner in sharded else 1) / unit for sharded in shown.values()]
        for owner, size in bytes_per_parameter.items()
    }
    names = [f"{name}<br>{sum(parts):,.1f} {word}" for name, *parts in zip(shown, *shares.values())]
    data = [
        {"type": "bar", "name": owner, "x": names, "y": share, "marker": {"color": OWNERS[owner]}}
        | {"hovertemplate": f"{owner} %{{y:.3~s}} {word}<extra>%{{x}}</extra>"}
        for owner, share in shares.items()
    ]
    title = f"Model states per device, by formula: {parameters:,.0f} parameters, {devices} devices, {recipe}"
    looks = plain_look(12) | {
        "title": {"text": f"<b>{title}</b>", **TITLE},
        "height": 330,
        "margin": {"l": 50, "r": 10, "t": 40, "b": 30},
        "barmode": "stack",
        "legend": {"orientation": "h", "y": -0.18},
        "yaxis": SCALED | {"title": {"text": word}},
        "xaxis": {"type": "category"},
    }
    if memory:
        looks |= level(memory / unit, f"device memory: {memory / unit:,.0f} {word}")
    return as_figure(data, looks)


# ---- precision: in which format the numbers of a step of FSDP2 are stored, sent and computed with


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # per number
_COLOURS = {"fp32": "#6357CF", "bf16": "#E69F00", "fp16": "#CC79A7", "fp8": "#D55E00"}
_ROWS = ("stored from step to step", "sent between ranks", "computed with")  # from the top down
_WIDTH, _GAP, _UNIT, _STATION = 1.0, 0.5, 0.2, 1.15  # of a box, between boxes, height per byte, between rows


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
        middle = -row * _STATION
        shapes.append(box(left, middle - height / 2, _WIDTH, height, _COLOURS[kind]))
        notes.append(note(left + _WIDTH / 2, middle, f"<b>{kind}</b>", 12, ink_on(_COLOURS[kind])))
        notes.append(note(left + _WIDTH / 2, middle - height / 2 - 0.04, words, 11) | {"yanchor": "top"})
        middles.append((left, middle))
    for (left, middle), (following, next_middle) in pairwise(middles):
        notes.append(arrow((left + _WIDTH, middle), (following, next_middle), INK, 1.5))
    for row, words in enumerate(_ROWS):
        notes.append(note(-0.25, -row * _STATION, words.replace(" ", "<br>", 1), 12, anchor="right"))
    title = f"One step of FSDP2, param_dtype={param}, reduce_dtype={reduce}; height: bytes per number"
    looks = layout(title, 400) | {
        "shapes": shapes,
        "annotations": notes,
        "xaxis": HIDDEN | {"range": [-2.0, len(stations) * (_WIDTH + _GAP) - _GAP + 0.2]},
        "yaxis": HIDDEN | {"range": [-2 * _STATION - 0.85, 0.6]},
    }
    return as_figure([], looks)
