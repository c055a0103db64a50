"""Exercises of lab 23: what recovery costs, the outer step of DiLoCo, and recovery within a step from a rank that is
killed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from labkit.common.units import size
from labkit.course.build import criteria
from labkit.course.build.criteria import SLACK, check_class, check_function, records_of, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, Wrong, numbers_of, require_function
from labkit.record.writer import sent

# ---- samples that are lost


_CASES = ((8, 32, 3000, 1000, 20), (64, 16, 100, 50, 40), (4, 128, 1000, 10, 600))


def _samples(answer: Any) -> str:
    require_function(answer, "lost(replicas, samples, interval, restart, heal)")
    for case in _CASES:
        replicas, samples, interval, restart, heal = case
        call = f"lost{case}"
        given = numbers_of(call, ("samples lost with a restart", "with recovery"), answer, *case)
        wanted = replicas * samples * (interval / 2 + restart), samples * heal
        if not math.isclose(given[0], wanted[0], rel_tol=1e-6):
            words = "which replicas compute the steps since the checkpoint again, and which of them wait for a restart?"
            if math.isclose(given[0], replicas * samples * (interval + restart), rel_tol=1e-6):
                words = "a failure comes in the middle of an interval on average"
            raise Wrong(f"{call} returned {given[0]:,g} samples for a restart: {words}")
        if not math.isclose(given[1], wanted[1], rel_tol=1e-6):
            raise Wrong(f"{call} returned {given[1]:,g} samples for recovery: whose samples are missing meanwhile?")
    return "a restart costs every replica, recovery costs one: the ratio grows with the number of replicas"


# ---- the outer step of DiLoCo


_RANKS = 3
_MORE = 4  # rounds after a failure


def _ring(record: Record, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of all parameters among `ranks` ranks."""
    return sent("all_reduce", record.figures["parameters"], ranks)


def _diloco(answer: Any) -> str:
    check_class(answer, "of outer optimizers", ["model", "every", "rate", "momentum"])
    records = criteria.ended(records_of("without_restart.trial", "outer_step", answer, _RANKS))
    every = records[0].figures["every"]
    for record in records:
        for step in record.steps():
            wanted, got = 0.0 if (step + 1) % every else _ring(record, _RANKS), record.sent(step)
            if got > wanted * (1 + SLACK):
                when = f"a step after which replicas {'do not meet' if not wanted else 'meet'}"
                raise Wrong(
                    f"bytes sent: in step {step}, {when}, rank {record.rank} sends {size(got)}, expected at most"
                    f" {size(wanted)}; every = {every}, and it calls {criteria.calls_in_words(record, step)}"
                )
    criteria.results(records)
    for step in range(every - 1, len(records[0].expected), every):
        _equal(records, step, [record.figures["digests"][step] for record in records], "parameters")
    total = sum(records[0].sent(step) for step in range(every))
    return (
        f"the replicas are equal bit by bit after every {every} steps, and a rank sends {size(total)} in these:"
        f" 1/{every} of what DDP sends"
    )


def _equal(records: Sequence[Record], step: int, digests: Sequence[str], what: str) -> None:
    for record, digest in zip(records, digests):
        if digest != digests[0]:
            raise Wrong(
                f"replicas: after step {step}, the {what} of rank {record.rank} are not those of rank"
                f" {records[0].rank}, bit by bit"
            )


# ---- recovery within a step


def _recovery(answer: Any) -> str:
    check_function(answer, ["model", "optimizer", "backward", "manager", "step"])
    records = criteria.ended(records_of("without_restart.trial", "recovery", answer, _RANKS))
    figures = records[0].figures
    victim, kill, back = figures["victim"], figures["kill"], figures["back"]
    when = f"rank {victim} is killed in step {kill} and returns before step {back}"
    for record in records:
        if "unagreed" in record.figures:
            raise Wrong(
                f"update: in step {record.figures['unagreed']}, rank {record.rank} calls optimizer.step() without a"
                " vote of the quorum: another rank may have failed where this one succeeded (manager.commit)"
            )
        for step, calls in record.figures["backwards"].items():
            if calls != 1:
                raise Wrong(
                    f"computation: rank {record.rank} calls backward {calls} times in step {step} ({when}); its"
                    " gradients are still right when a peer fails, if you keep them"
                )
    steps = len(records[0].expected)
    if figures["updates"] != steps:
        raise Wrong(f"update: the quorum has agreed to {figures['updates']} updates, expected {steps}, one per step")
    if figures["rounds"] > 2 * steps + _MORE:
        raise Wrong(
            f"lighthouse: it was asked in {figures['rounds']} rounds, expected at most {2 * steps + _MORE}: a quorum"
            " and a vote per step, and again when a replica has failed"
        )
    try:
        criteria.results(records)
    except Wrong as wrong:
        raise Wrong(f"{wrong} ({when}){_hint_of_state(records, back)}") from None
    for step in range(steps):
        for record, moved, low, high, why in _traffic(records, step):
            bound = criteria.crossed(moved, low, high, size)
            if bound:
                raise Wrong(
                    f"bytes sent: in step {step}, rank {record.rank} sends {size(moved)}, expected {bound} ({why});"
                    f" {when}, and it calls {criteria.calls_in_words(record, step)}"
                )
        there = [record for record in records if str(step) in record.figures["digests"]]
        for what in there[0].figures["digests"][str(step)]:
            try:
                _equal(there, step, [record.figures["digests"][str(step)][what] for record in there], what)
            except Wrong as wrong:
                raise Wrong(f"{wrong} ({when}){_hint_of_state(records, back)}") from None
    return (
        f"{when}; the others went on in step {kill} with the mean of two, nobody computed anything twice, and rank"
        f" {victim} came back with all {size(figures['state'])} of the state, bit by bit"
    )


def _traffic(records: Sequence[Record], step: int) -> Iterator[tuple[Record, float, float, float, str]]:
    """For each rank that is there in a step: what it sends, the bounds of it, and what the larger one consists of."""
    figures = records[0].figures
    victim, kill, back = figures["victim"], figures["kill"], figures["back"]
    for record in records:
        if record.rank == victim and step < back:
            continue
        left = _RANKS - (kill <= step < back)
        low, why = _ring(record, left), f"an all-reduce of the gradients among {left}"
        high = low
        if step == kill:
            high, why = low + _ring(record, _RANKS), f"{why}, and an attempt among {_RANKS}"
        if step == back:
            high, why = low + figures["state"], f"{why}, and the state of a replica"
        yield record, record.sent(step), low, high, why


def _hint_of_state(records: Sequence[Record], back: int) -> str:
    """What of the state the rank that is back does not have, after its first step."""
    digests = [record.figures["digests"].get(str(back)) for record in records]
    known = [digest for digest in digests if digest is not None]
    differ = [what for what in ("buffers", "optimizer state") if len({digest[what] for digest in known}) > 1]
    if not differ or len(known) < len(records):
        return ""
    return f"; after step {back}, the returning rank lacks the {' and the '.join(differ)} of its peers"


EXERCISES = {
    "without_restart.samples": Exercise(
        "What a failure costs",
        _samples,
        "`return replicas * samples * (interval / 2 + restart), samples * heal`: with a restart, all replicas compute"
        " half an interval again and wait; with recovery, one replica is missing for `heal` steps.",
    ),
    "without_restart.diloco": Exercise("The outer step of DiLoCo", _diloco, solution(__file__, "DiLoCo"), runs="code"),
    "without_restart.recovery": Exercise(
        "Recovery within a step",
        _recovery,
        solution(__file__, "recover", "heal"),
        given="replica.py",
        runs="code",
    ),
}
