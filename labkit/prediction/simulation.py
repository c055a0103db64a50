"""Ranks' programs → the timeline of a step of each, by simulating events.

A program is what a rank does in a step, in order: it computes, it starts a collective or a message, it waits for one.
A collective begins when all its ranks have started it and the one before it in its group is over (with gloo, the one
before that: a group has two threads). It takes the time that a model of communication gives, and one of the delays that
were measured after about as much computation, drawn at random. Ranks repeat their programs, so that a rank that is late
in one step is waited for in the next. Every repetition has the times of another measured step, and of another one on
each rank: a rank that is late by chance is waited for, too. The first repetition does not count; of the others, the one
with the median time does.

On CPU ranks, communication is computation, too: bytes are copied by the cores that also compute. Whatever runs at one
time shares them; with more of it than cores, all of it slows down in proportion. On GPUs, communication and computation
do not slow each other down.

Of many ranks, one of each class is simulated in the place of all: the ranks of a collective are replaced by those that
represent them.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from msgspec.structs import replace

from labkit.prediction.links import CommunicationModel, time_among
from labkit.record.documents import PredictedTimeline
from labkit.record.events import Call

STEPS = 64  # in which delays occur about as often as they were measured
_MESSAGES = ("send", "recv")
_AT_A_TIME = 2  # operations of a group, on CPU ranks: the threads of gloo (ProcessGroupGloo.Options)
_APART = 4  # measured steps between two ranks


class Compute(NamedTuple):
    """Computation in a phase: its seconds in each of several measured steps."""

    phase: str
    seconds: tuple[float, ...]


class Start(NamedTuple):
    """Starts operation `number` of the step on `bytes`; `ranks` are those of the group, or the other end of a
    message."""

    number: int
    op: str
    bytes: int
    ranks: tuple[int, ...]


class Wait(NamedTuple):
    """Waits until operation `number` is over."""

    number: int


Program = Sequence[Compute | Start | Wait]


def program_of(items: Sequence[Sequence[Any]]) -> Program:
    """The program in the form of `tracing.compute`, which is JSON."""
    kinds = {"compute": Compute, "start": Start, "wait": Wait}
    return [
        kinds[kind](*(tuple(value) if isinstance(value, list) else value for value in rest)) for kind, *rest in items
    ]


def moved(program: Program, rank: int, other: int, ranks: int) -> Program:
    """The program of another of `ranks` ranks, which does in its part of the mesh what `rank` does in its own. The
    ranks of a group are evenly spaced, as those of one axis of a mesh are; a message goes equally far.
    """

    def of_other(item: Compute | Start | Wait) -> Compute | Start | Wait:
        if not isinstance(item, Start):
            return item
        if item.op in _MESSAGES:
            return item._replace(ranks=((item.ranks[0] + other - rank) % ranks,))
        group = sorted(item.ranks)
        step = group[1] - group[0] if len(group) > 1 else 1
        first = other - other // step % len(group) * step
        return item._replace(ranks=tuple(range(first, first + len(group) * step, step)))

    return program if rank == other else [of_other(item) for item in program]


@dataclass
class _Operation:
    """A collective or message of one step, as its ranks have started it: by rank when. `left` are the seconds that it
    still takes on its own, after `delay`."""

    bytes: int
    parties: int
    delay: float
    left: float
    started: dict[int, float] = field(default_factory=dict)
    end: float = math.inf


@dataclass
class _Rank:
    """Where a rank is in its program, and the timeline of the current step."""

    program: Program
    copies: int
    index: int = 0
    step: int = 0
    began: float = 0.0
    left: float = 0.0  # seconds of computation
    computed: float = 0.0  # seconds since its last operation
    waits: _Operation | None = None
    own: dict[int, tuple[Start, _Operation]] = field(default_factory=dict)  # of this step, by number
    pieces: list[tuple[str, float, float, bool]] = field(default_factory=list)  # phase, start, end, computed
    since: float = 0.0
    phase: str = ""


def simulate(
    programs: Mapping[int, Program],
    like: Mapping[int, int],
    links: CommunicationModel | None,
    cores: int | None,
    steps: int = STEPS,
) -> dict[int, PredictedTimeline]:
    """The timeline of a step of each rank that has a program.

    `like` is the rank with a program in the place of each rank; without `links`, communication takes no time; `cores`
    are those that CPU ranks share, None for accelerators. `steps`, at least two, are simulated. Raises as
    `CommunicationModel.time` does.
    """
    return _Simulation(programs, like, links, cores, steps).result()


class _Simulation:
    def __init__(
        self,
        programs: Mapping[int, Program],
        like: Mapping[int, int],
        links: CommunicationModel | None,
        cores: int | None,
        steps: int,
    ):
        counts: dict[int, int] = defaultdict(int)
        for rank in like.values():
            counts[rank] += 1
        self._ranks = {number: _Rank(program, counts[number]) for number, program in programs.items()}
        self._like, self._links, self._cores, self._count = like, links, cores, steps
        self._width = 1 if cores is None else _AT_A_TIME
        self._time = 0.0
        self._random = random.Random(0)  # the same prediction each time
        self._open: dict[Any, list[_Operation]] = defaultdict(list)  # by group, those that not all ranks have started
        self._queues: dict[Any, deque[_Operation]] = defaultdict(deque)  # by group, the first one runs
        self._steps: dict[int, list[PredictedTimeline]] = defaultdict(list)

    def result(self) -> dict[int, PredictedTimeline]:
        while True:
            for number, rank in self._ranks.items():
                self._advance(number, rank)
            if all(rank.step == self._count for rank in self._ranks.values()):
                return self._typical()
            self._pass_time()

    def _typical(self) -> dict[int, PredictedTimeline]:
        """The repetition in which the first rank takes its median time, with the quartiles of all."""
        first = next(iter(self._steps.values()))[1:]
        order = sorted(range(len(first)), key=lambda index: first[index].seconds)
        chosen = 1 + order[len(order) // 2]
        return {number: _with_quartiles(steps[1:], steps[chosen]) for number, steps in self._steps.items()}

    # ---- one rank

    def _advance(self, number: int, rank: _Rank) -> None:
        """Executes the program up to something that takes time."""
        while rank.step < self._count and rank.left <= 0 and (rank.waits is None or rank.waits.end <= self._time):
            self._piece(rank)
            rank.waits = None
            if rank.index == len(rank.program):
                self._finish(number, rank)
                continue
            item = rank.program[rank.index]
            rank.index += 1
            if isinstance(item, Compute):
                rank.left = item.seconds[(rank.step + _APART * number) % len(item.seconds)]
                rank.computed += rank.left
                rank.phase = item.phase
            elif isinstance(item, Start):
                self._start(number, rank, item)
            else:
                _, rank.waits = rank.own[item.number]

    def _piece(self, rank: _Rank) -> None:
        if self._time > rank.since:
            rank.pieces.append((rank.phase, rank.since, self._time, rank.waits is None))
        rank.since = self._time

    def _start(self, number: int, rank: _Rank, item: Start) -> None:
        """Joins the operation that others of the group have started, or starts it."""
        if item.op in _MESSAGES:
            peer = self._like[item.ranks[0]]
            ends = (number, peer) if item.op == "send" else (peer, number)
            key: Any = ("message", *ends)
            parties, members = len({*ends}), sorted((number, *item.ranks))
        else:
            parties, members = len({self._like[rank_] for rank_ in item.ranks}), item.ranks
            key = (len(members), *sorted({self._like[rank_] for rank_ in item.ranks}))
        mine = next((operation for operation in self._open[key] if number not in operation.started), None)
        if mine is None:
            mine = _Operation(item.bytes, parties, *self._delay_and_seconds(item, members, rank.computed))
            self._open[key].append(mine)
        rank.computed = 0.0
        mine.started[number] = self._time
        rank.own[item.number] = item, mine
        if len(mine.started) == mine.parties:
            self._open[key].remove(mine)
            self._queues[key].append(mine)

    def _delay_and_seconds(self, item: Start, members: Sequence[int], computed: float) -> tuple[float, float]:
        """How long an operation is delayed, by chance, after so many seconds of computation, and how long it takes on
        its own."""
        if self._links is None:
            return 0.0, 0.0
        time = time_among(self._links, item.op, item.bytes, members)
        # measured while all of its ranks shared the cores
        share = 1.0 if self._cores is None else min(1.0, self._cores / len(members))
        like = min(time.delays, key=lambda seconds: abs(seconds - computed), default=None)
        delay = 0.0 if like is None else self._random.choice(time.delays[like])
        return share * delay, share * time.seconds

    def _finish(self, number: int, rank: _Rank) -> None:
        """A step is over."""
        self._steps[number].append(_timeline(rank, number, self._time))
        rank.step += 1
        rank.index, rank.began, rank.own, rank.pieces = 0, self._time, {}, []

    # ---- time

    def _pass_time(self) -> None:
        """Time passes until the first computation or operation is over."""
        computing = [rank for rank in self._ranks.values() if rank.left > 0]
        begun = [operation for queue in self._queues.values() for operation in islice(queue, self._width)]
        if not computing and not begun:
            self._release()
            return
        delayed = [operation for operation in begun if operation.delay]
        running = [operation for operation in begun if not operation.delay]
        rate = 1.0
        if self._cores is not None:
            busy = [number for operation in running for number in operation.started]
            busy += {
                number for operation in delayed for number in operation.started
            }  # a rank is delayed by several at once
            load = sum(rank.copies for rank in computing) + sum(self._ranks[number].copies for number in busy)
            rate = min(1.0, self._cores / load)
        passed = min(
            [operation.left for operation in (*computing, *running)] + [operation.delay for operation in delayed]
        )
        self._time += passed / rate
        for operation in delayed:
            operation.delay = _less(operation.delay, passed)
        for operation in (*computing, *running):
            operation.left = _less(operation.left, passed)
        for queue in self._queues.values():
            for operation in [
                operation for operation in islice(queue, self._width) if not operation.delay and not operation.left
            ]:
                operation.end = self._time
                queue.remove(operation)

    def _release(self) -> None:
        """Every rank waits for an operation that another one never starts: classes need not be symmetric. The operation
        that was started first runs without the missing ranks."""
        key, first = min(
            ((key, operation) for key, waiting in self._open.items() for operation in waiting),
            key=lambda pair: min(pair[1].started.values()),
        )
        self._open[key].remove(first)
        self._queues[key].append(first)


def _less(seconds: float, passed: float) -> float:
    return seconds - passed if seconds - passed > 1e-12 else 0.0


def _with_quartiles(steps: Sequence[PredictedTimeline], chosen: PredictedTimeline) -> PredictedTimeline:
    ordered = sorted(step.seconds for step in steps)
    return replace(chosen, low=ordered[len(ordered) // 4], high=ordered[-1 - len(ordered) // 4])


def _timeline(rank: _Rank, number: int, end: float) -> PredictedTimeline:
    phases: list[tuple[str, float, float]] = []
    busy: list[tuple[float, float]] = []
    exposed: dict[str, float] = defaultdict(float)
    for phase, start, stop, computed in rank.pieces:
        start, stop = start - rank.began, stop - rank.began
        if phases and phases[-1][0] == phase:
            phases[-1] = (phase, phases[-1][1], stop)
        else:
            phases.append((phase, start, stop))
        if not computed:
            exposed[phase] += stop - start
        elif busy and math.isclose(busy[-1][1], start, abs_tol=1e-9):
            busy[-1] = (busy[-1][0], stop)
        else:
            busy.append((start, stop))
    comm = [
        Call(
            start.op,
            operation.started[number] - rank.began,
            min(operation.end, end) - rank.began,
            operation.bytes,
            ranks=[*start.ranks],
        )
        for start, operation in rank.own.values()
    ]
    return PredictedTimeline(end - rank.began, phases, comm, busy, dict(exposed))
