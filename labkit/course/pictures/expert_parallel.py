"""Pictures of expert parallelism: the tokens of each rank, the slots of the experts, and what is sent between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.common.units import counted
from labkit.course.pictures.canvas import EVERY, HIDDEN, box, checked, ink, note, played, wide_layout
from labkit.figures import colours

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Expert", "dispatch", "route"]

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
    _check(choices, experts, top_k, factor)
    ranks = len(choices)
    slots = None if factor is None else math.ceil(factor * len(choices[0]) / experts)
    built = []
    for expert in range(experts):
        wanted = [[number for number, chosen in enumerate(of_rank) if chosen == expert] for of_rank in choices]
        taken = tuple(tuple(numbers[:slots]) for numbers in wanted)
        dropped = tuple(() if slots is None else tuple(numbers[slots:]) for numbers in wanted)
        built.append(Expert(expert * ranks // experts, taken, dropped, slots))
    return built


def _check(choices: Sequence[Sequence[int]], experts: int, top_k: int, factor: float | None) -> None:
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
    return {ends: [line[ends][0], line[ends][0] + part * (line[ends][1] - line[ends][0])] for ends in "xy"} | {
        "visible": part > 0
    }


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
