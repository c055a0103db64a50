"""The picture of the machine: a card per rank, with its memory and what it does, and between the cards what flows.

`film` computes from a state the shapes of the picture, as SVG, and how they change over one step in `FRAMES` frames:
the newest profiled step; before it the predicted one; before that nothing moves. A page plays the frames
(`static/machine.js`); `still` draws one of them where no script runs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
from msgspec import structs

from labkit.analysis.metrics import rank_throughput, step_seconds
from labkit.analysis.prediction import as_profiled, predicted_timelines
from labkit.analysis.profiled import MUTUAL, ahead, aligned, newest
from labkit.analysis.theory.formulas import states, theory
from labkit.common.text import escape
from labkit.common.units import counted, milliseconds, size
from labkit.figures import colours
from labkit.record.documents import PredictedStep, PredictedTimeline
from labkit.record.events import Call, MemoryStep, Timeline
from labkit.record.state import RunState, per_revision
from labkit.record.writer import OWNERS

Attributes = dict[str, str]
Changes = dict[str, Attributes]  # by the name of a shape; the attribute "text" is its text

FRAMES = 120  # of a film
_MESSAGES = ("send", "recv")
_LEAST = 3  # frames that a collective is shown, however short it was
_SEEN = 0.05  # of the limit: less is no more than a line in a tank
_BETWEEN = "other"  # the phase of what belongs to no other one


# ---- one step of every rank


@dataclass(frozen=True)
class Held:
    """Bytes by owner over a step, from each of `times` (seconds) on."""

    times: Sequence[float]
    owners: Mapping[str, Sequence[float]]

    @cached_property
    def totals(self) -> list[float]:
        """Bytes of all owners from each time on."""
        return [sum(sizes) for sizes in zip(*self.owners.values())]

    def most(self, start: float, end: float) -> dict[str, float]:
        """Bytes by owner at the moment between two times at which their sum is largest."""
        first = max(0, bisect_right(self.times, start) - 1)
        last = max(first + 1, bisect_right(self.times, end))
        index = max(range(first, last), key=self.totals.__getitem__)
        return {owner: sizes[index] for owner, sizes in self.owners.items()}


@dataclass(frozen=True)
class Communication:
    """A collective or message of a step: its ranks, and when the last of them began it."""

    call: Call
    ranks: tuple[int, ...]
    all_began: float

    def waits(self, moment: float) -> bool:
        """Whether the rank waits for another one at a moment within the call."""
        return self.call.op == "recv" or (self.call.op in MUTUAL and moment < self.all_began)


@dataclass(frozen=True)
class Acted:
    """One step of one rank, on the axis that all ranks share: when it computed what, and its communication."""

    timeline: Timeline
    comm: list[Communication]


@dataclass(frozen=True)
class Scene:
    """One step of all `ranks`, of `seconds`, and what it is, in words; if it is not `timed`, operations are counted
    instead. Without a step, `acted` is empty, and `held` has one moment: what each rank holds, or will hold by formula.
    `nodes` are the ranks of each node by its host, if there are several; `limit` is the memory of a device in bytes, if
    it is known."""

    ranks: int
    nodes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    limit: float | None = None
    what: str = ""
    seconds: float = 0.0
    timed: bool = True
    acted: Mapping[int, Acted] = field(default_factory=dict)
    held: Mapping[int, Held] = field(default_factory=dict)

    @cached_property
    def moments(self) -> list[float]:
        """When the frames begin, and when the last one ends; one frame if nothing moves."""
        moves = self.acted or any(len(held.times) > 1 for held in self.held.values())
        return [self.seconds * number / FRAMES for number in range(FRAMES + 1)] if moves else [0.0, 0.0]

    @cached_property
    def most(self) -> float:
        """The most bytes that a rank holds; 1 if nothing is known."""
        return max((max(held.totals) for held in self.held.values()), default=0.0) or 1.0

    @cached_property
    def full(self) -> float:
        """The bytes of a full tank: the limit, if it is near enough for a rank's memory to be seen."""
        return self.limit if self.limit and self.most > _SEEN * self.limit else self.most

    @cached_property
    def peak(self) -> int:
        """The frame in which all ranks together hold most."""
        held = [
            sum(sum(held.most(start, end).values()) for held in self.held.values())
            for start, end in pairwise(self.moments)
        ]
        return held.index(max(held))

    @cached_property
    def grid(self) -> Grid:
        """Where the cards stand: stages of a pipeline side by side, and so the ranks of the innermost dimension of a
        mesh, or of a node."""
        comm = [(number, part) for number, acted in self.acted.items() for part in acted.comm if part.ranks]
        steps = {abs(part.ranks[0] - number) for number, part in comm if part.call.op in _MESSAGES}
        apart = min(steps, default=0)
        if apart and self.ranks % apart == 0 and self.ranks // apart <= _MOST:
            return Grid(self.ranks, self.ranks // apart, apart, framed=bool(self.nodes))
        inner = [len(part.ranks) for _, part in comm if len(part.ranks) > 1 and part.ranks[1] - part.ranks[0] == 1]
        on_one = len(next(iter(self.nodes.values()), range(self.ranks)))
        columns = min([on_one, *(length for length in inner if 1 < length < self.ranks)])
        if columns < 2 or columns > _MOST or columns == self.ranks == _MOST:
            columns = next((number for number in (4, 8, 6, 5, 7) if self.ranks % number == 0), _MOST)
        return Grid(self.ranks, min(self.ranks, columns), framed=bool(self.nodes))

    @cached_property
    def frames(self) -> list[Changes]:
        """What changes from frame to frame; the first has everything that ever changes."""
        cards, flows = [_Card(self, number) for number in range(self.ranks)], _Flows(self)
        frames: list[Changes] = []
        before: Changes = {}
        for number, (start, end) in enumerate(pairwise(self.moments)):
            now = flows.at(number)
            for card in cards:
                now.update(card.at(start, end))
            new = {name: _new(attributes, before.get(name, {})) for name, attributes in now.items()}
            frames.append({name: attributes for name, attributes in new.items() if attributes})
            before = now
        return frames


def scene(state: RunState) -> Scene:
    """The newest profiled step; before it the predicted one; before that, what the ranks hold. It stays the same object
    until another step is profiled or predicted."""
    step, plan, world = newest(state), state.prediction, min(state.listed_ranks[-1] + 1, _CARDS)
    ranks = [rank for rank in state.ranks.values() if rank.rank < world]
    found = {rank.rank: rank.timelines[step] for rank in ranks if step in rank.timelines}
    measured = {number: state.ranks[number].memory_step for number in found}
    held = {} if found or (plan and plan.classes) else _holding(state)
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank.host or "", []).append(rank.rank)
    nodes = nodes if len(nodes) > 1 else {}
    limit = min((limit for number in state.ranks if (limit := state.device_memory(number))), default=None)
    made_of = [*found.items(), *measured.items(), plan, world, nodes, limit, held]
    _, (made_before, known) = state.derived.get(scene, (0, ([], Scene(0))))
    if made_of == made_before:
        same: Scene = known
        return same
    shown = Scene(world, nodes, limit, held={number: _still(owners) for number, owners in held.items()})
    if step is not None and found:
        shifts, _ = aligned(found, ahead(state))
        moved = {number: _moved(timeline, shifts[number]) for number, timeline in found.items()}
        memory = {number: _stretched(those, moved[number]) for number, those in measured.items()}
        recorded = all(timeline.calls_only for timeline in moved.values())
        what = "the recorded collectives" if recorded else f"step {step:,}, measured"
        shown = _of_step(shown, what, moved, memory)
    elif plan and plan.classes and any(min(part.ranks, default=world) < world for part in plan.classes):
        timelines = {number: step for number, step in predicted_timelines(plan).items() if number < world}
        traced = {number: part for part in plan.classes for number in part.ranks if number < world}
        placed = {
            number: _placed(as_profiled(timeline), number, traced[number].ranks[0])
            for number, timeline in timelines.items()
        }
        if placed:
            memory = {number: _stretched(part.step, placed[number]) for number, part in traced.items()}
            shown = _of_step(shown, "a step as predicted (simulated)", placed, memory)
        else:
            counted_steps = {number: _counted(part.step) for number, part in traced.items()}
            memory = {number: _stretched(part.step, counted_steps[number]) for number, part in traced.items()}
            shown = replace(_of_step(shown, "a step as predicted (traced)", counted_steps, memory), timed=False)
    state.derived[scene] = 0, (made_of, shown)
    return shown


def _of_step(shown: Scene, what: str, timelines: Mapping[int, Timeline], held: Mapping[int, Held | None]) -> Scene:
    known = {number: those for number, those in held.items() if those}
    numbered = {number: [*_numbered(number, timeline.comm)] for number, timeline in timelines.items()}
    all_began: dict[Any, float] = {}
    for keys, timeline in zip(numbered.values(), timelines.values()):
        for key, call in zip(keys, timeline.comm):
            all_began[key] = max(all_began.get(key, 0.0), call.start)
    acted = {}
    for number, timeline in timelines.items():
        calls = zip(numbered[number], timeline.comm)
        comm = [Communication(call, tuple(call.ranks or ()), all_began[key]) for key, call in calls]
        acted[number] = Acted(timeline, comm)
    seconds = max(timeline.seconds for timeline in timelines.values())
    return replace(shown, what=what, seconds=seconds, acted=acted, held=known)


def _numbered(number: int, calls: Iterable[Call]) -> Iterator[Any]:
    """For each call of a rank what it has in common with those of other ranks that meet in it."""
    counts: dict[Any, int] = {}
    for call in calls:
        ranks = tuple(call.ranks or ())
        ends = (number, *ranks) if call.op == "send" else (*ranks, number)
        common: Any = ends if call.op in _MESSAGES else (call.op, ranks)
        counts[common] = counts.get(common, 0) + 1
        yield common, counts[common]


def _moved(timeline: Timeline, shift: float) -> Timeline:
    """A profiled step on the axis of all ranks."""
    return structs.replace(
        timeline,
        seconds=timeline.seconds + shift,
        phases=[(name, start + shift, end + shift) for name, start, end in timeline.phases],
        comm=[structs.replace(call, start=call.start + shift, end=call.end + shift) for call in timeline.comm],
        busy=[(start + shift, end + shift) for start, end in timeline.busy],
    )


def _placed(timeline: Timeline, number: int, traced: int) -> Timeline:
    """The simulated step of a rank that was traced, with the groups of another rank that does the same work."""
    return structs.replace(
        timeline, comm=[structs.replace(call, ranks=_group(call, number, traced)) for call in timeline.comm]
    )


def _counted(step: PredictedStep) -> Timeline:
    """A traced step as a timeline of operations, without communication, whose moments are not known."""
    return as_profiled(PredictedTimeline(step.seconds, step.phases, [], [(0.0, step.seconds)], {}))


def _group(call: Call, number: int, traced: int) -> list[int] | None:
    """The ranks of its group, which are equally far apart in a mesh, or the other end of its message."""
    ranks = sorted(call.ranks or ())
    if call.op in _MESSAGES:
        return [rank + number - traced for rank in ranks]
    apart = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if not apart:
        return ranks or None
    first = number - (number // apart) % len(ranks) * apart
    return [first + apart * place for place in range(len(ranks))]


def _stretched(step: MemoryStep | PredictedStep | None, timeline: Timeline) -> Held | None:
    """The memory of a step on the time axis of another one: each phase is stretched to the same phase of the other. The
    times of a traced step are numbers of operations, and memory may have been measured in another step."""
    if step is None or not step.times or not step.owners:
        return None
    if any(len(sizes) != len(step.times) for sizes in step.owners.values()):
        return None
    before, after = ([span for span in phases if span[0] != _BETWEEN] for phases in (step.phases, timeline.phases))
    knots = [(0.0, timeline.phases[0][1] if timeline.phases else 0.0)]
    if [name for name, *_ in before] == [name for name, *_ in after]:
        for (_, *old), (_, *new) in zip(before, after):
            knots += zip(old, new)
    knots.append((max(step.seconds, knots[-1][0]), timeline.seconds))
    places, moments = zip(*knots)
    return Held(numpy.interp(step.times, places, moments).tolist(), step.owners)


def _holding(state: RunState) -> dict[int, dict[str, float]]:
    """Bytes by owner that each rank holds now; of a run that has not begun, its model states by formula."""
    held: dict[int, dict[str, float]] = {number: {**rank.owners} for number, rank in state.ranks.items() if rank.owners}
    if held or not state.asked:
        return held
    return {
        number: {"parameters": own.parameters, "gradients": own.gradients, "optimizer": own.optimizer}
        for number, own in enumerate(states(state.asked) or ())
    }


def _still(owners: Mapping[str, float]) -> Held:
    return Held([0.0], {owner: [count] for owner, count in owners.items()})


# ---- where the cards stand

_WIDTH = 860  # units of the picture, about as many pixels in a notebook
_ARCS, _LEGEND = 22.0, 24.0  # above and below the cards
_FULL = 16  # ranks whose cards have words
_CARDS = 64  # the first ranks, if there are more
_MOST = 8  # cards in a row
_NARROW, _WIDE = 120.0, 180.0  # width of a card
_FRAME = 6.0  # between a node and its cards
_LETTER = 6.0  # units of a letter of a status
_NEXT = 0.7  # units between two stretches of a strip


@dataclass(frozen=True)
class Grid:
    """The cards in rows and columns, with room for the frames of nodes if they are `framed`. Rank r stands in column
    (r // `apart`) % `columns`."""

    ranks: int
    columns: int
    apart: int = 1
    framed: bool = False

    @property
    def rows(self) -> int:
        return math.ceil(self.ranks / self.columns)

    @property
    def width(self) -> float:
        """Of a card."""
        return min(270.0, (_WIDTH - 16) / (1.42 * self.columns - 0.42))

    @property
    def height(self) -> float:
        """Of a card."""
        return {1: 150.0, 2: 98.0}.get(self.rows, 88.0 if self.ranks <= _FULL else 44.0)

    @property
    def gap(self) -> tuple[float, float]:
        """Between two columns, and between two rows."""
        across = (_WIDTH - 16 - self.columns * self.width) / max(1, self.columns - 1)
        return min(250.0, across), 38.0 if self.ranks <= _FULL else 14.0

    @property
    def above(self) -> float:
        """The room above a row: for arcs between cards that are no neighbours."""
        return _ARCS if self.columns > 2 or self.framed else 6.0

    @property
    def total(self) -> float:
        """The height of the picture."""
        return self.above + self.rows * self.height + (self.rows - 1) * self.gap[1] + _LEGEND

    def place(self, rank: int) -> tuple[int, int]:
        """Row and column of a rank."""
        column = (rank // self.apart) % self.columns
        row = rank // (self.apart * self.columns) * self.apart + rank % self.apart
        return row, column

    def corner(self, rank: int) -> tuple[float, float]:
        """The upper left corner of a card."""
        row, column = self.place(rank)
        across, down = self.gap
        used = self.columns * self.width + (self.columns - 1) * across
        left = (_WIDTH - used) / 2
        return left + column * (self.width + across), self.above + row * (self.height + down)


# ---- the shapes


@dataclass(frozen=True)
class Film:
    """Shapes by name, each with its tag and attributes; how they change from frame to frame of a step that took
    `seconds`, or so many operations if it is not `timed`; `peak` is the frame with the most memory; `heads` move along
    a strip of `length` units meanwhile. `what` says which step it is, `label` describes the picture."""

    width: float
    height: float
    shapes: dict[str, tuple[str, Attributes]]
    frames: list[Changes]
    seconds: float
    timed: bool
    peak: int
    heads: list[str]
    length: float
    what: str
    label: str


class _Picture:
    """Collects shapes."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[str, Attributes]] = {}

    def rectangle(self, name: str, x: float, y: float, width: float, height: float, **more: str) -> None:
        place = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
        self.shapes[name] = "rect", {**{key: f"{value:.1f}" for key, value in place.items()}, **_named(more)}

    def text(self, name: str, x: float, y: float, text: str, **more: str) -> None:
        self.shapes[name] = "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text": text, **_named(more)}

    def path(self, name: str, course: str, **more: str) -> None:
        self.shapes[name] = "path", {"d": course, "fill": "none", **_named(more)}


def _named(attributes: Mapping[str, str]) -> Attributes:
    return {name.replace("_", "-"): value for name, value in attributes.items()}


@per_revision
def film(state: RunState) -> Film:
    """The picture of a state, and its course over one step."""
    shown = scene(state)
    picture, cards = _Picture(), [_Card(shown, number) for number in range(shown.ranks)]
    _draw_nodes(picture, shown)
    _Flows(shown).draw(picture)
    for card in cards:
        card.draw(picture, state)
    _legend(picture, shown, state.world_size)
    heads = [name for card in cards if (name := f"head{card.rank}") in picture.shapes]
    label = f"{counted(shown.ranks, 'rank')}: " + "; ".join(card.in_words(state) for card in cards)
    return Film(
        width=_WIDTH,
        height=shown.grid.total,
        shapes=picture.shapes,
        frames=shown.frames,
        seconds=shown.seconds,
        timed=shown.timed,
        peak=shown.peak,
        heads=heads,
        length=cards[0].strip,
        what=shown.what,
        label=label,
    )


def _new(attributes: Attributes, before: Attributes) -> Attributes:
    return {name: value for name, value in attributes.items() if before.get(name) != value}


class _Card:
    """The card of a rank: its name, a tank of memory, what it does, how fast it is, and the strip of the step."""

    def __init__(self, shown: Scene, rank: int):
        self.rank, self._shown, places = rank, shown, shown.grid
        self._x, self._y = places.corner(rank)
        self._width, self._height = places.width, places.height
        self._words = places.ranks <= _FULL
        self._tank = min(44.0, 0.26 * places.width) if self._words else places.width - 44
        self.strip = places.width - 16
        self._narrow = places.width < _NARROW  # the pill stands above the tank, not beside it
        self._pill = places.width - 16 if self._narrow else places.width - 24 - self._tank

    def _inside(self) -> tuple[float, float, float, float]:
        """x, y, width and height of the tank."""
        if not self._words:
            return self._x + 32, self._y + 8, self._tank, self._height - 16
        above = 48 if self._narrow else 26
        return self._x + 8, self._y + above, self._tank, self._height - above - 22

    def draw(self, picture: _Picture, state: RunState) -> None:
        """Adds the shapes that are the same in all frames, and those that frames change."""
        rank, x, y = self.rank, self._x, self._y
        frame = {"rx": "8", "fill": "var(--labkit-card, none)", "stroke": "currentColor", "stroke_opacity": "0.28"}
        picture.rectangle(f"card{rank}", x, y, self._width, self._height, **frame)
        picture.rectangle(f"mark{rank}", x + 8, y + 8, 9, 9, rx="4.5", fill=colours.rank_colour(rank))
        name = f"rank {rank}" if self._words else f"{rank}"
        picture.text(f"name{rank}", x + 21, y + 17, name, font_weight="600", font_size="12.5")
        status, tone = _status(state, rank)
        status = _fitting(status, self._width - 37 - 7.5 * len(name))
        if self._words and status:
            look = {"fill": tone, "font_weight": "600"} if tone else {"opacity": "0.75"}
            right = x + self._width - 8
            picture.text(f"status{rank}", right, y + 17, status, text_anchor="end", font_size="10.5", **look)
        left, top, width, height = self._inside()
        for owner in OWNERS:
            if any(owner in held.owners for held in self._shown.held.values()):
                picture.rectangle(f"{owner}{rank}", left, top + height, width, 0, fill=colours.OWNERS[owner])
        picture.rectangle(
            f"tank{rank}", left, top, width, height, rx="3", fill="none", stroke="currentColor", stroke_opacity="0.45"
        )
        if not self._words:
            return
        beside = left + width + 8
        pill = (self._x + 8, self._y + 25) if self._narrow else (beside, top)
        picture.rectangle(f"pill{rank}", *pill, self._pill, 18, rx="4", fill="none")
        picture.text(f"does{rank}", pill[0] + 5, pill[1] + 13, "", font_weight="600", **{"class": "labkit-does"})
        line = top + (14 if self._narrow else 36)
        picture.text(f"bytes{rank}", beside, line, "", font_size="11" if self._narrow else "12.5")
        speed = self._speed(state)
        if line + 17 > y + self._height - 22 and self._width > 200:  # no room for lines below: beside
            right = x + self._width - 8
            for words in speed[:1]:
                picture.text(f"speed{rank}-0", right, line, words, text_anchor="end", font_size="11.5", opacity="0.8")
        elif not self._narrow:
            for number, words in enumerate(speed):
                below = line + 18 + 17 * number
                if below <= y + self._height - 22:
                    letters = _letters(words, self._pill, 0.53)
                    picture.text(f"speed{rank}-{number}", beside, below, words, font_size=letters, opacity="0.8")
        self._draw_strip(picture)

    def _draw_strip(self, picture: _Picture) -> None:
        shown, left, foot = self._shown, self._x + 8, self._y + self._height
        acted = shown.acted.get(self.rank)
        if acted is None or not shown.seconds:
            return
        along = self.strip / shown.seconds
        for number, (phase, start, end) in enumerate(acted.timeline.phases):
            begin, length = start * along, (end - start) * along
            if phase != _BETWEEN and length > 0.3:
                colour, name = colours.PHASES.get(phase, colours.INK), f"phase{self.rank}-{number}"
                picture.rectangle(name, left + begin, foot - 15, length, 6, fill=colour)
        drawn = -1.0
        for number, part in enumerate(acted.comm):
            begin = part.call.start * along
            length = min(part.call.end, shown.seconds) * along - begin
            if begin + length < drawn + _NEXT:
                continue  # too close to the one before to be seen
            colour, name = colours.OPERATIONS.get(part.call.op, colours.OTHER_OPERATION), f"comm{self.rank}-{number}"
            picture.rectangle(name, left + begin, foot - 8, max(1.0, length), 3.5, fill=colour)
            drawn = begin + length
        look = {"fill": "currentColor", "class": "labkit-head-of-step"}
        picture.rectangle(f"head{self.rank}", left - 0.75, foot - 17, 1.5, 14, **look)

    def at(self, start: float, end: float) -> Changes:
        """What changes in a frame."""
        changes: Changes = {}
        shown, held = self._shown, self._shown.held.get(self.rank)
        left, top, width, height = self._inside()
        if held:
            owned, filled = held.most(start, end), 0.0
            for owner in OWNERS:
                if owner not in owned:
                    continue
                share = owned[owner] / shown.full
                if self._words:
                    upper, lower = round(top + height * (1 - filled - share)), round(top + height * (1 - filled))
                    changes[f"{owner}{self.rank}"] = {"y": f"{upper}", "height": f"{lower - upper}"}
                else:
                    changes[f"{owner}{self.rank}"] = {
                        "x": f"{left + width * filled:.0f}",
                        "width": f"{width * share:.0f}",
                        "y": f"{top:.0f}",
                        "height": f"{height:.0f}",
                    }
                filled += share
            if self._words:
                of = f" of {size(shown.limit)}" if shown.limit and self._width > _WIDE else ""
                changes[f"bytes{self.rank}"] = {"text": size(sum(owned.values())) + of}
        if self._words and self.rank in shown.acted:
            word, colour = _doing(shown.acted[self.rank], start, end)
            changes[f"does{self.rank}"] = {
                "text": word,
                "fill": colours.ink_on(colour) if colour else "currentColor",
                "font-size": _letters(word, self._pill - 10, 0.58),
            }
            changes[f"pill{self.rank}"] = {"fill": colour or "none"}
        return changes

    def _speed(self, state: RunState) -> list[str]:
        """How fast the rank is, and before its first step what it will send."""
        seconds, rate = step_seconds(state, self.rank), rank_throughput(state, self.rank)
        if seconds:
            return [f"{milliseconds(seconds)}/step", *([f"{rate:,.0f} samples/s"] if rate else [])]
        planned = state.prediction.ranks if state.prediction else []
        sent = next((rank.comm_bytes_per_step for rank in planned if rank.rank == self.rank), None)
        if sent is None and state.asked and not state.prediction:
            flows = theory(state.asked)
            sent = None if flows is None else sum(flow.theory for flow in flows) / state.world_size
        return [] if sent is None else [f"sends {size(sent)}/step"]

    def in_words(self, state: RunState) -> str:
        """The card for a reader who does not see it."""
        held = self._shown.held.get(self.rank)
        most = f", up to {size(max(held.totals))}" if held else ""
        status, _ = _status(state, self.rank)
        return f"rank {self.rank} {status}{most}" + "".join(f", {words}" for words in self._speed(state))


def _letters(words: str, room: float, wide: float) -> str:
    """The size of letters with which words take at most `room` units: 11.5, or less; a letter of size 1 is `wide`."""
    return f"{min(11.5, room / (wide * max(1, len(words)))):.1f}"


WAITS = "#9a9a9a"  # the colour of a rank that waits for others


def _doing(acted: Acted, start: float, end: float) -> tuple[str, str]:
    """What a rank does in a frame, and the colour: a phase of computation, waiting, or a collective that nothing
    hides."""
    middle = (start + end) / 2
    phases = acted.timeline.phases
    index = next((index for index, (_, begin, stop) in enumerate(phases) if begin <= middle < stop), None)
    name = phases[index][0] if index is not None else ""
    under_way = [part for part in acted.comm if part.call.start < end and part.call.end > start]
    computes = any(begin < end and stop > start for begin, stop in acted.timeline.busy)
    if under_way and not computes:
        part = min(under_way, key=lambda part: part.waits(middle))  # of several, one that is not held up
        if part.waits(middle):
            whom = f"rank {part.ranks[0]}" if part.call.op in _MESSAGES and part.ranks else "others"
            return f"waits for {whom}", WAITS
        return part.call.op, colours.OPERATIONS.get(part.call.op, colours.OTHER_OPERATION)
    if index is None or name == _BETWEEN:
        return "", ""
    alike = [number for number, (other, *_) in enumerate(phases) if other == name]
    which = f" {alike.index(index) + 1}/{len(alike)}" if len(alike) > 1 and name in ("forward", "backward") else ""
    return name + which, colours.PHASES.get(name, colours.INK)


def _fitting(status: str, room: float) -> str:
    """As many of the first words as there are units of room for, without the name of a vendor; of a single long word
    its beginning."""
    most = int(room / _LETTER)
    status = status.removeprefix("NVIDIA ")
    while len(status) > most and " " in status:
        status = status[: status.rindex(" ")]
    return status if len(status) <= most else f"{status[: most - 1]}…" if most > 4 else ""


_BAD, _LATE = "var(--labkit-bad-ink, #c04f00)", "var(--labkit-slow-ink, #8a5600)"


def _status(state: RunState, number: int) -> tuple[str, str]:
    """What stands beside the name of a rank, and its colour if it is no mere fact: a failure or a wait, else its
    device."""
    rank = state.ranks.get(number)
    if rank is None:
        return state.spec.device or "", ""
    if rank.error is not None:
        return rank.error.type or "failed", _BAD
    if rank.exit_code:
        return f"exit code {rank.exit_code}", _BAD
    if rank.waiting is not None and not state.over:
        return f"waits {max(0.0, (state.now or 0.0) - rank.waiting.since):.0f} s", _LATE
    return rank.device_name or rank.device, ""


def _draw_nodes(picture: _Picture, shown: Scene) -> None:
    """A frame around the cards of each node, unless other cards stand between them."""
    places, boxes = shown.grid, {}
    for host, ranks in shown.nodes.items():
        corners = [places.corner(rank) for rank in ranks]
        left, top = (min(values) - _FRAME for values in zip(*corners))
        right, bottom = (max(values) + _FRAME for values in zip(*corners))
        boxes[host] = left, top, right + places.width, bottom + places.height
        inside = [rank for rank in range(places.ranks) if _is_inside(places.corner(rank), boxes[host])]
        if inside != [*ranks]:
            return
    for number, (host, (left, top, right, bottom)) in enumerate(boxes.items()):
        look = {"fill": "none", "stroke": "currentColor", "stroke_opacity": "0.4", "stroke_dasharray": "3 4"}
        picture.rectangle(f"node{number}", left, top, right - left, bottom - top, rx="12", **look)
        picture.text(f"host{number}", left + 10, top - 4, host, font_size="10.5", opacity="0.85")


def _is_inside(corner: tuple[float, float], box: tuple[float, float, float, float]) -> bool:
    left, top, right, bottom = box
    return left < corner[0] < right and top < corner[1] < bottom


def _legend(picture: _Picture, shown: Scene, ranks: int) -> None:
    """The owners of memory, the collectives, and how many of the `ranks` are not shown, below the cards."""
    owners = [owner for owner in OWNERS if any(max(held.owners.get(owner, [0])) for held in shown.held.values())]
    ops = sorted({part.call.op for acted in shown.acted.values() for part in acted.comm})
    entries = [(owner, colours.OWNERS[owner], 3.0) for owner in owners]
    entries += [(op, colours.OPERATIONS.get(op, colours.OTHER_OPERATION), 8.0) for op in ops]
    x, y = 10.0, shown.grid.total - 6
    for number, (name, colour, radius) in enumerate(entries):
        picture.rectangle(f"key{number}", x, y - 8, 9, 9, rx=f"{radius / 2}", fill=colour)
        picture.text(f"key-name{number}", x + 13, y, name, font_size="10.5", opacity="0.85")
        x += 26 + 6.0 * len(name)
    if ranks > shown.ranks:
        words = f"and {ranks - shown.ranks:,} more ranks"
        picture.text("more", _WIDTH - 10, y, words, font_size="10.5", text_anchor="end")


# ---- what flows

_Link = tuple[int, int]  # from one rank to another


class _Flows:
    """The links between cards, one for each direction, and which of them are used in a frame."""

    def __init__(self, shown: Scene):
        self._places = places = shown.grid
        self._active: dict[int, dict[_Link, tuple[str, float]]] = {}  # by frame and link: what, how many bytes
        self._pairs: set[_Link] = set()
        for number, acted in shown.acted.items():
            for part in acted.comm:
                begin = part.all_began if part.call.op in MUTUAL else part.call.start
                used = {pair for pair in _pairs(number, part, places) if min(pair) >= 0 and max(pair) < places.ranks}
                self._pairs |= used
                for frame in _frames(shown.seconds, begin, part.call.end):
                    active = self._active.setdefault(frame, {})
                    active.update(dict.fromkeys(used, (part.call.op, float(part.call.bytes or 0))))
        counts = [count for active in self._active.values() for _, count in active.values()]
        self._most = max(counts, default=0.0)

    def draw(self, picture: _Picture) -> None:
        """Adds a line for each direction of each link, and a place for words between neighbours."""
        for source, target in sorted(self._pairs):
            course = self._course(source, target)
            if (target, source) not in self._pairs or source < target:
                picture.path(
                    f"link{source}-{target}", course, stroke="currentColor", stroke_opacity="0.14", stroke_width="2"
                )
            dots = {"stroke": "none", "stroke_linecap": "round", "stroke_dasharray": "0.1 9", "class": "labkit-flow"}
            picture.path(f"flow{source}-{target}", course, **dots)
        for source, target in sorted(self._pairs):
            if (place := self._between(source, target)) and (source < target or (target, source) not in self._pairs):
                (x, y), ends = place, _ends(source, target)
                picture.text(f"says{ends}", x, y, "", text_anchor="middle", font_size="11", font_weight="600")
                picture.text(f"size{ends}", x, y + 34, "", text_anchor="middle", font_size="10.5", opacity="0.8")

    def at(self, frame: int) -> Changes:
        """The links that are used in a frame."""
        active = self._active.get(frame, {})
        changes: Changes = {}
        for pair in self._pairs:
            op, count = active.get(pair, ("", 0.0))
            share = math.sqrt(count / self._most) if self._most else 0.0
            colour = colours.OPERATIONS.get(op, colours.OTHER_OPERATION) if op else "none"
            changes[f"flow{pair[0]}-{pair[1]}"] = {
                "stroke": colour,
                "stroke-width": f"{3 + 4 * share:.1f}" if op else "0",
            }
            if self._between(*pair):
                ends = _ends(*pair)
                if op or f"says{ends}" not in changes:
                    changes[f"says{ends}"] = {"text": op}
                    changes[f"size{ends}"] = {"text": size(count) if count else ""}
        return changes

    def _course(self, source: int, target: int) -> str:
        """The path from one card to another: straight to a neighbour, an arc above a row otherwise."""
        width, height = self._places.width, self._places.height
        (x1, y1), (x2, y2) = self._places.corner(source), self._places.corner(target)
        (row1, column1), (row2, column2) = self._places.place(source), self._places.place(target)
        apart = 5.0 if source < target else -5.0
        if row1 == row2 and abs(column1 - column2) == 1:
            y = y1 + height / 2 + apart
            ends = (x1 + width, x2) if x1 < x2 else (x1, x2 + width)
            return f"M{ends[0]:.1f} {y:.1f}L{ends[1]:.1f} {y:.1f}"
        if column1 == column2 and abs(row1 - row2) == 1:
            x = x1 + width / 2 + apart
            ends = (y1 + height, y2) if y1 < y2 else (y1, y2 + height)
            return f"M{x:.1f} {ends[0]:.1f}L{x:.1f} {ends[1]:.1f}"
        if row1 == row2:
            rise = min(_ARCS - 4.0, 8.0 + 3.0 * abs(column1 - column2)) * 1.33
            left, right = x1 + width / 2 + apart, x2 + width / 2 + apart
            return f"M{left:.1f} {y1:.1f}C{left:.1f} {y1 - rise:.1f} {right:.1f} {y1 - rise:.1f} {right:.1f} {y1:.1f}"
        return f"M{x1 + width / 2 + apart:.1f} {y1 + height / 2:.1f}L{x2 + width / 2 + apart:.1f} {y2 + height / 2:.1f}"

    def _between(self, source: int, target: int) -> tuple[float, float] | None:
        """Where words have room between two neighbours of a row; None where they have none."""
        (row1, column1), (row2, column2) = self._places.place(source), self._places.place(target)
        if row1 != row2 or abs(column1 - column2) != 1 or self._places.gap[0] < 62:
            return None
        left, top = min(self._places.corner(source), self._places.corner(target))
        return left + self._places.width + self._places.gap[0] / 2, top + self._places.height / 2 - 15


def _ends(source: int, target: int) -> str:
    """The two ends of a link in the name of a shape, whichever way it is used."""
    return f"{min(source, target)}-{max(source, target)}"


def _frames(seconds: float, begin: float, end: float) -> range:
    """The frames in which something is shown that lasts from `begin` to `end`: a few at least."""
    if not seconds:
        return range(0)
    first = min(FRAMES - 1, max(0, int(begin / seconds * FRAMES)))
    last = min(FRAMES, max(first + _LEAST, math.ceil(end / seconds * FRAMES)))
    return range(first, last)


def _pairs(number: int, part: Communication, places: Grid) -> Iterator[_Link]:
    """From which rank to which data flow, for the part of a rank in a collective: around a ring of the group, to and
    from its first rank, or between all of them, as long as these are few enough to be told apart."""
    op, ranks = part.call.op, part.ranks
    if op == "send":
        yield from ((number, peer) for peer in ranks)
    if op in _MESSAGES or number not in ranks or len(ranks) < 2:
        return
    if op == "all_to_all" and places.ranks <= _FULL:
        yield from ((number, peer) for peer in ranks if peer != number)
    elif op in ("broadcast", "scatter"):
        yield from ((ranks[0], peer) for peer in ranks if peer == number != ranks[0])
    elif op in ("gather", "reduce"):
        yield from ((peer, ranks[0]) for peer in ranks if peer == number != ranks[0])
    else:
        ring = _ring(ranks, places)
        following = ring[(ring.index(number) + 1) % len(ring)]
        yield from ((number, following),) if op == "all_gather" else ((following, number),)
        if op in ("all_reduce", "all_to_all"):
            yield number, following


def _ring(ranks: Sequence[int], places: Grid) -> list[int]:
    """The ranks of a group in an order in which neighbours of the ring stand side by side: every second row
    backwards."""
    rows: dict[int, list[int]] = {}
    for rank in ranks:
        rows.setdefault(places.place(rank)[0], []).append(rank)
    order: list[int] = []
    for turn, (_, those) in enumerate(sorted(rows.items())):
        order += sorted(those, key=lambda rank: places.place(rank)[1], reverse=turn % 2 == 1)
    return order


# ---- the film for a page, and single frames where no script runs

_STATIC = Path(__file__).parent / "static"


def player() -> str:
    """The JavaScript that plays a film: a class `Stage`."""
    return (_STATIC / "machine.js").read_text(encoding="utf-8")


def style() -> str:
    """The style sheet of the picture and its player."""
    return (_STATIC / "machine.css").read_text(encoding="utf-8")


def as_json(shown: Film) -> dict[str, Any]:
    return {field.name: getattr(shown, field.name) for field in fields(shown)}


def still(shown: Film, frame: int) -> str:
    """One frame as an inline SVG element without scripts."""
    attributes = {name: dict(own) for name, (_, own) in shown.shapes.items()}
    for changes in shown.frames[: frame + 1]:
        for name, new in changes.items():
            attributes[name].update(new)
    share = frame / max(1, len(shown.frames) - 1)
    for head in shown.heads:
        attributes[head]["transform"] = f"translate({share * shown.length:.1f} 0)"
    drawn = [_element(tag, attributes[name]) for name, (tag, _) in shown.shapes.items()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {shown.width:g} {shown.height:g}" role="img"'
        f' aria-label="{escape(shown.label, quote=True)}" style="width:100%;max-width:{shown.width:g}px;height:auto"'
        f' font-family="system-ui, sans-serif" fill="currentColor">{"".join(drawn)}</svg>'
    )


def _element(tag: str, attributes: Mapping[str, str]) -> str:
    written = "".join(f' {name}="{escape(value, quote=True)}"' for name, value in attributes.items() if name != "text")
    return f"<{tag}{written}>{escape(attributes.get('text', ''))}</{tag}>"


def key_frames(state: RunState) -> dict[str, int]:
    """The frames that tell a step, by what they show, in order: forward, the most that flows, the peak of memory."""
    seen, shown = scene(state), film(state)
    frames: dict[str, int] = {}
    for phase, start, end in seen.acted[min(seen.acted)].timeline.phases if seen.acted else ():
        if phase == "forward":
            middle = (start + end) / 2
            frames.setdefault(phase, next(iter(_frames(seen.seconds, middle, middle)), 0))
    active: set[str] = set()
    flowing = []
    for changes in shown.frames:
        for name, new in changes.items():
            if "stroke" in new:
                (active.discard if new["stroke"] == "none" else active.add)(name)
        flowing.append(len(active))
    if max(flowing):
        frames["communication"] = flowing.index(max(flowing))
    frames["peak of memory"] = shown.peak
    return dict(sorted(frames.items(), key=lambda item: item[1]))


def stills(state: RunState) -> str:
    """The key frames of a run, each with its name, as HTML without scripts."""
    shown = film(state)
    return "".join(
        f"<figure>{still(shown, frame)}<figcaption>{escape(name)} · {escape(shown.what)}</figcaption></figure>"
        for name, frame in key_frames(state).items()
    )
