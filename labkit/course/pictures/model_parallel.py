"""Pictures of layers that are split over ranks: by tensor, context and expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from labkit.common.units import counted
from labkit.course.pictures.canvas import EVERY, HIDDEN, box, checked, ink, layout, note, played, wide_layout
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

# ---- tensor parallelism: matrices with their numbers, each shard in the colour of its rank


Matrix = Sequence[Sequence[float]]

_GAP = 0.9  # cells between two matrices


@checked
def column(x: Matrix, a: Matrix, ranks: int = 2) -> go.Figure:
    """X·A by columns: every rank has all of X and some columns of A, and computes the same columns of the product. No
    communication.

    Matrices are lists of rows. Raises `ValueError` if the number of columns of `a` is not a multiple of `ranks`.
    """
    _split(len(a[0]), ranks, "columns")
    page = _Page()
    page.matrix("X", x)
    page.sign("·")
    page.matrix("A", a, across=ranks)
    page.sign("=")
    page.matrix("XA", _times(x, a), across=ranks)
    return page.figure(
        "<b>Split by columns</b>  every rank has all of X; its columns of A give its columns of XA; no communication"
    )


@checked
def row(h: Matrix, b: Matrix, ranks: int = 2) -> go.Figure:
    """H·B by rows: every rank has some columns of H and the same rows of B, and gets a partial sum of the product: one
    all-reduce.

    Raises `ValueError` if the number of rows of `b` is not a multiple of `ranks`.
    """
    rows = _split(len(b), ranks, "rows")
    page = _Page()
    page.matrix("H", h, across=ranks)
    page.sign("·")
    page.matrix("B", b, down=ranks)
    page.sign("=")
    for rank in range(ranks):
        mine = slice(rank * rows, (rank + 1) * rows)
        page.matrix(f"of rank {rank}", _times([line[mine] for line in h], b[mine]), rank=rank)
        page.sign("+" if rank + 1 < ranks else "→")
    page.matrix("Y, after the all-reduce", _times(h, b))
    return page.figure("<b>Split by rows</b>  every rank gets a partial sum as large as Y; the all-reduce adds them")


@checked
def pair(x: Matrix, a: Matrix, b: Matrix, ranks: int = 2) -> go.Figure:
    """Y = relu(XA)·B in one picture: A by columns, then B by rows, so each rank computes its partial sum without
    communication.

    Raises `ValueError` if the inner width is not a multiple of `ranks`.
    """
    rows = _split(len(b), ranks, "rows")
    hidden = [[max(0, value) for value in line] for line in _times(x, a)]
    page = _Page()
    for rank in range(ranks):
        mine = slice(rank * rows, (rank + 1) * rows)
        page.matrix("X", x)
        page.sign("·")
        page.matrix(f"A{_SUB[rank]}", [line[mine] for line in a], rank=rank)
        page.sign("→")
        page.matrix(f"relu(XA{_SUB[rank]})", [line[mine] for line in hidden], rank=rank)
        page.sign("·")
        page.matrix(f"B{_SUB[rank]}", b[mine], rank=rank)
        page.sign("=")
        page.matrix(f"partial sum of rank {rank}", _times([line[mine] for line in hidden], b[mine]), rank=rank)
        page.line(f"rank {rank}")
    page.matrix("Y = the sum: one all-reduce", _times(hidden, b))
    return page.figure("<b>A pair of split matrices</b>  columns, then rows: one all-reduce for both")


_SUB = "₀₁₂₃₄₅₆₇"
_OPERATIONS = (  # of a transformer layer: name, and whether it is split by tensor parallelism
    ("norm", False),
    ("query, key, value<br>(columns)", True),
    ("attention<br>by heads", True),
    ("output<br>(rows)", True),
    ("add, norm", False),
    ("MLP up<br>(columns)", True),
    ("GELU", True),
    ("MLP down<br>(rows)", True),
    ("add", False),
)


_STEP = 1.35  # from one operation to the next
_BOUNDARIES: dict[tuple[str, bool], dict[str, str]] = {  # (f or g, sequence parallel): the collective by direction
    ("f", False): {"forward": "", "backward": "all_reduce"},
    ("g", False): {"forward": "all_reduce", "backward": ""},
    ("f", True): {"forward": "all_gather", "backward": "reduce_scatter"},
    ("g", True): {"forward": "reduce_scatter", "backward": "all_gather"},
}


@checked
def layer(sequence_parallel: bool = False, ranks: int = 2, backward: bool = False) -> go.Figure:
    """The forward pass of a transformer layer: what each rank has after every operation, and the collectives between
    them. With `backward` also the gradients, from right to left, and what f and g are in each direction (Shoeybi et al.
    2019, section 3).

    Activations between the split matrices are whole on every rank or, with `sequence_parallel`, split along the
    sequence.
    """
    down = ranks + 1.1  # from a pass to the next one
    shapes, notes = [], []
    notes += [note(index * _STEP + 0.5, -0.62, name, size=10) for index, (name, _) in enumerate(_OPERATIONS)]
    for number, direction in enumerate(("forward", "backward") if backward else ("forward",)):
        top = number * down
        for index, (_, split) in enumerate(_OPERATIONS):
            for rank in range(ranks):
                sharded = split or sequence_parallel
                shapes.append(box(index * _STEP, top + rank, 1, 0.82, colours.rank_colour(rank) if sharded else EVERY))
                if split:
                    words = "its heads" if index < 4 else "its units"
                else:
                    words = "its positions" if sharded else "replicated"
                middle = index * _STEP + 0.5, top + rank + 0.41
                notes.append(note(*middle, words, size=10, colour=ink(rank if sharded else None)))
        for index, (before, after) in enumerate(pairwise(_OPERATIONS), 1):
            if before[1] == after[1]:
                continue
            name = "g" if before[1] else "f"
            op = _BOUNDARIES[name, sequence_parallel][direction]
            place = index * _STEP - (_STEP - 1) / 2
            if op:
                shapes.append(box(place - 0.08, top - 0.15, 0.16, ranks + 0.15, colours.OPERATIONS[op]))
            if op or backward:
                words = op.replace("_", "-") if op else "identity"
                notes.append(note(place, top + ranks + 0.25, f"<b>{name}</b> {words}" if backward else words, size=10))
        notes += [note(-0.12, top + rank + 0.41, f"rank {rank}", size=11, anchor="right") for rank in range(ranks)]
        if backward:
            arrow = "forward →" if direction == "forward" else "← backward"
            notes.append(note(-1.05, top + ranks + 0.25, f"<b>{arrow}</b>", size=11, anchor="left"))
    title = "A layer, forward and backward" if backward else "A layer, forward"
    has = "every rank has everything"
    if sequence_parallel:
        title, has = f"{title}, sequence parallel", "each rank has some positions"
    title = f"<b>{title}</b>  between the split matrices {has}"
    bottom = ranks + 0.6 + (down if backward else 0)
    return _drawn(shapes, notes, (-1.1, len(_OPERATIONS) * _STEP), (-1.0, bottom), title, 60 * (bottom + 1.0))


class _Page:
    """Matrices and signs from left to right, line by line."""

    def __init__(self) -> None:
        self.shapes: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.across, self.down, self.widest, self.tallest = 0.0, 0.0, 0.0, 0
        self.begun = 0  # index of the first shape and note of this line, which `line` centres vertically

    def matrix(self, name: str, values: Matrix, across: int = 1, down: int = 1, rank: int | None = None) -> None:
        """A matrix, with its columns split over `across` ranks or its rows over `down` ranks, or whole on `rank` or on
        all ranks."""
        rows, columns = len(values), len(values[0])
        self.notes.append(note(self.across + columns / 2, self.down - 0.35, name, size=11))
        for i, line in enumerate(values):
            for j, value in enumerate(line):
                owner = rank
                if across > 1:
                    owner = j * across // columns
                elif down > 1:
                    owner = i * down // rows
                colour = EVERY if owner is None else colours.rank_colour(owner)
                self.shapes.append(box(self.across + j, self.down + i, 0.94, 0.94, colour))
                words = f"{value:g}".replace("-", "−")
                self.notes.append(note(self.across + j + 0.47, self.down + i + 0.47, words, size=13, colour=ink(owner)))
        self.across += columns + _GAP
        self.tallest = max(self.tallest, rows)
        self.widest = max(self.widest, self.across)

    def sign(self, sign: str) -> None:
        self.notes.append(note(self.across - _GAP / 2 - 0.03, self.down + 0.97, sign, size=16))

    def line(self, name: str) -> None:
        """Ends a line, which belongs to the rank called `name`."""
        self.notes.append(note(-0.3, self.down + 0.97, name, size=11, anchor="right"))
        self.down += self.tallest + 1.0
        self.across, self.tallest = 0.0, 0

    def figure(self, title: str) -> go.Figure:
        left = -2.2 if self.down > 0 else -0.3  # names of lines, or none
        bottom = self.down + self.tallest + 0.2
        x, y = (left, max(self.widest, 20)), (-0.8, bottom)
        return _drawn(self.shapes, self.notes, x, y, title, 36 * (bottom + 0.8) + 44)


def _drawn(
    shapes: list[dict[str, Any]],
    notes: list[dict[str, Any]],
    x: tuple[float, float],
    y: tuple[float, float],
    title: str,
    height: float,
) -> go.Figure:
    axes = {"xaxis": HIDDEN | {"range": list(x)}, "yaxis": HIDDEN | {"range": [y[1], y[0]]}}
    return as_figure([], layout(title, height) | axes | {"shapes": shapes, "annotations": notes, "showlegend": False})


def _times(left: Matrix, right: Matrix) -> list[list[float]]:
    return [[sum(a * b for a, b in zip(line, column)) for column in zip(*right)] for line in left]


def _split(number: int, ranks: int, what: str) -> int:
    if ranks < 1 or number % ranks:
        raise ValueError(f"the number of {what} must be a multiple of {ranks}, the number of ranks, got {number}")
    return number // ranks


# ---- context parallelism: which rank computes which part of the causal mask, turn by turn of ring attention


_MOST = 4  # ranks that have room next to each other
_PANEL, _LANE, _BETWEEN = 208, 17, 16  # px: the mask of a turn, the bar of a rank, and what is between two rows


@checked
def held(ranks: int = 4, zigzag: bool = True) -> list[list[int]]:
    """The chunks of each rank, of 2·`ranks` chunks of the sequence: two neighbours, or with `zigzag` one from the
    beginning and one from the end (Llama 3, 2024, section 3.3.2)."""
    _check_few(ranks)
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
    _check_few(ranks)
    data: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    height = 2 * (_PANEL + _LANE * ranks + _BETWEEN)
    looks = wide_layout(f"Ring attention on {ranks} ranks, causal", "", 88 + height)
    looks["margin"] = {"l": 12, "r": 12, "t": 76, "b": 12}
    sums = []
    for row, (name, zigzag) in enumerate((("in order", False), ("zigzag", True))):
        busiest = [max(of_ranks) for of_ranks in work(ranks, zigzag)]
        sums.append(f"{name} {' + '.join(f'{most:g}' for most in busiest)} = <b>{sum(busiest):g}</b>")
        for turn in range(ranks):
            panel = row * ranks + turn + 1
            top = 1 - (row * (_PANEL + _LANE * ranks + _BETWEEN) + 22) / height
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
    chunks = range(2 * ranks)
    cells: list[list[int | None]] = [[0 if key <= query else None for key in chunks] for query in chunks]
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
    colours_of = {"z": cells, "zmin": -0.5, "zmax": steps - 0.5, "colorscale": scale, "showscale": False}
    heatmap = {"type": "heatmap", "xgap": 1, "ygap": 1, "hoverinfo": "skip"} | colours_of
    numbers = {
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
    amounts = work(ranks, zigzag)[turn]
    words = {"text": [f"{amount:g}" if amount else "idle" for amount in amounts], "textfont": {"size": 11}}
    words |= {"textposition": "outside", "cliponaxis": False, "hoverinfo": "skip"}
    lengths = {"type": "bar", "orientation": "h", "x": amounts, "y": list(range(ranks)), "marker": {"color": solid}}
    return [heatmap | mask, numbers | mask, lengths | words | bars]


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.3)"


def _check_few(ranks: int) -> None:
    if not 2 <= ranks <= _MOST:
        raise ValueError(f"ranks must be 2 to {_MOST}, got {ranks}")


# ---- expert parallelism: the tokens of each rank, the slots of the experts, and what is sent between them


EXAMPLE = ((0, 0, 2, 0, 1, 0), (3, 0, 1, 0, 3, 2))  # choices of two ranks that prefer expert 0
_MOST_RANKS, _MOST_CHOICES, _MOST_EXPERTS = 4, 12, 12
_ROW = 25  # px of a token


@dataclass(frozen=True)
class Expert:
    """An expert on `rank`: for each rank that sends to it, the choices that it takes, by their number, and those that
    are dropped. `slots` is their fixed number per sending rank; None if there are as many as tokens."""

    rank: int
    taken: tuple[tuple[int, ...], ...]
    dropped: tuple[tuple[int, ...], ...]
    slots: int | None

    def rows(self, sender: int) -> int:
        """The slots that `sender` sends to this expert, empty ones included."""
        return len(self.taken[sender]) if self.slots is None else self.slots


@checked
def route(
    choices: Sequence[Sequence[int]], experts: int = 4, top_k: int = 1, factor: float | None = 1.0
) -> list[Expert]:
    """The experts with what is sent to them. `choices` are, for each rank, the experts that its router chooses for one
    sequence, `top_k` of them per token.

    With a capacity `factor`, each expert has ⌈factor · top_k · tokens / experts⌉ slots for each sequence, first come,
    first served (Lepikhin et al. 2020); with None it takes every token ("dropless", Gale et al. 2022). Raises
    `ValueError` if the choices are not those of equally many tokens, or name an expert that does not exist.
    """
    _check_choices(choices, experts, top_k, factor)
    ranks = len(choices)
    slots = None if factor is None else math.ceil(factor * len(choices[0]) / experts)
    built = []
    for expert in range(experts):
        wanted = [[number for number, chosen in enumerate(of_rank) if chosen == expert] for of_rank in choices]
        taken = tuple(tuple(numbers[:slots]) for numbers in wanted)
        dropped = tuple(() if slots is None else tuple(numbers[slots:]) for numbers in wanted)
        built.append(Expert(expert * ranks // experts, taken, dropped, slots))
    return built


def _check_choices(choices: Sequence[Sequence[int]], experts: int, top_k: int, factor: float | None) -> None:
    ranks, count = len(choices), len(choices[0])
    if not 2 <= ranks <= _MOST_RANKS:
        raise ValueError(f"choices must be a list for each of 2 to {_MOST_RANKS} ranks, got {ranks}")
    if any(len(of_rank) != count for of_rank in choices) or count % top_k or count > _MOST_CHOICES:
        lengths = ", ".join(str(len(of_rank)) for of_rank in choices)
        raise ValueError(
            f"choices must be equally many per rank, at most {_MOST_CHOICES} and a multiple of top_k={top_k}, got"
            f" {lengths}"
        )
    if experts > _MOST_EXPERTS or experts % ranks:
        raise ValueError(
            f"experts must be at most {_MOST_EXPERTS} and a multiple of the {ranks} ranks of choices, got {experts}"
        )
    most = max(max(of_rank) for of_rank in choices)
    if most >= experts:
        raise ValueError(f"choices must be numbers of the {experts} experts, 0 to {experts - 1}, got {most}")
    if factor is not None and not 0 < factor <= experts:
        raise ValueError(f"factor must be more than 0 and at most the {experts} experts, got {factor:g}")


_TOKEN, _EXPERT, _RESULT = (0.0, 1.75), (4.2, 9.0), (11.2, 13.2)  # left and right edges of the columns


@checked
def dispatch(
    choices: Sequence[Sequence[int]] = EXAMPLE, experts: int = 4, top_k: int = 1, factor: float | None = 1.0
) -> go.Figure:
    """Tokens on their way to the experts of other ranks and back, with the arguments of `route`: by rule, for one
    sequence per rank. A line is a token that an all-to-all takes to an expert, or its output on the way back. It can be
    played: the lines grow as the tokens travel."""
    rows = route(choices, experts, top_k, factor)
    ranks, count = len(choices), len(choices[0])
    local = experts // ranks
    band = max(count, local) + 0.7
    lost = {(sender, number) for expert in rows for sender in range(ranks) for number in expert.dropped[sender]}
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    wide = max(sum(expert.rows(sender) for sender in range(ranks)) for expert in rows)
    cell = min(0.62, (_EXPERT[1] - _EXPERT[0] - 1.1) / max(wide, 1))
    for rank in range(ranks):
        top = rank * band
        colour = colours.rank_colour(rank)
        shapes.append(box(-1.2, top - 0.55, _RESULT[1] + 1.35, band - 0.15, EVERY) | {"fillcolor": _BAND})
        notes.append(note(-1.1, top + count / 2 - 0.5, f"<b>rank {rank}</b>", 12, anchor="left"))
        for number, chosen in enumerate(choices[rank]):
            words = f"{number // top_k} → expert {chosen}"
            shapes.append(box(_TOKEN[0], top + number - 0.42, _TOKEN[1] - _TOKEN[0], 0.84, colour))
            notes.append(note(_TOKEN[0] + 0.1, top + number, words, 11, ink(rank), "left"))
            if (rank, number) in lost:
                notes.append(note(_TOKEN[1] + 0.1, top + number, "✕ full", 11, anchor="left"))
        for token in range(count // top_k):
            numbers = range(token * top_k, (token + 1) * top_k)
            kept = [choices[rank][number] for number in numbers if (rank, number) not in lost]
            middle = top + (numbers[0] + numbers[-1]) / 2
            shapes.append(box(_RESULT[0], middle - 0.42, _RESULT[1] - _RESULT[0], 0.84, colour if kept else EVERY))
            words = f"{token}: {' + '.join(f'expert {expert}' for expert in kept) or 'residual only'}"
            notes.append(note(_RESULT[0] + 0.1, middle, words, 11, ink(rank if kept else None), "left"))
    for index, expert in enumerate(rows):
        middle = expert.rank * band + (index % local + 0.5) * count / local - 0.5
        notes.append(note(_EXPERT[0] + 0.05, middle, f"expert {index}", 11, anchor="left"))
        left = _EXPERT[0] + 1.1
        right = left + cell * sum(expert.rows(sender) for sender in range(ranks))
        for sender in range(ranks):
            for place in range(expert.rows(sender)):
                filled = place < len(expert.taken[sender])
                colour = colours.rank_colour(sender) if filled else EVERY
                shapes.append(box(left, middle - 0.42, cell - 0.05, 0.84, colour))
                if filled:
                    words = str(expert.taken[sender][place] // top_k)
                    notes.append(note(left + cell / 2, middle, words, 11, ink(sender)))
                left += cell
            for number in expert.taken[sender]:
                there = sender * band + number
                token = number // top_k
                back = sender * band + token * top_k + (top_k - 1) / 2
                lines.append(_line(sender, index, token, (_TOKEN[1], _EXPERT[0]), (there, middle)))
                lines.append(_line(sender, index, token, (right, _RESULT[0]), (middle, back)))
    heads = (
        (sum(_TOKEN) / 2, "<b>① the router</b><br>chooses"),
        ((_TOKEN[1] + _EXPERT[0]) / 2, "<b>② dispatch</b><br>all-to-all"),
        (_EXPERT[0] + 2.4, "<b>③ the experts</b><br>compute"),
        ((_EXPERT[1] + _RESULT[0]) / 2 - 0.3, "<b>④ combine</b><br>all-to-all"),
        (sum(_RESULT) / 2, "<b>⑤ outputs</b><br>weighted"),
    )
    notes += [note(x, -1.35, text, 12) for x, text in heads]
    kind = "dropless" if factor is None else f"capacity factor {factor:g}"
    looks = wide_layout(f"Dispatch and combine, {kind}", _summary(rows, count), round(96 + _ROW * (band * ranks + 1.7)))
    looks |= {
        "shapes": shapes,
        "annotations": notes,
        "xaxis": HIDDEN | {"range": [-1.25, _RESULT[1] + 0.2]},
        "yaxis": HIDDEN | {"range": [ranks * band - 0.5, -2.2]},
        "showlegend": False,
    }
    moments = []
    for moment in range(1, 2 * _MOMENTS + 1):
        there, back = min(1.0, moment / _MOMENTS), max(0.0, moment / _MOMENTS - 1)
        name = f"dispatch {there:.0%}" if moment <= _MOMENTS else f"combine {back:.0%}"
        moments.append((name, [_grown(line, (there, back)[number % 2]) for number, line in enumerate(lines)]))
    return played(lines, looks | {"margin": looks["margin"] | {"l": 12, "t": 62}}, moments)


_MOMENTS = 8  # in which each of the two all-to-alls is played
_BAND = "rgba(128, 128, 128, 0.08)"


def _line(sender: int, expert: int, token: int, x: tuple[float, float], y: tuple[float, float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "line": {"color": colours.rank_colour(sender), "width": 1.5},
        "name": f"token {token} of rank {sender}, expert {expert}",
        "hoverinfo": "name",
    }


def _grown(line: dict[str, Any], part: float) -> dict[str, Any]:
    """What a line shows when its token has travelled this part of it; nothing before that."""
    grown = {which: [line[which][0], line[which][0] + part * (line[which][1] - line[which][0])] for which in "xy"}
    return grown | {"visible": part > 0}


def _summary(rows: Sequence[Expert], count: int) -> str:
    """What is dropped, what is computed for nothing, and what each rank sends to the others."""
    ranks = len(rows[0].taken)
    dropped = sum(len(numbers) for expert in rows for numbers in expert.dropped)
    computed = sum(expert.rows(sender) for expert in rows for sender in range(ranks))
    empty = computed - (count * ranks - dropped)
    sent = [sum(expert.rows(sender) for expert in rows if expert.rank != sender) for sender in range(ranks)]
    loads = [
        sum(expert.rows(sender) for expert in rows if expert.rank == rank for sender in range(ranks))
        for rank in range(ranks)
    ]
    if rows[0].slots is None:
        first = "the ranks first tell each other how many tokens come; none is dropped, no slot is empty"
    else:
        lost = f"{counted(rows[0].slots, 'slot')} per expert and rank; {dropped} of {count * ranks} choices dropped"
        first = f"{lost}; {empty} of {computed} slots empty, but sent and computed"
    per_rank = ", ".join(f"rank {rank} {sent[rank]} and {loads[rank]}" for rank in range(ranks))
    return f"{first}<br>tokens that a rank sends to others, and computes: {per_rank}"
