"""Pictures of ZeRO and FSDP: what each rank stores, in bytes, and a step that gathers, computes and frees.

Stages are numbered as in ZeRO (Rajbhandari et al. 2020): 0 shards nothing (DDP); 1 shards the optimizer state, 2 also
the gradients, 3 also the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import check_choice
from labkit.course.pictures.checked import checked
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.figures.colours import GRID, INK, OWNERS

if TYPE_CHECKING:
    import plotly.graph_objects as go

from labkit.course.pictures.gathering import TITLE, gather_compute_drop

__all__ = ["ADAM", "STAGES", "bytes_by_ranks", "gather_compute_drop", "share", "who_holds_what"]

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
    data = [
        {
            "type": "bar",
            **full,
            "marker": {"color": "rgba(0,0,0,0)", "line": line},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    for owner, size in zip(_STATES, held):
        words = {
            "name": f"{_words(owner)} ({size} bytes per parameter)",
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
        data.append({"type": "bar", **parts[owner], **words, "marker": {"color": OWNERS[owner], "line": line}})
    shown = range(0, ranks, max(1, -(-ranks // 16)))
    return as_figure(
        data,
        plain_look(12)
        | {
            "title": {
                "text": f"Model states on each of {ranks} rank{'s' * (ranks > 1)}, P parameters (by formula)",
                **TITLE,
            },
            "barmode": "overlay",
            "height": 420,
            "xaxis": (
                {"tickvals": [rank + 0.45 for rank in shown], "ticktext": [f"rank {rank}" for rank in shown]}
                | {"range": [-0.06, ranks - 0.04], "showgrid": False, "zeroline": False}
            ),
            "yaxis": (
                {"tickvals": [_foot(stage) + 0.5 for stage in range(len(STAGES))], "range": [-0.05, _foot(0) + 1.05]}
                | {"ticktext": [f"<b>{name}</b><br>{_sum_of(held, stage, ranks)}" for stage, name in enumerate(STAGES)]}
                | {"showgrid": False, "zeroline": False}
            ),
            "legend": {"orientation": "h", "y": -0.09, "x": 0},
            "margin": {"l": 150, "r": 10, "t": 34, "b": 60},
        },
    )


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
    shapes, notes = [], []
    if limit is not None:
        line = {"color": INK, "width": 1.5, "dash": "dash"}
        shapes.append(
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit / unit, "y1": limit / unit, "line": line}
        )
        note = {
            "text": f"{limit / unit:.3g} {word} device memory",
            "xref": "paper",
            "x": 1,
            "xanchor": "right",
            "y": limit / unit,
        }
        notes.append(note | {"yanchor": "bottom", "showarrow": False})
    title = (
        f"Model states on one rank, {_count(parameters)} parameters × ({' + '.join(map(str, held))}) bytes (by formula)"
    )
    return as_figure(
        data,
        plain_look(12)
        | {
            "title": {"text": title, **TITLE},
            "barmode": "stack",
            "bargap": 0.15,
            "height": 380,
            "shapes": shapes,
            "annotations": notes,
            "xaxis": {
                "title": {"text": "number of ranks"},
                "type": "multicategory",
                "showgrid": False,
                "dividercolor": INK,
                "tickangle": 0,
            },
            "yaxis": {"title": {"text": f"{word} per rank"}, "gridcolor": GRID, "zeroline": False},
            "legend": {"orientation": "h", "y": 1.1, "x": 0, "traceorder": "normal"},
            "margin": {"l": 60, "r": 10, "t": 60, "b": 64},
        },
    )


def _words(owner: str) -> str:
    return "optimizer state" if owner == "optimizer" else owner


def _count(number: float) -> str:
    return next(
        (f"{number / unit:.3g}{letter}" for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= unit),
        f"{number:g}",
    )
