"""The schedules of a pipeline, by rule: in which order a rank takes its micro-batches, and when, if nothing but computing took time.

A rank's order is some forwards to warm up, then a forward and a backward in turns, then the backwards that are left. The schedules
differ in how long the warm-up is, in how many stages a rank has, and in whether backward is taken in two halves. Sources: GPipe (Huang
et al. 2018, section 2.3), 1F1B with a flush (Narayanan et al. 2021, section 2.2.1), interleaved (the same, section 2.2.2), zero bubble
(Qi et al. 2023, section 3, as ZB-H1; with two stages to a rank as torch has it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.course.pictures.checked import checked

if TYPE_CHECKING:
    from labkit.plan.spec import Spec


@dataclass(frozen=True)
class Slot:
    """What a rank does from `start` to `end`, with the micro-batch `number` in `stage`; both are None where they were not seen.

    `kind` is F (forward), B (backward; of the inputs alone where it is halved), W (backward of the weights), or BW (one of the halves,
    not told which).
    """

    rank: int
    kind: str
    stage: int | None
    number: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """A step of a pipeline. Times are in `unit`: a mean forward of a rank ("forwards") where it is `modelled`, else milliseconds."""

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
        """When the first rank begins, and when the last one ends."""
        return min(slot.start for slot in self.slots), max(slot.end for slot in self.slots)

    @property
    def bubble(self) -> float:
        """The share of the step, over all ranks, in which they are idle."""
        first, last = self.span
        return 1 - sum(slot.end - slot.start for slot in self.slots) / (len(self.ranks) * (last - first))

    @property
    def kept(self) -> dict[int, float]:
        """By rank, the most activations that it keeps at a time, in those of one micro-batch through all of its stages.

        They are kept from a forward to the end of its backward, of both halves where it is halved.
        """
        halved = any(slot.kind == "W" for slot in self.slots)
        stages = len({slot.stage for slot in self.slots}) // len(self.ranks)
        most = dict.fromkeys(self.ranks, 0)
        for rank in self.ranks:
            mine = [slot for slot in self.slots if slot.rank == rank]
            moments = [(slot.start, 1) for slot in mine if slot.kind == "F"]
            moments += [(slot.end, -1) for slot in mine if slot.kind == ("W" if halved else "B")]
            held = 0
            for _, change in sorted(moments):
                held += change
                most[rank] = max(most[rank], held)
        return {rank: held / stages for rank, held in most.items()}


@dataclass(frozen=True)
class Rule:
    """A schedule: stages of a rank, whether backward is halved, and the forwards with which rank r of p warms up, of m micro-batches.

    `formula` gives the share of idle time from m ≥ p on, where stages are equal and backward takes twice a forward.
    """

    stages: int
    halved: bool
    warm_up: Callable[[int, int, int], int]
    formula: Callable[[int, int], float]


SCHEDULES: dict[str, Rule] = {
    "GPipe": Rule(1, False, lambda r, p, m: m, lambda p, m: (p - 1) / (m + p - 1)),
    "1F1B": Rule(1, False, lambda r, p, m: p - 1 - r, lambda p, m: (p - 1) / (m + p - 1)),
    "Interleaved1F1B": Rule(2, False, lambda r, p, m: _turn(p, m) + 2 * (p - 1 - r), lambda p, m: (p - 1) / (2 * m + p - 1)),
    "ZB-H1": Rule(1, True, lambda r, p, m: p - 1 - r, lambda p, m: (p - 1) / (3 * m + p - 1)),
    "InterleavedZeroBubble": Rule(2, True, lambda r, p, m: _turn(p, m) + p - 1 - r, lambda p, m: (p - 1) / (6 * m + p - 1)),
}


@checked
def order(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """What `rank` of so many does, one after the other: (kind, stage, number of the micro-batch). Raises `ValueError` for what cannot be.

    >>> order("1F1B", 1, 2, 2)
    [('F', 1, 0), ('B', 1, 0), ('F', 1, 1), ('B', 1, 1)]
    """
    _check(schedule, ranks, micro_batches)
    rule, turn = SCHEDULES[schedule], _turn(ranks, micro_batches)
    every = rule.stages * micro_batches
    warm = min(every, rule.warm_up(rank, ranks, micro_batches))
    own = [(k // turn) % rule.stages for k in range(every)]  # which of the rank's stages is at work
    forwards = [("F", which * ranks + rank) for which in own]
    backwards = [("B", (rule.stages - 1 - which) * ranks + rank) for which in own]
    done = forwards[:warm]
    for k, backward in enumerate(backwards):
        done += [*forwards[warm + k : warm + k + 1], backward]
        if rule.halved and k >= rank:  # as many as the rank's number wait, and fill its bubble at the end
            done.append(("W", backwards[k - rank][1]))
    if rule.halved:
        done += [("W", stage) for _, stage in backwards[max(0, every - rank) :]]
    numbers: Counter[tuple[str, int]] = Counter()
    numbered = []
    for kind, stage in done:
        numbered.append((kind, stage, numbers[kind, stage]))
        numbers[kind, stage] += 1
    return numbered


@checked
def simulate(schedule: str, ranks: int, micro_batches: int, costs: Sequence[float] = (), backward: float = 2.0) -> Plan:
    """A step by the rule. A backward takes `backward` times a forward, and sending takes nothing.

    `costs` says how long a forward of each stage is in proportion to the others; all are equal where it is left out. Raises `ValueError`.
    """
    _check(schedule, ranks, micro_batches)
    rule = SCHEDULES[schedule]
    stages = ranks * rule.stages
    costs = tuple(costs) or (1.0,) * stages
    if len(costs) != stages or min(costs) <= 0:
        raise ValueError(f"{schedule} on {ranks} ranks has {stages} stages, and costs are {costs}; give a number above 0 for each stage")
    times = [cost * ranks / sum(costs) for cost in costs]
    share = {"F": 1.0, "B": backward / 2 if rule.halved else backward, "W": backward / 2}
    waiting = {rank: order(schedule, rank, ranks, micro_batches)[::-1] for rank in range(ranks)}
    slots: list[Slot] = []
    ended: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(waiting, 0.0)
    while any(waiting.values()):
        for rank, left in waiting.items():
            while left and all(need in ended for need in needs(*left[-1], stages)):
                kind, stage, number = left.pop()
                start = max([free[rank], *(ended[need] for need in needs(kind, stage, number, stages))])
                free[rank] = ended[kind, stage, number] = start + share[kind] * times[stage]
                slots.append(Slot(rank, kind, stage, number, start, free[rank]))
    title = f"{schedule}, {ranks} ranks, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return Plan(title, tuple(slots), "forwards", modelled=True)


def needs(kind: str, stage: int, number: int, stages: int) -> list[tuple[str, int, int]]:
    """What must be done before: a forward needs that of the stage before, a backward its own forward and that of the stage behind."""
    if kind == "F":
        return [("F", stage - 1, number)] if stage else []
    if kind == "W":
        return [("B", stage, number)]
    return [("F", stage, number), *[("B", stage + 1, number)] * (stage + 1 < stages)]


@checked
def planned(spec: Spec) -> Plan:
    """What a Spec of the strategy pp will do, with stages that cost what its model's do by their floating-point operations."""
    begins, blocks = spec.strategy_row.constants(spec)["STAGES"], spec.workload_row.costs(spec.options)
    costs = [sum(blocks[first:last]) for first, last in pairwise(begins)]
    return simulate(spec.options["schedule"], spec.nproc, spec.options["micro_batches"], costs)


def _turn(ranks: int, micro_batches: int) -> int:
    """Micro-batches that go through one stage of a rank before its next stage is at work."""
    return micro_batches // max(1, micro_batches // ranks)


def _check(schedule: str, ranks: int, micro_batches: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is not known; there is {', '.join(SCHEDULES)}")
    if ranks < 2 or micro_batches < 1:
        raise ValueError(f"a pipeline takes 2 ranks and 1 micro-batch at least, and not {ranks} and {micro_batches}")
    if SCHEDULES[schedule].stages > 1 and micro_batches % _turn(ranks, micro_batches):
        near = micro_batches // ranks * ranks
        raise ValueError(f"{schedule} takes micro-batches in equal rounds, and {micro_batches} on {ranks} ranks cannot be; use {near}")
