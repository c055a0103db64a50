"""Pictures of tensor parallelism: matrices with their numbers, each shard in the colour of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from labkit.course.pictures.canvas import EVERY, HIDDEN, box, checked, ink, layout, note
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

Matrix = Sequence[Sequence[float]]

__all__ = ["column", "layer", "pair", "row"]

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
    passes = "forward and backward" if backward else "forward"
    how = (
        "between the split matrices"
        f" {'each rank has some positions' if sequence_parallel else 'every rank has everything'}"
    )
    title = f"<b>A layer, {passes}{', sequence parallel' if sequence_parallel else ''}</b>  {how}"
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
                owner = (
                    rank
                    if rank is not None
                    else j * across // columns
                    if across > 1
                    else i * down // rows
                    if down > 1
                    else None
                )
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
        lines = self.down > 0
        left = -2.2 if lines else -0.3
        return _drawn(
            self.shapes, self.notes, (left, max(self.widest, 20)), (-0.8, self.down + self.tallest + 0.2), title, None
        )


def _drawn(
    shapes: list[dict[str, Any]],
    notes: list[dict[str, Any]],
    x: tuple[float, float],
    y: tuple[float, float],
    title: str,
    height: float | None,
) -> go.Figure:
    axes = {"xaxis": HIDDEN | {"range": list(x)}, "yaxis": HIDDEN | {"range": [y[1], y[0]]}}
    tall = height or 36 * (y[1] - y[0]) + 44
    return as_figure([], layout(title, tall) | axes | {"shapes": shapes, "annotations": notes, "showlegend": False})


def _times(left: Matrix, right: Matrix) -> list[list[float]]:
    return [[sum(a * b for a, b in zip(line, column)) for column in zip(*right)] for line in left]


def _split(number: int, ranks: int, what: str) -> int:
    if ranks < 1 or number % ranks:
        raise ValueError(f"the number of {what} must be a multiple of {ranks}, the number of ranks, got {number}")
    return number // ranks
