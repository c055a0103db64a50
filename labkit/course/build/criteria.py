"""What is required of an answer, as functions of the records of its ranks.

Each raises `Wrong` with the name of the criterion, the rank, the step, what was expected and what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from labkit.common.units import size
from labkit.course.build.record import BACKWARD, COMPUTE, FORWARD, OUTSIDE, WAIT, Record
from labkit.course.exercises import Wrong
from labkit.course.pictures.schedules import order

TOLERANCE = 1e-5  # of a loss or gradient, against the reference on a single device; relative if that is larger than 1
SLACK = 0.02  # of a number of bytes: padding, and numbers that are not part of the exercise

Bytes = Callable[[Record], float]


def ended(found: Sequence[Record | None]) -> list[Record]:
    """The records, if every rank ran to its end and called no finished implementation."""
    known = [each for each in found if each is not None]
    for record in known:
        if record.finished_api:
            raise Wrong(
                f"no finished API: rank {record.rank} calls {record.finished_api}; write it yourself with the functions"
                " of torch.distributed"
            )
    failed = [record for record in known if record.error and not record.stuck]
    if failed:
        first = min(failed, key=lambda record: record.at)
        raise Wrong(f"the answer must run: rank {first.rank} raised {first.error}")
    stuck = [record for record in known if record.stuck]
    if stuck:
        others = [f"rank {record.rank} has returned" for record in known if not record.stuck]
        waits = [f"rank {record.rank} {record.stuck}" for record in stuck]
        raise Wrong(f"the answer hangs: {'; '.join(waits + others)}")
    missing = [rank for rank, record in enumerate(found) if record is None]
    if missing:
        raise Wrong(f"the answer must run: rank {missing[0]} ended without a result; see Run.attach('last').logs")
    return known


def losses(records: Sequence[Record]) -> None:
    """Every rank has the losses of the reference on a single device."""
    for record in records:
        if len(record.losses) != len(record.expected):
            raise Wrong(f"losses: rank {record.rank} has {len(record.losses)} losses, expected {len(record.expected)}")
    for step in records[0].steps() if records else ():
        for record in records:
            expected, got = record.expected[step], record.losses[step]
            if not abs(got - expected) <= TOLERANCE * max(1.0, abs(expected)):
                raise Wrong(
                    f"losses: in step {step}, rank {record.rank} has {got:.6f}, expected {expected:.6f} as on a single"
                    f" device; {'the steps before are right' if step else 'this is before the first update'}"
                )


def sent_per_step(records: Sequence[Record], expected: Bytes, why: str) -> None:
    """Every rank sends `expected(record)` bytes in each step; `why` says what that number consists of."""
    for record in records:
        for step in record.steps():
            wanted, got = expected(record), record.sent(step)
            if abs(got - wanted) > SLACK * wanted:
                raise Wrong(
                    f"bytes sent: in step {step}, rank {record.rank} sends {size(got)}, expected {size(wanted)} ({why})"
                    f"; it calls {calls_in_words(record, step)}"
                )


def memory(records: Sequence[Record], moment: str, most: Bytes, why: str) -> None:
    """At a moment, in every step that has it, no rank has more than `most(record)` bytes of tensors; `why` says what
    these are."""
    for record in records:
        counts = record.memory[moment]
        for step, count in enumerate(counts):
            if count > most(record) * (1 + SLACK):
                when = f"{moment} of step {step}" if len(counts) > 1 else moment
                raise Wrong(
                    f"memory: {when}, rank {record.rank} has {size(count)} of tensors, expected at most"
                    f" {size(most(record))} ({why})"
                )


def overlap(records: Sequence[Record], fraction: float) -> None:
    """At least this fraction of a step's bytes is sent by calls that start before the last matrix product of backward,
    and that are not waited for before it."""
    for record in records:
        for step in record.steps():
            ends = max(
                index
                for index, event in enumerate(record.events)
                if event.op == COMPUTE and event.step == step and event.phase == "backward"
            )
            waits = [
                event
                for event in record.events[:ends]
                if event.op == WAIT and event.step == step and event.of is not None
            ]
            if waits:
                raise Wrong(
                    f"overlap: in step {step}, rank {record.rank} waits for a call of {record.events[waits[0].of].op}"
                    " while backward still has layers to compute; start it with async_op=True and wait in finish()"
                )
            early = sum(event.sent for event in record.events[:ends] if event.step == step)
            if early < fraction * record.sent(step):
                raise Wrong(
                    f"overlap: in step {step}, rank {record.rank} sends {early / record.sent(step):.0%} of its bytes by"
                    f" calls that start before backward ends, expected at least {fraction:.0%}"
                )


def calls_in_words(record: Record, step: int) -> str:
    """`4 × all_reduce, 1 × broadcast`; `nothing` without communication."""
    names = [event.op for event in record.of_step(step) if event.op not in (COMPUTE, WAIT) and event.sent]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "nothing"


def sent_at_most(records: Sequence[Record], most: Bytes, why: str) -> None:
    """No rank sends more than `most(record)` bytes in a step; `why` says what that number consists of."""
    for record in records:
        for step in record.steps():
            if record.sent(step) > (1 + SLACK) * most(record):
                raise Wrong(
                    f"bytes sent: in step {step}, rank {record.rank} sends {size(record.sent(step))}, expected at most"
                    f" {size(most(record))} ({why}); it calls {calls_in_words(record, step)}"
                )


def gradients(records: Sequence[Record]) -> None:
    """The gradients of an answer's arguments are those of a single device: `figures["gradients"]` has, by step, the
    largest difference by name."""
    for record in records:
        for step, differences in enumerate(record.figures["gradients"]):
            for name, difference in differences.items():
                if not difference <= TOLERANCE:
                    raise Wrong(
                        f"gradients: in step {step}, rank {record.rank} has a gradient of {name} that differs by"
                        f" {difference:.2g} from that of a single device, expected at most {TOLERANCE:g}"
                    )


def flops(record: Record, step: int, *phases: str) -> int:
    """The operations of all matrix products of a rank in some phases of a step."""
    return sum(event.flops for event in record.of_step(step, *phases))


def computed(records: Sequence[Record], phases: Sequence[str], most: Bytes, why: str) -> None:
    """In these phases of a step, the matrix products of a rank take at most `most(record)` operations."""
    for record in records:
        for step in record.steps():
            made, expected = flops(record, step, *phases), most(record)
            if made > (1 + SLACK) * expected:
                raise Wrong(
                    f"computation: in {' and '.join(phases)} of step {step}, the matrix products of rank {record.rank}"
                    f" take {made:,} operations, expected at most {expected:,.0f} ({why})"
                )


def neighbours(records: Sequence[Record], ring: bool) -> None:
    """Ranks only send to the next rank and receive from the previous one; without a `ring`, also the reverse, and the
    last and the first rank are no neighbours."""
    n = len(records)
    for record in records:
        rank = record.rank
        beside = {rank - 1, rank + 1}
        peers = {"send": {(rank + 1) % n}, "recv": {(rank - 1) % n}} if ring else {"send": beside, "recv": beside}
        for event in record.events:
            if event.step == OUTSIDE or event.op in (COMPUTE, WAIT, FORWARD, BACKWARD):
                continue
            if event.op not in peers:
                raise Wrong(
                    f"neighbours: in {event.phase} of step {event.step}, rank {rank} calls {event.op}, expected"
                    " send and recv only"
                )
            if event.peer not in peers[event.op]:
                who = f"rank {event.peer}" if event.peer is not None else "any rank"
                raise Wrong(
                    f"neighbours: in {event.phase} of step {event.step}, rank {rank} calls {event.op} with {who},"
                    f" expected {' or '.join(f'rank {peer}' for peer in sorted(peers[event.op]) if 0 <= peer < n)}"
                )


def one_f_one_b(records: Sequence[Record]) -> None:
    """Every stage computes forwards and backwards in the order of 1F1B (Narayanan et al. 2021), with at most n − r
    micro-batches between forward and backward on rank r of n."""
    n = len(records)
    for record in records:
        rank = record.rank
        expected = [f"{kind}{number}" for kind, _, number in order("1F1B", rank, n, record.figures["count"])]
        for step in record.steps():
            got = schedule(record, step)
            if got != expected:
                raise Wrong(
                    f"order: in step {step}, rank {rank} of {n} computes {' '.join(got)} with {_live(got)} live"
                    f" activations, expected {' '.join(expected)} with {_live(expected)}"
                )


def schedule(record: Record, step: int) -> list[str]:
    """The forwards and backwards of a stage in a step, in order: `F0`, `F1`, `B0`, …"""
    return [f"{event.op}{event.of}" for event in record.of_step(step) if event.op in (FORWARD, BACKWARD)]


def _live(order: Sequence[str]) -> int:
    """The largest number of micro-batches between forward and backward."""
    return max(accumulate((1 if each.startswith(FORWARD) else -1 for each in order), initial=0))
