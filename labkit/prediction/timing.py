"""The time of a step: what each rank computes by the roofline, and its collectives, put together by simulation.

The ranks' programs become the timeline of a step of each, by simulating events. A program is what a rank does in a
step, in order: it computes, it starts a collective or a message, it waits for one. A collective begins when all its
ranks have started it and the one before it in its group is over (with gloo, the one before that: a group has two
threads). It takes the time that a model of communication gives, and one of the delays that were measured after about as
much computation, drawn at random. Ranks repeat their programs, so that a rank that is late in one step is waited for in
the next. Every repetition has the times of another measured step, and of another one on each rank: a rank that is late
by chance is waited for, too. The first repetition does not count; of the others, the one with the median time does.

On CPU ranks, communication is computation, too: bytes are copied by the cores that also compute. Whatever runs at one
time shares them; with more of it than cores, all of it slows down in proportion. On GPUs, communication and computation
do not slow each other down.

Of many ranks, one of each class is simulated in the place of all: the ranks of a collective are replaced by those that
represent them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from msgspec.structs import replace

from labkit.analysis.metrics import throughput_of_median_steps
from labkit.common.files import write_atomically
from labkit.plan.spec import Spec
from labkit.prediction.devices import HERE, Accelerator, Device
from labkit.prediction.links import CommunicationModel, LinkTable, communication, tables_folder, time_among
from labkit.prediction.predict import Programs, cache_folder, cause, keep, kernels_of, made, on, programs
from labkit.prediction.tracer import TraceFailed, classes, computed, never
from labkit.record.documents import Plan, PredictedTime, PredictedTimeline
from labkit.record.events import Call, parse
from labkit.record.files import read_below
from labkit.setup.machine import Machine

# ---- the simulation of a step

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
    """The program in the form of `tracing.rank.compute`, which is JSON."""
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
    pieces: list[tuple[str, float, float, bool]] = field(default_factory=list)  # phase, start, end, whether it computed
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
        counts = Counter(like.values())
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
            # a rank is delayed by several at once
            busy += {number for operation in delayed for number in operation.started}
            load = sum(rank.copies for rank in computing) + sum(self._ranks[number].copies for number in busy)
            rate = min(1.0, self._cores / load)
        moving = (*computing, *running)
        passed = min([*(operation.left for operation in moving), *(operation.delay for operation in delayed)])
        self._time += passed / rate
        for operation in delayed:
            operation.delay = _less(operation.delay, passed)
        for operation in moving:
            operation.left = _less(operation.left, passed)
        for queue in self._queues.values():
            for operation in [*islice(queue, self._width)]:
                if not operation.delay and not operation.left:
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
    for phase, start, stop, is_compute in rank.pieces:
        start, stop = start - rank.began, stop - rank.began
        if phases and phases[-1][0] == phase:
            phases[-1] = (phase, phases[-1][1], stop)
        else:
            phases.append((phase, start, stop))
        if not is_compute:
            exposed[phase] += stop - start
        elif busy and math.isclose(busy[-1][1], start, abs_tol=1e-9):
            busy[-1] = (busy[-1][0], stop)
        else:
            busy.append((start, stop))
    comm = []
    for start, operation in rank.own.values():
        began, over = operation.started[number] - rank.began, min(operation.end, end) - rank.began
        comm.append(Call(start.op, began, over, operation.bytes, ranks=[*start.ranks]))
    return PredictedTimeline(end - rank.began, phases, comm, busy, dict(exposed))


# ---- kernels, by the roofline model (Williams, Waterman and Patterson 2009)

EDGE = 100.0  # elements, fitted to published runs (labkit/MEASUREMENTS.md)
_WIDTHS = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # bytes of an element by type
WITH_TENSOR_CORES = {"tf32": {"fp32": "tf32"}}  # by precision, types whose matrix products have the peak of another


@dataclass(frozen=True)
class Roofline:
    """What one device reaches: FLOP/s by type of the numbers in large products, bytes per second of its memory, the
    seconds of the shortest kernel, and the `edge` of products (0: short sides reach as much as long ones)."""

    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    edge: float = 0.0

    def seconds(self, kernels: Iterable[tuple[str, float, float, int]]) -> float:
        """The time of kernels one after another, each group as (type, FLOPs, bytes, number of them). `LookupError` for
        matrix products of a type without a peak."""
        return sum(count * self._one(kind, flops, size) for kind, flops, size, count in kernels)

    def _one(self, kind: str, flops: float, size: float) -> float:
        if flops and kind not in self.flops:
            raise LookupError(f"no peak is known for matrix products in {kind}, only for {', '.join(self.flops)}")
        product = product_seconds(flops, size / _WIDTHS.get(kind, 4), self.flops[kind], self.edge) if flops else 0.0
        return max(product, size / self.bandwidth, self.launch)


def product_seconds(flops: float, elements: float, rate: float, edge: float = EDGE) -> float:
    """The seconds of a matrix product of so many FLOPs whose three matrices have so many elements together, at the
    `rate` of large products in FLOP/s."""
    return (flops + 2 * edge * elements) / rate


def of_accelerator(accelerator: Accelerator, precision: str, share: float) -> Roofline:
    """That of an accelerator for a training in a precision: `share` from 0 to 1 chooses between the least and the most
    that its kernels reach."""

    def reached(name: str) -> float:
        least, most = accelerator.reached[name]
        return least + share * (most - least)

    peaks = dict(accelerator.flops)
    for kind, other in WITH_TENSOR_CORES.get(precision, {}).items():
        peaks[kind] = peaks[other]
    return Roofline(
        {kind: peak * reached("products") for kind, peak in peaks.items()},
        accelerator.bandwidth * reached("copies"),
        reached("launch"),
        EDGE,
    )


def of_cores(table: LinkTable, share: float) -> Roofline:
    """That of a rank of this machine, whose kernels reach between half and all of what was measured; half is an
    assumption."""
    reached = (1 + share) / 2
    peaks = {kind: reached * peak for kind, peak in table.peaks.items()}
    return Roofline(peaks, reached * table.kernels["copies"], table.kernels["launch"] / reached)


def with_seconds(program: Iterable[Iterable[Any]], roofline: Roofline) -> list[list[Any]]:
    """A program of `tracing.work` with the seconds of its kernels in their place, as `program_of` reads it."""
    found = []
    for kind, *rest in program:
        if kind == "compute":
            phase, kernels = rest
            rest = [phase, [roofline.seconds(kernels)]]
        found.append([kind, *rest])
    return found


# ---- the time of a step

# The script that is measured trains only, for more steps than are needed.
_MEASURED: dict[str, Any] = {
    **dict.fromkeys(("epochs", "save_every", "resume", "fault")),
    "steps": 100,
    "max_restarts": 0,
}
_MOST = 8  # ranks that are all simulated
ERROR = 0.17  # of the predicted step: 16 of 20 steps are in the range with it (MEASUREMENTS.md, Time of a step)
_BUSY = 0.05  # share of a measurement in which something else may use the machine
_SHARES = (0.5, 1.0, 0.0)  # of what kernels reach: the middle, the most, the least
_ALIKE = 3  # steps to simulate if all of them compute equally long
_FILE, _LIMIT = "programs.json", 16 << 20  # bytes


def timed(spec: Spec, plan: Plan, cancelled: Callable[[], bool] = never) -> Plan:
    """The plan of a Spec of CPU ranks with the time of a step on this machine: measured for a strategy, modelled for a
    script of the user's own. It takes seconds, unless it is cached.

    `low` and `high` of the time of a strategy are the seconds minus and plus √(a² + b² + c² + d²): a is the distance to
    the lower or the upper quartile of the simulated steps, b what the exposed communication varies by, c the error of a
    step for which 80 % of cases are in the range (`ERROR`), d the share of the measurement in which something else used
    the machine. With such a share, the next call measures again.

    Raises `LookupError` for GPUs, or if this machine has not been measured, `TraceFailed` if a rank cannot be measured,
    and `Cancelled` soon after `cancelled` returns true.
    """
    if spec.device == "cuda":
        raise LookupError("the time of a step can be predicted for CPU ranks only; use device='cpu'")
    links = communication(HERE) if spec.processes > 1 else None
    machine = Machine.here()
    if spec.strategy is None:
        table = kernels_of(machine, spec.processes)
        rooflines = [of_cores(table, share) for share in _SHARES]
        found = _modelled(spec, plan, rooflines, links, machine.cores, f"this machine, {table.title}", cancelled)
    else:
        groups = classes(spec)
        measured, busy = _programs(spec, [ranks[0] for ranks in groups], machine, cancelled)
        steps = _simulated(groups, measured, links, machine.cores)
        bounds = _bounds(max(steps.values(), key=_seconds), links.error if links else 0.0, busy)
        found = _with_time(spec, plan, steps, bounds, links.title if links else "", busy=busy)
    keep(spec, found)
    return found


def _bounds(step: PredictedTimeline, error: float, busy: float) -> tuple[float, float]:
    seconds = step.seconds
    own = math.hypot(error * sum(step.exposed.values()), ERROR * seconds, busy * seconds)
    low, high = (math.hypot(own, (seconds if end is None else end) - seconds) for end in (step.low, step.high))
    return max(0.0, seconds - low), seconds + high


def modelled(spec: Spec, plan: Plan, machine: Device, cancelled: Callable[[], bool] = never) -> Plan:
    """The plan of a Spec on a machine of the table, with the time of a step, without the loading of samples: in the
    middle of what its kernels reach, with the least and the most as the range. If a step cannot be modelled, `untimed`
    of the plan says why.

    Raises `ValueError` for a precision that the machine lacks, and as `predict` does.
    """
    accelerator = machine.accelerator
    assert accelerator
    if spec.precision:
        accelerator.peak(spec.precision)
    plan = on(plan, spec, machine)
    rooflines = [of_accelerator(accelerator, spec.precision or "", share) for share in _SHARES]
    links = communication(machine.name) if spec.processes > 1 else None
    try:
        return _modelled(spec, plan, rooflines, links, None, machine.title, cancelled)
    except LookupError as error:
        return replace(plan, untimed=f"there is no time of a step: {error}")


def _modelled(
    spec: Spec,
    plan: Plan,
    rooflines: Sequence[Roofline],
    links: CommunicationModel | None,
    cores: int | None,
    title: str,
    cancelled: Callable[[], bool],
) -> Plan:
    """`rooflines` are in the order of `_SHARES`."""
    if spec.options.get("cpu_offload"):
        raise LookupError("it is not modelled with cpu_offload, which computes on CPUs, too")
    if plan.method != "simulated":
        raise LookupError(f"it needs a trace, and {plan.reason or 'there is none'}")
    if spec.processes < (spec.nproc or 1):
        raise LookupError("it is not modelled for several devices in one process")
    groups, work = [part.ranks for part in plan.classes], programs(spec, cancelled)
    middle, fast, slow = (
        _simulated(groups, {rank: with_seconds(items, roofline) for rank, items in work.items()}, links, cores, _ALIKE)
        for roofline in rooflines
    )
    for first, timeline in middle.items():
        timeline.low, timeline.high = fast[first].seconds, slow[first].seconds
    low, high = (max(map(_seconds, steps.values())) for steps in (fast, slow))
    return _with_time(spec, plan, middle, (low, high), title, modelled=True)


def _simulated(
    groups: Sequence[Sequence[int]],
    programs: Programs,
    links: CommunicationModel | None,
    cores: int | None,
    steps: int = STEPS,
) -> dict[int, PredictedTimeline]:
    """The timeline of the slowest rank of each class, by the first rank, which has a program."""
    known = {rank: program_of(items) for rank, items in programs.items()}
    like = {rank: ranks[0] for ranks in groups for rank in ranks}
    if len(like) <= _MOST:
        known = {rank: moved(known[first], first, rank, len(like)) for rank, first in like.items()}
        like = {rank: rank for rank in like}
    found = simulate(known, like, links, cores, steps)
    return {ranks[0]: max((found[rank] for rank in ranks if rank in found), key=_seconds) for ranks in groups}


def _with_time(
    spec: Spec,
    plan: Plan,
    steps: Mapping[int, PredictedTimeline],
    bounds: tuple[float, float],
    links: str,
    **made: Any,
) -> Plan:
    seconds = max(map(_seconds, steps.values()))
    time = PredictedTime(seconds, links, low=bounds[0], high=bounds[1], **made)
    if spec.strategy:
        time.samples_per_second = throughput_of_median_steps(spec.global_batch, [seconds]) or 0.0
    parts = [replace(part, timeline=steps[part.ranks[0]]) for part in plan.classes]
    return replace(plan, classes=parts, time=time)


def _seconds(timeline: PredictedTimeline) -> float:
    return timeline.seconds


def _programs(
    spec: Spec, ranks: Sequence[int], machine: Machine, cancelled: Callable[[], bool]
) -> tuple[Programs, float]:
    """The programs of some ranks, measured now or before, and the share of the measurement in which something else used
    the machine."""
    state = [machine.hardware, *sorted(path.stat().st_mtime_ns for path in tables_folder().glob("*.json"))]
    place = cache_folder(spec) / _FILE
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = parse(read_below(place.parent, place, _LIMIT))
        if known["state"] == state:
            return {int(rank): items for rank, items in known["programs"].items()}, 0.0
    together = max(min(spec.processes, machine.cores), len(ranks))
    repeated = [ranks[index % len(ranks)] for index in range(together)]
    options = {**spec.options, "warmup_steps": 0}  # which may be longer than what is measured
    try:
        found = computed(dataclasses.replace(spec, **_MEASURED, options=options), repeated, cancelled)
    except TraceFailed as failure:
        raise TraceFailed(cause(failure, spec)) from None
    shares = [item[1] for items in found.values() for item in items if item[0] == "busy"]
    measured = {rank: [item for item in items if item[0] != "busy"] for rank, items in found.items()}
    if (busy := max(shares)) >= _BUSY:
        return measured, busy
    with suppress(OSError):
        made(spec)
        write_atomically(place, json.dumps({"state": state, "programs": measured}), private=True)
    return measured, 0.0
