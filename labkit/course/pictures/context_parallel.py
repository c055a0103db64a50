"""Pictures of context parallelism: which rank computes which part of the causal mask, turn by turn of ring
attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.course.pictures.canvas import EVERY, checked, ink, played, wide_layout
from labkit.figures import colours

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["held", "ring", "work"]

_MOST = 4  # ranks that have room next to each other
_PANEL, _LANE, _GAP = 208, 17, 16  # px: the mask of a turn, the bar of a rank, and what is between two rows


@checked
def held(ranks: int = 4, zigzag: bool = True) -> list[list[int]]:
    """The chunks of each rank, of 2·`ranks` chunks of the sequence: two neighbours, or with `zigzag` one from the
    beginning and one from the end (Llama 3, 2024, section 3.3.2)."""
    _check(ranks)
    if zigzag:
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [[2 * rank, 2 * rank + 1] for rank in range(ranks)]


@checked
def work(ranks: int = 4, zigzag: bool = True) -> list[list[float]]:
    """For each turn and rank, the pairs of chunks of queries and keys that it computes; a chunk with itself is half a
    pair, because half of it is masked.

    >>> work(2, zigzag=False)
    [[2.0, 2.0], [0, 4.0]]
    """
    return [
        [sum(_weight(*pair) for pair in _pairs(ranks, zigzag, turn, rank)) for rank in range(ranks)]
        for turn in range(ranks)
    ]


def _pairs(ranks: int, zigzag: bool, turn: int, rank: int) -> list[tuple[int, int]]:
    """The chunks of queries and keys, as (query, key), that a rank computes in a turn: the keys are those of the rank
    `turn` places before it in the ring, and no later than the queries."""
    chunks = held(ranks, zigzag)
    return [(query, key) for query in chunks[rank] for key in chunks[(rank - turn) % ranks] if key <= query]


def _weight(query: int, key: int) -> float:
    return 0.5 if query == key else 1.0


@checked
def ring(ranks: int = 4) -> go.Figure:
    """The turns of ring attention on 2 to 4 ranks, with the sequence in order and in zigzag order: the part of the
    causal mask that each rank computes with the keys and values that it has in this turn, and how much that is. By
    rule: a turn takes as long as its busiest rank."""
    _check(ranks)
    data: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    height = 2 * (_PANEL + _LANE * ranks + _GAP)
    looks = wide_layout(f"Ring attention on {ranks} ranks, causal", "", 88 + height)
    looks["margin"] = {"l": 12, "r": 12, "t": 76, "b": 12}
    sums = []
    for row, (name, zigzag) in enumerate((("in order", False), ("zigzag", True))):
        busiest = [max(of_ranks) for of_ranks in work(ranks, zigzag)]
        sums.append(f"{name} {' + '.join(f'{most:g}' for most in busiest)} = <b>{sum(busiest):g}</b>")
        for turn in range(ranks):
            panel = row * ranks + turn + 1
            top = 1 - (row * (_PANEL + _LANE * ranks + _GAP) + 22) / height
            below = top - (_PANEL - 22) / height
            left, right = (turn + 0.3) / ranks, (turn + 0.98) / ranks
            places = {"mask": (below, top), "bars": (below - (_LANE * ranks + 4) / height, below - 4 / height)}
            axes = {"mask": str(panel), "bars": str(panel + 2 * ranks)}
            for kind, domain in places.items():
                number = axes[kind]
                looks[f"xaxis{number}"] = _axis([left, right], f"y{number}")
                looks[f"yaxis{number}"] = _axis(list(domain), f"x{number}")
            _scales(looks, axes, ranks, zigzag, turn)
            data += _panel(axes, ranks, zigzag, turn)
            words = f"<b>{name}</b>, turn {turn + 1}"
            titles.append({"text": words, "x": left, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left"})
    looks["annotations"] = [title | {"yanchor": "bottom", "showarrow": False, "font": {"size": 13}} for title in titles]
    how = "number: the rank that computes this pair of chunks; below: whose keys and values each rank has, its pairs"
    slowest = f"a turn takes as long as its busiest rank: {'; '.join(sums)}"
    head = looks["title"]["text"].partition("<br>")[0]
    looks["title"]["text"] = f"{head}<br><span style='font-size:12px'>{how}<br>{slowest}</span>"
    looks |= {"showlegend": False, "barmode": "overlay", "bargap": 0.25}
    turns = [trace["meta"] for trace in data]
    moments = [(f"turn {now + 1}", [{"visible": turn <= now} for turn in turns]) for now in range(ranks)]
    return played(data, looks, moments)


def _axis(domain: list[float], anchor: str) -> dict[str, Any]:
    plain = {"showgrid": False, "zeroline": False, "fixedrange": True, "ticks": "", "tickfont": {"size": 10}}
    return plain | {"domain": domain, "anchor": anchor}


def _scales(looks: dict[str, Any], axes: dict[str, str], ranks: int, zigzag: bool, turn: int) -> None:
    """The owners of the chunks along the mask, and below it whose keys each rank has."""
    owners = {chunk: rank for rank, chunks in enumerate(held(ranks, zigzag)) for chunk in chunks}
    chunks = list(range(2 * ranks))
    marks = {"tickvals": chunks, "ticktext": [_mark(owners[chunk]) for chunk in chunks]}
    looks[f"yaxis{axes['mask']}"] |= marks | {"range": [2 * ranks - 0.5, -0.5]}
    looks[f"xaxis{axes['mask']}"] |= {"range": [-0.5, 2 * ranks - 0.5], "showticklabels": False}
    most = 1.18 * max(max(of_ranks) for of_ranks in work(ranks, False))
    has = [f"{_mark(rank)} {rank} has {_mark((rank - turn) % ranks)} {(rank - turn) % ranks} " for rank in range(ranks)]
    looks[f"yaxis{axes['bars']}"] |= {"tickvals": list(range(ranks)), "ticktext": has, "range": [ranks - 0.5, -0.5]}
    looks[f"xaxis{axes['bars']}"] |= {"range": [0, most], "showticklabels": False}


def _mark(rank: int) -> str:
    return f'<span style="color:{colours.rank_colour(rank)}">■</span>'


def _panel(axes: dict[str, str], ranks: int, zigzag: bool, turn: int) -> list[dict[str, Any]]:
    """The traces of one turn: the mask, of which this turn's part is coloured and that of earlier turns pale, the ranks
    that compute it, and how much each does."""
    cells: list[list[int | None]] = [
        [0 if key <= query else None for key in range(2 * ranks)] for query in range(2 * ranks)
    ]
    texts: list[tuple[int, int, int]] = []
    for when in range(turn + 1):
        for rank in range(ranks):
            for query, key in _pairs(ranks, zigzag, when, rank):
                cells[query][key] = 1 + rank + (ranks if when == turn else 0)
                if when == turn:
                    texts.append((query, key, rank))
    solid = [colours.rank_colour(rank) for rank in range(ranks)]
    palette = [EVERY, *(_pale(colour) for colour in solid), *solid]
    steps = len(palette)
    scale = [[(number + edge) / steps, colour] for number, colour in enumerate(palette) for edge in (0, 1)]
    mask = {"xaxis": f"x{axes['mask']}", "yaxis": f"y{axes['mask']}", "meta": turn}
    bars = {"xaxis": f"x{axes['bars']}", "yaxis": f"y{axes['bars']}", "meta": turn}
    amounts = work(ranks, zigzag)[turn]
    return [
        {
            "type": "heatmap",
            "z": cells,
            "zmin": -0.5,
            "zmax": steps - 0.5,
            "colorscale": scale,
            "showscale": False,
            "hoverinfo": "skip",
            "xgap": 1,
            "ygap": 1,
        }
        | mask,
        {
            "type": "scatter",
            "mode": "text",
            "x": [key for _, key, _ in texts],
            "y": [query for query, _, _ in texts],
            "text": [str(rank) + ("½" if query == key else "") for query, key, rank in texts],
            "textfont": {
                "size": [9 if query == key else 11 for query, key, _ in texts],
                "color": [ink(rank) for _, _, rank in texts],
            },
            "hovertext": [
                f"rank {rank}: queries of chunk {query}, keys of chunk {key}"
                + (", half of it masked" if query == key else "")
                for query, key, rank in texts
            ],
            "hoverinfo": "text",
        }
        | mask,
        {
            "type": "bar",
            "orientation": "h",
            "x": amounts,
            "y": list(range(ranks)),
            "marker": {"color": solid},
            "text": [f"{amount:g}" if amount else "idle" for amount in amounts],
            "textposition": "outside",
            "cliponaxis": False,
            "textfont": {"size": 11},
            "hoverinfo": "skip",
        }
        | bars,
    ]


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.3)"


def _check(ranks: int) -> None:
    if not 2 <= ranks <= _MOST:
        raise ValueError(f"ranks must be 2 to {_MOST}, got {ranks}")
