"""Pictures of collectives: who sends what to whom, round by round, from the plans of
`labkit.analysis.theory.collectives`.

There is one panel per round. The ranks are on a circle, an arrow is a message labelled with its chunks (`+` if they are
added), and the cells next to a rank show what it has *after* the round. Chunks are called A, B, C…; the digits in a
cell are the ranks whose data it contains, and Σ is the sum over all ranks. Chunks that were received in this round have
a thick border.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory import collectives as plans
from labkit.analysis.theory.collectives import Holding, Message, Piece, Plan, Round
from labkit.common.units import counted, size
from labkit.course.pictures.canvas import HIDDEN, SCALED, arrow, checked, layout
from labkit.figures import rank_colour
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.figures.colours import INK

if TYPE_CHECKING:
    import plotly.graph_objects as go

# ---- the rounds of the algorithms


MOST = 8  # ranks in a panel
_FEW = 4  # with up to this many ranks, cells are large enough for text
_ACROSS = 4  # panels per row
_PANEL = 200  # px
_NODE, _ASIDE = 0.17, 0.05  # relative to the circle's radius: a rank's disc, and the sideways offset of an arrow


def _rounds_of(plan: Plan) -> go.Figure:
    states = plan.states()
    rounds = [(), *plan.rounds]
    across = min(_ACROSS if plan.n <= _FEW else 3, len(rounds))
    rows = math.ceil(len(rounds) / across)
    side = _PANEL if plan.n <= _FEW else _PANEL * _ACROSS / 3
    title = f"<b>{plan.title}</b>, {plan.n} ranks, {counted(len(plan.rounds), 'round')}"
    looks = layout(title, rows * side + 40) | {
        "hovermode": "closest",
        "width": across * side + 20,
        "margin": {"l": 10, "r": 10, "t": 30, "b": 10},
        "showlegend": False,
        "shapes": [],
        "annotations": [],
    }
    data, reach = [], _reach(plan)
    axis = HIDDEN | {"range": [-reach, reach]}
    for number, (messages, state) in enumerate(zip(rounds, states)):
        row, column = divmod(number, across)
        suffix = "" if number == 0 else str(number + 1)
        looks[f"xaxis{suffix}"] = axis | {"domain": [column / across, (column + 1) / across], "anchor": f"y{suffix}"}
        looks[f"yaxis{suffix}"] = axis | {"domain": [1 - (row + 1) / rows, 1 - row / rows], "anchor": f"x{suffix}"}
        panel = _Panel(plan, state, messages, number, suffix, reach)
        looks["shapes"] += panel.shapes()
        looks["annotations"] += panel.annotations()
        data.append(panel.hover())
    return as_figure(data, looks)


class _Panel:
    """One round of a plan: `number` 0 is the initial state."""

    def __init__(self, plan: Plan, state: tuple[Holding, ...], messages: Round, number: int, suffix: str, reach: float):
        self._plan, self._state, self._messages, self._number, self._reach = plan, state, messages, number, reach
        self._axes = {"xref": f"x{suffix}", "yref": f"y{suffix}"}
        self._places = [_on_circle(rank, plan.n) for rank in range(plan.n)]
        self._received = {(message.target, piece) for message in messages for piece in message.pieces}

    def shapes(self) -> list[dict[str, Any]]:
        """A disc for each rank, and its cells: filled if it has the chunk."""
        drawn = []
        for rank, (x, y) in enumerate(self._places):
            disc = {"type": "circle", "x0": x - _NODE, "x1": x + _NODE, "y0": y - _NODE, "y1": y + _NODE}
            drawn.append(self._axes | disc | {"fillcolor": rank_colour(rank), "line": {"width": 0}})
            for piece, left, low, side in _cells(self._plan, rank):
                who = self._state[rank].get(piece, frozenset())
                share = len(who) / self._plan.n if self._adds else float(bool(who))
                thick = (rank, piece) in self._received
                cell = {"type": "rect", "x0": left, "x1": left + side, "y0": low, "y1": low + side}
                line = {"color": INK, "width": 2.5 if thick else 0.7}
                drawn.append(self._axes | cell | {"fillcolor": f"rgba(128,128,128,{0.25 * share:.2f})", "line": line})
        return drawn

    def annotations(self) -> list[dict[str, Any]]:
        """The name of the round, the numbers of the ranks, the contents of the cells, and the messages as arrows."""
        words = f"round {self._number}" if self._number else "start"
        texts = [self._text(-self._reach, self._reach, f"<b>{words}</b>", 11, xanchor="left", yanchor="top")]
        for rank, (x, y) in enumerate(self._places):
            texts.append(self._text(x, y, f"<b>{rank}</b>", 12, font_colour="#FFFFFF"))
            cells = _cells(self._plan, rank) if self._plan.n <= _FEW else ()
            texts += [
                self._text(left + side / 2, low + side / 2, f"<b>{self._content(rank, piece)}</b>", 10)
                for piece, left, low, side in cells
            ]
        for message in self._messages:
            texts += self._arrow(message)
        return texts

    def hover(self) -> dict[str, Any]:
        """Hover text: what each rank has."""
        texts = []
        for rank in range(self._plan.n):
            has = ", ".join(
                f"{_name(piece)}: {self._content(rank, piece)}"
                for piece, *_ in _cells(self._plan, rank)
                if piece in self._state[rank]
            )
            texts.append(f"rank {rank} has {has or 'nothing'}")
        xs, ys = zip(*self._places)
        axes = {"xaxis": self._axes["xref"], "yaxis": self._axes["yref"]}
        marks = {"type": "scatter", "mode": "markers", "x": xs, "y": ys, "marker": {"size": 24, "opacity": 0}}
        return axes | marks | {"hovertext": texts, "hoverinfo": "text"}

    @property
    def _adds(self) -> bool:
        return any(message.add for messages in self._plan.rounds for message in messages)

    def _content(self, rank: int, piece: Piece) -> str:
        who = self._state[rank].get(piece, frozenset())
        if not who:
            return ""
        if not self._adds:
            return _name(piece)
        return "Σ" if len(who) == self._plan.n else "".join(map(str, sorted(who)))

    def _arrow(self, message: Message) -> list[dict[str, Any]]:
        (x0, y0), (x1, y1) = self._places[message.source], self._places[message.target]
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        gap = _NODE + 0.06
        left, up = -_ASIDE * dy, _ASIDE * dx  # sideways, so that opposite arrows do not overlap
        start, end = (x0 + gap * dx + left, y0 + gap * dy + up), (x1 - gap * dx + left, y1 - gap * dy + up)
        axes = self._axes | {"axref": self._axes["xref"], "ayref": self._axes["yref"]}
        drawn = arrow(start, end, rank_colour(message.source), 1.6) | axes | {"arrowsize": 1.1}
        words = ("+" if message.add else "") + "".join(map(_name, message.pieces))
        near = 0.36  # position of the label on the arrow; there the labels of crossing arrows do not overlap
        label = self._text(x0 + near * (x1 - x0) - 0.2 * dy, y0 + near * (y1 - y0) + 0.2 * dx, words, 10)
        return [drawn, label]

    def _text(self, x: float, y: float, text: str, size: int, font_colour: str = INK, **more: Any) -> dict[str, Any]:
        place = self._axes | {"x": x, "y": y, "showarrow": False}
        return place | {"text": text, "font": {"size": size, "color": font_colour}} | more


def _cells(plan: Plan, rank: int) -> list[tuple[Piece, float, float, float]]:
    """The chunks that a rank may have, each with its cell: left edge, lower edge, side. They form a block outside the
    circle."""
    pieces = sorted({piece for holding in plan.goal for piece in holding})
    if isinstance(pieces[0], tuple):
        pieces = [piece for piece in pieces if piece[1] == rank]
    most, side = (2, 0.4) if plan.n <= _FEW else (4, 0.27)
    columns, rows = min(len(pieces), most), math.ceil(len(pieces) / most)
    x, y = _on_circle(rank, plan.n)
    left = x * 1.3 + (math.copysign(columns * side / 2, x) if abs(x) > 0.3 else 0.0) - columns * side / 2
    top = y * 1.3 + (math.copysign(rows * side / 2, y) if abs(y) > 0.3 else 0.0) + rows * side / 2
    return [(piece, left + k % most * side, top - (k // most + 1) * side, side) for k, piece in enumerate(pieces)]


def _reach(plan: Plan) -> float:
    """The distance of the outermost cells from the centre of a panel, plus a margin."""
    corners = [(left, low, side) for rank in range(plan.n) for _, left, low, side in _cells(plan, rank)]
    return 0.45 + max(max(abs(at), abs(at + side)) for left, low, side in corners for at in (left, low))


def _name(piece: Piece) -> str:
    return f"{piece[0]}›{piece[1]}" if isinstance(piece, tuple) else "ABCDEFGH"[piece]


def _on_circle(rank: int, n: int) -> tuple[float, float]:
    """The position of a rank. Ranks go clockwise; the first is at the upper left, or at the top if there are two or
    three."""
    angle = math.pi / 2 - 2 * math.pi * rank / n + (math.pi / n if n > 3 else 0.0)
    return round(math.cos(angle), 6), round(math.sin(angle), 6)


def _few_enough(n: int) -> int:
    if isinstance(n, int) and n > MOST:
        raise ValueError(f"n must be at most {MOST} for a picture, got {n}")
    return n


# ---- pictures


_MARKS = ("circle", "square", "diamond", "cross", "x", "triangle-up")


@checked
def broadcast(n: int = 4, by: str = "tree") -> go.Figure:
    """A broadcast to `n` ranks (2 to 8) `by` one_by_one, chain or tree."""
    return _rounds_of(plans.broadcast(_few_enough(n), by))


@checked
def reduce(n: int = 4, by: str = "tree") -> go.Figure:
    """A reduce of `n` ranks (2 to 8) `by` one_by_one or tree."""
    return _rounds_of(plans.reduce(_few_enough(n), by))


@checked
def all_reduce(n: int = 4, by: str = "ring") -> go.Figure:
    """An all-reduce of `n` ranks (2 to 8) `by` root (reduce, then broadcast), tree or ring."""
    return _rounds_of(plans.all_reduce(_few_enough(n), by))


@checked
def all_gather(n: int = 4) -> go.Figure:
    """An all-gather of `n` ranks (2 to 8) by a ring."""
    return _rounds_of(plans.all_gather(_few_enough(n)))


@checked
def reduce_scatter(n: int = 4) -> go.Figure:
    """A reduce-scatter of `n` ranks (2 to 8) by a ring."""
    return _rounds_of(plans.reduce_scatter(_few_enough(n)))


@checked
def all_to_all(n: int = 4) -> go.Figure:
    """An all-to-all of `n` ranks (2 to 8): each sends a different chunk to every other rank; `2›0` is from rank 2 to
    rank 0."""
    return _rounds_of(plans.all_to_all(_few_enough(n)))


@checked
def costs(n: int = 4) -> go.Figure:
    """The cost of each algorithm on `n` ranks: its rounds, and what the busiest rank sends, in messages."""
    every = [*plans.plans(n)][::-1]
    names = [plan.title.replace(": ", "<br>", 1) for plan in every]
    figures = (
        ("rounds", [len(plan.rounds) for plan in every]),
        ("sent by the busiest rank, in messages", [plan.busiest() for plan in every]),
    )
    data = []
    looks = plain_look() | {
        "hovermode": "closest",
        "height": 40 * len(every) + 60,
        "margin": {"l": 275, "r": 20, "t": 10, "b": 45},
        "showlegend": False,
        "yaxis": {"automargin": False, "tickfont": {"size": 10}},
    }
    for number, (what, values) in enumerate(figures):
        suffix = "2" if number else ""
        bars = {"type": "bar", "orientation": "h", "x": values, "y": names, "xaxis": f"x{suffix}", "yaxis": "y"}
        bars |= {"text": [f"{value:g}" for value in values], "textposition": "outside", "cliponaxis": False}
        data.append(bars | {"marker": {"color": INK, "opacity": 0.6}, "hoverinfo": "skip"})
        domain = [0.54 * number, 0.54 * number + 0.44]
        looks[f"xaxis{suffix}"] = SCALED | {"domain": domain, "range": [0, 1.15 * max(values)], "title": {"text": what}}
    return as_figure(data, looks)


@checked
def times(
    sizes: Sequence[float], measured: Mapping[str, Sequence[float]], modelled: Mapping[str, Sequence[float]]
) -> go.Figure:
    """Seconds versus bytes on logarithmic axes: `measured` as markers, `modelled` as dashed lines, one colour per
    name."""
    names = [*dict.fromkeys([*measured, *modelled])]
    colours = {name: rank_colour(number) for number, name in enumerate(names)}
    series = []
    for name, values in modelled.items():
        line = {"color": colours[name], "dash": "dash"}
        series.append(_series(name, "modelled", sizes, values) | {"mode": "lines", "line": line})
    for name, values in measured.items():
        marker = {"color": colours[name], "size": 9, "symbol": _MARKS[names.index(name) % len(_MARKS)]}
        series.append(_series(name, "measured", sizes, values) | {"mode": "markers", "marker": marker})
    shown = [1000 * value for values in (*measured.values(), *modelled.values()) for value in values]
    axis = SCALED | {"type": "log"}
    ticks = {"tickvals": [*sizes], "ticktext": [size(bytes_, 0) for bytes_ in sizes]}
    looks = plain_look() | {
        "hovermode": "closest",
        "height": 380,
        "margin": {"l": 70, "r": 20, "t": 30, "b": 50},
        "xaxis": axis | ticks | {"title": {"text": "message of one rank"}},
        "yaxis": axis | {"title": {"text": "milliseconds"}, "tickvals": _ticks(min(shown), max(shown))},
        "legend": {"bgcolor": "rgba(0,0,0,0)"},
    }
    return as_figure(series, looks)


def _series(name: str, kind: str, sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": f"{name}, {kind}",
        "x": [*sizes],
        "y": [1000 * value for value in seconds],
        "text": [size(bytes_, 0) for bytes_ in sizes],
        "hovertemplate": f"%{{text}}: %{{y:.3~g}} ms<extra>{name}, {kind}</extra>",
    }


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten, from below `low` to above `high`."""
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**power for power in tens for digit in (1, 2, 5)]
