"""Pipeline schedules: the order of micro-batches on each rank, and a simulation in which only computation takes time.

A rank does some forwards to warm up, then alternates one forward and one backward, then does the remaining backwards.
The schedules differ in the length of the warm-up, in the number of stages per rank, and in whether a backward is split
in two halves. Sources: GPipe (Huang et al. 2018, section 2.3), 1F1B with a flush (Narayanan et al. 2021, section
2.2.1), interleaved (ibid., section 2.2.2), zero bubble (Qi et al. 2023, section 3, as ZB-H1; with two stages per rank
as in torch). Those whose stages go down the ranks and up again are in `v_shaped.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.course.pictures import v_shaped
from labkit.course.pictures.checked import checked
from labkit.training.strategies.pipelines import ONE_PER_STAGE, V_SHAPED, holder

if TYPE_CHECKING:
    from labkit.plan.spec import Spec


@dataclass(frozen=True)
class Slot:
    """A pass of a rank from `start` to `end`: micro-batch `number` in `stage`; both are None if they are unknown.

    `kind` is F (forward), B (backward; only of the inputs if the schedule splits it), W (backward of the weights), or
    BW (a whole backward of a schedule that splits others).
    """

    rank: int
    kind: str
    stage: int | None
    number: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """A pipeline step. Times are in `unit`: mean forwards of a rank ("forwards") if it is `modelled`, otherwise
    milliseconds."""

    title: str
    slots: tuple[Slot, ...]
    unit: str
    modelled: bool

    @property
    def ranks(self) -> list[int]:
        """The ranks, in the order of the first stages."""
        return sorted({slot.rank for slot in self.slots})

    @property
    def span(self) -> tuple[float, float]:
        """The start of the first slot and the end of the last one."""
        return min(slot.start for slot in self.slots), max(slot.end for slot in self.slots)

    @property
    def bubble(self) -> float:
        """The fraction of the step, over all ranks, in which they are idle."""
        first, last = self.span
        return 1 - sum(slot.end - slot.start for slot in self.slots) / (len(self.ranks) * (last - first))

    @property
    def kept(self) -> dict[int, float]:
        """By rank, the peak of stored activations, in units of one micro-batch through all of its stages.

        Activations are stored from a forward to the end of its backward (of both halves if it is split).
        """
        halved = any(slot.kind == "W" for slot in self.slots)
        stages = len({slot.stage for slot in self.slots}) // len(self.ranks)
        most = dict.fromkeys(self.ranks, 0)
        for rank in self.ranks:
            mine = [slot for slot in self.slots if slot.rank == rank]
            moments = [(slot.start, 1) for slot in mine if slot.kind == "F"]
            moments += [(slot.end, -1) for slot in mine if slot.kind in ("W" if halved else "B", "BW")]
            held = 0
            for _, change in sorted(moments):
                held += change
                most[rank] = max(most[rank], held)
        return {rank: held / stages for rank, held in most.items()}


@dataclass(frozen=True)
class Rule:
    """A schedule: stages per rank, whether backward is split in halves, and the passes of rank r of p with m
    micro-batches, as kinds with the index of the rank's stage.

    `formula` gives the bubble for m ≥ p if stages are equal and a backward takes twice as long as a forward.
    """

    stages: int
    halved: bool
    passes: Callable[[int, int, int], list[tuple[str, int]]]
    formula: Callable[[int, int], float]


def _by_warm_up(
    stages: int, halved: bool, warm_up: Callable[[int, int, int], int], formula: Callable[[int, int], float]
) -> Rule:
    """A schedule of `warm_up` forwards, then one forward and one backward alternately, then the other backwards."""

    def passes(rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int]]:
        turn, every = _turn(ranks, micro_batches), stages * micro_batches
        warm = min(every, warm_up(rank, ranks, micro_batches))
        local = [(k // turn) % stages for k in range(every)]
        backwards = [stages - 1 - which for which in local]
        done = [("F", which) for which in local[:warm]]
        for k, which in enumerate(backwards):
            done += [*(("F", each) for each in local[warm + k : warm + k + 1]), ("B", which)]
            if halved and k >= rank:  # `rank` of them are delayed and fill the bubble at the end
                done.append(("W", backwards[k - rank]))
        if halved:
            done += [("W", which) for which in backwards[max(0, every - rank) :]]
        return done

    return Rule(stages, halved, passes, formula)


SCHEDULES: dict[str, Rule] = {
    "GPipe": _by_warm_up(1, False, lambda r, p, m: m, lambda p, m: (p - 1) / (m + p - 1)),
    "1F1B": _by_warm_up(1, False, lambda r, p, m: p - 1 - r, lambda p, m: (p - 1) / (m + p - 1)),
    "Interleaved1F1B": _by_warm_up(
        2, False, lambda r, p, m: _turn(p, m) + 2 * (p - 1 - r), lambda p, m: (p - 1) / (2 * m + p - 1)
    ),
    "ZB-H1": _by_warm_up(1, True, lambda r, p, m: p - 1 - r, lambda p, m: (p - 1) / (3 * m + p - 1)),
    "InterleavedZeroBubble": _by_warm_up(
        2, True, lambda r, p, m: _turn(p, m) + p - 1 - r, lambda p, m: (p - 1) / (6 * m + p - 1)
    ),
    "ZBVZeroBubble": Rule(2, True, v_shaped.zero_bubble, v_shaped.bubble),
    "DualPipeV": Rule(2, True, v_shaped.dual_pipe, v_shaped.bubble),
}


@checked
def order(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """The passes of `rank` in order: (kind, stage, number of the micro-batch). Raises `ValueError` for an impossible
    schedule.

    >>> order("1F1B", 1, 2, 2)
    [('F', 1, 0), ('B', 1, 0), ('F', 1, 1), ('B', 1, 1)]
    """
    _check(schedule, ranks, micro_batches)
    rule = SCHEDULES[schedule]
    own = [stage for stage in range(ranks * rule.stages) if holder(stage, ranks, schedule) == rank]
    numbers: Counter[tuple[str, int]] = Counter()
    numbered = []
    for kind, which in rule.passes(rank, ranks, micro_batches):
        stage, halves = own[which], ("B", "W") if kind == "BW" else (kind,)
        numbered.append((kind, stage, numbers[halves[0], stage]))
        numbers.update((half, stage) for half in halves)
    return [each for each in numbered if each[2] < micro_batches]


@checked
def simulate(schedule: str, ranks: int, micro_batches: int, costs: Sequence[float] = (), backward: float = 2.0) -> Plan:
    """Simulates a step. A backward takes `backward` times as long as a forward; communication takes no time.

    `costs` are the relative forward times of the stages (default: equal). Raises `ValueError` for an impossible
    schedule.
    """
    _check(schedule, ranks, micro_batches)
    rule = SCHEDULES[schedule]
    stages = ranks * rule.stages
    costs = tuple(costs) or (1.0,) * stages
    if len(costs) != stages or min(costs) <= 0:
        raise ValueError(
            f"costs must be a positive number for each of the {stages} stages of {schedule} on {ranks} ranks, got"
            f" {costs}"
        )
    times = [cost * ranks / sum(costs) for cost in costs]
    relative = {"F": 1.0, "B": backward / 2 if rule.halved else backward, "W": backward / 2, "BW": backward}
    waiting = {rank: order(schedule, rank, ranks, micro_batches)[::-1] for rank in range(ranks)}
    slots: list[Slot] = []
    ended: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(waiting, 0.0)
    while any(waiting.values()):
        for rank, left in waiting.items():
            while left and all(need in ended for need in needs(*left[-1], stages)):
                kind, stage, number = left.pop()
                start = max([free[rank], *(ended[need] for need in needs(kind, stage, number, stages))])
                free[rank] = ended[kind[0], stage, number] = start + relative[kind] * times[stage]
                slots.append(Slot(rank, kind, stage, number, start, free[rank]))
    title = f"{schedule}, {ranks} ranks, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return Plan(title, tuple(slots), "forwards", modelled=True)


def needs(kind: str, stage: int, number: int, stages: int) -> list[tuple[str, int, int]]:
    """The dependencies of a pass: a forward needs that of the previous stage, a backward its forward and the next
    stage's backward."""
    if kind == "F":
        return [("F", stage - 1, number)] if stage else []
    if kind == "W":
        return [("B", stage, number)]
    return [("F", stage, number), *[("B", stage + 1, number)] * (stage + 1 < stages)]


@checked
def planned(spec: Spec) -> Plan:
    """The simulation of a Spec with strategy pp, with stage costs from the floating-point operations of its model."""
    begins, blocks = spec.strategy_row.constants(spec)["STAGES"], spec.workload_row.costs(spec.options)
    costs = [sum(blocks[first:last]) for first, last in pairwise(begins)]
    return simulate(spec.options["schedule"], spec.nproc, spec.options["micro_batches"], costs)


def least(schedule: str, ranks: int) -> int:
    """The minimum number of micro-batches: that of the stages if DualPipeV is to fill both halves of the V."""
    return 2 * ranks if schedule in V_SHAPED and schedule in ONE_PER_STAGE else 1


def _turn(ranks: int, micro_batches: int) -> int:
    """Number of micro-batches that a rank processes in one stage before it switches to its next stage."""
    return micro_batches // max(1, micro_batches // ranks)


def _check(schedule: str, ranks: int, micro_batches: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if ranks < 2 or micro_batches < 1:
        raise ValueError(f"a pipeline needs at least 2 ranks and 1 micro-batch, got {ranks} and {micro_batches}")
    if micro_batches < least(schedule, ranks):
        raise ValueError(
            f"{schedule} needs at least {least(schedule, ranks)} micro-batches on {ranks} ranks, got {micro_batches}"
        )
    if schedule not in V_SHAPED and SCHEDULES[schedule].stages > 1 and micro_batches % _turn(ranks, micro_batches):
        near = micro_batches // ranks * ranks
        raise ValueError(
            f"micro_batches must split into equal rounds for {schedule} on {ranks} ranks, got {micro_batches}; use"
            f" {near}"
        )
