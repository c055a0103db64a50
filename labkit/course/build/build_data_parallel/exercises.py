"""Exercises of lab 13: data parallelism written by the learner, from the all-reduce after backward to FSDP.

Every answer runs on four CPU ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from labkit.common.units import size
from labkit.course.build import criteria
from labkit.course.build.criteria import check_class, check_function, records_of, sent_in_words, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, Wrong
from labkit.record.writer import sent

_RANKS = 4


def _all_reduced(record: Record) -> float:
    """Bytes that a rank sends in an all-reduce of all gradients: 2 (n − 1) / n of them."""
    return sent("all_reduce", record.figures["gradients"], _RANKS)


_ALL_REDUCED = "2 (n − 1) / n of the gradients, once per step"


def _trained(records: Sequence[Record]) -> list[Record]:
    """The records of an answer that reduces gradients and trains as a single device does, on its own samples only."""
    criteria.results(records)
    criteria.sent_per_step(records, _all_reduced, _ALL_REDUCED)
    criteria.reduced(records)
    criteria.computed(records, _PHASES, _network, _network, "the network on the samples of this rank")
    return list(records)


_PHASES = ("accumulation", "forward", "backward", "finish")


def _network(record: Record) -> float:
    """Operations of forward and backward of a rank's samples; nobody needs the gradient of the network's input."""
    return 3 * record.figures["product"] - record.figures["first"]


def _differs(records: Sequence[Record]) -> str:
    worst = max(difference for record in records for difference in record.differences.values())
    return f"parameters and gradients differ from those of one device by {worst:.1g} at most"


def _naive(answer: Any) -> str:
    check_function(answer, ["model"])
    records = _trained(criteria.ended(records_of("build_data_parallel.trial", "naive", answer, _RANKS)))
    return f"{_differs(records)}; {sent_in_words(records[0])}"


def _hooks(answer: Any) -> str:
    check_class(answer, "whose objects have finish()", ["model"])
    records = _trained(criteria.ended(records_of("build_data_parallel.trial", "hooks", answer, _RANKS)))
    early = criteria.overlap(records, 0.5)
    return f"{early:.0%} of the bytes are sent while backward still computes; {sent_in_words(records[0])}"


def _buckets(answer: Any) -> str:
    check_class(answer, "whose objects have finish() and no_sync()", ["model", "bucket_bytes"])
    records = _trained(criteria.ended(records_of("build_data_parallel.trial", "buckets", answer, _RANKS)))
    _calls(records)
    early = criteria.overlap(records, 0.5)
    accumulated = size(max(record.sent(step, "accumulation") for record in records for step in record.steps()))
    return f"{sent_in_words(records[0])}, {early:.0%} of them during backward, and {accumulated} in no_sync()"


def _calls(records: Sequence[Record]) -> None:
    """Raises `Wrong` for more calls than buckets of half the size would need."""
    for record in records:
        most = 2 * math.ceil(record.figures["gradients"] / record.figures["bucket"])
        for step in record.steps():
            made = sum(1 for event in record.of_step(step) if event.sent)
            if made > most:
                raise Wrong(
                    f"calls: in step {step}, rank {record.rank} makes {made} calls, expected at most {most}: fill"
                    f" buckets of bucket_bytes = {record.figures['bucket']:,}"
                )


def _unit(record: Record) -> float:
    """U: bytes that a rank sends in one reduce-scatter of all gradients, or in one all-gather of all parameters."""
    return sent("all_gather", record.figures["parameters"], _RANKS)


def _shard(record: Record) -> float:
    return record.figures["parameters"] / _RANKS


def _zero(answer: Any) -> list[Record]:
    """The records of an answer to either stage, which shards the optimizer state and sends as much as DDP."""
    check_class(answer, "whose objects have step()", ["model", "make_optimizer"])
    records = criteria.ended(records_of("build_data_parallel.trial", "zero", answer, _RANKS))
    criteria.results(records)
    criteria.sent_per_step(
        records, lambda record: 2 * _unit(record), "a reduce-scatter of the gradients, an all-gather of the parameters"
    )
    criteria.reduced(records)
    criteria.computed(
        records, ("forward", "backward", "update"), _network, _network, "the network on the samples of this rank"
    )
    _stored(records, lambda record: record.figures["parameters"] + 3 * _shard(record), f"the parameters, and {_STATE}")
    return records


_STATE = "of a shard of them a copy and the two moments of Adam"


def _stored(records: Sequence[Record], tensors: criteria.Bytes, why: str) -> None:
    """Between two steps, no rank has more tensors than `tensors(record)` bytes, nor hides others in its process."""
    criteria.memory(records, "between two steps", tensors, why)
    criteria.process(records, "between two steps", lambda record: 0.75 * record.figures["parameters"], "its own needs")


def _has(records: Sequence[Record]) -> str:
    tensors = max(record.memory["between two steps"][-1] for record in records)
    grown = max(count for record in records for count in record.process["between two steps"])
    return f"between two steps a rank has {size(tensors)} of tensors, and {size(max(grown, 0))} of other new memory"


def _zero1(answer: Any) -> str:
    records = _zero(answer)
    return f"{_has(records)}; {sent_in_words(records[0])}"


def _zero2(answer: Any) -> str:
    records = _zero(answer)
    criteria.memory(
        records,
        "after backward",
        lambda record: _shard(record) + record.figures["largest"],
        "more than before it: a shard of the gradients, and one whole gradient",
    )
    criteria.memory(
        records,
        "at the peak of backward",
        lambda record: _shard(record) + 2 * record.figures["largest"],
        "more than before it: a shard of the gradients, and two whole gradients",
    )
    left = size(criteria.most_memory(records, "after backward"))
    return f"backward leaves {left} more than before it; {_has(records)}; {sent_in_words(records[0])}"


def _fsdp(answer: Any) -> str:
    check_class(answer, "of modules", ["layer"])
    records = criteria.ended(records_of("build_data_parallel.trial", "fsdp", answer, _RANKS))
    criteria.results(records)
    criteria.sent_per_step(records, lambda record: 3 * _unit(record), "two all-gathers and a reduce-scatter")
    criteria.reduced(records)
    criteria.computed(
        records,
        ("forward", "backward"),
        _network,
        lambda record: 4 * record.figures["product"],
        "forward, and backward with another forward, on the samples of this rank",
    )
    shards = "a shard of the parameters and the two moments of Adam"
    criteria.memory(records, "after the construction", _shard, "a shard of the parameters")
    _stored(records, lambda record: 3 * _shard(record), shards)
    for moment, units, gradients in (
        ("at the peak of forward", 2, 0),
        ("after forward", 0, 0),
        ("at the peak of backward", 3, 1),
    ):
        criteria.memory(
            records,
            moment,
            lambda record, units=units, gradients=gradients: (
                record.figures["activations"] + units * record.figures["unit"] + gradients * _shard(record)
            ),
            f"more than before the step: the activations, {units} units{' and the gradients of a shard' * gradients}",
        )
    return f"{_has(records)}; {sent_in_words(records[0])}"


EXERCISES = {
    "build_data_parallel.naive": Exercise(
        "All-reduce after backward", _naive, solution(__file__, "average_gradients"), runs="code"
    ),
    "build_data_parallel.hooks": Exercise(
        "All-reduce during backward", _hooks, solution(__file__, "Overlapped"), runs="code"
    ),
    "build_data_parallel.buckets": Exercise(
        "Buckets and no_sync", _buckets, solution(__file__, "Bucketed"), runs="code"
    ),
    "build_data_parallel.zero1": Exercise("ZeRO-1", _zero1, solution(__file__, "ZeRO1"), runs="code"),
    "build_data_parallel.zero2": Exercise("ZeRO-2", _zero2, solution(__file__, "ZeRO2"), runs="code"),
    "build_data_parallel.fsdp": Exercise(
        "One unit of FSDP", _fsdp, solution(__file__, "Unit", "GatherAndCompute"), runs="code"
    ),
}
