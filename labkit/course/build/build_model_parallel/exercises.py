"""Exercises of lab 14: tensor parallelism, a pipeline and ring attention written by the learner.

Every answer runs on four CPU ranks, the first pipeline on two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.common.units import size
from labkit.course.build import criteria
from labkit.course.build.criteria import Bytes, check_class, check_function, records_of, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise
from labkit.record.writer import sent

_RANKS = 4
_MLP = ["w1", "b1", "w2", "b2"]


def _messages(record: Record) -> float:
    """Bytes of two all-reduces of the activations, which is also two all-gathers and two reduce-scatters of them."""
    return 2 * sent("all_reduce", record.figures["message"], _RANKS)


def _mlp(answer: Any, trial: str, why: str, bias: float) -> str:
    """What an MLP does, in words; `bias` is the number of all-reduces of the replicated bias per step."""
    check_class(answer, "of modules", _MLP)
    records = criteria.ended(records_of("build_model_parallel.tensor", trial, answer, _RANKS))
    criteria.results(records)
    criteria.sent_per_step(
        records,
        lambda record: _messages(record) + bias * sent("all_reduce", record.figures["bias"], _RANKS),
        why,
    )
    criteria.memory(
        records,
        "after the construction",
        lambda record: (record.figures["parameters"] - record.figures["bias"]) / _RANKS + record.figures["bias"],
        "1/n of each matrix and of b1, and b2; a view keeps the whole tensor alive, a clone does not",
    )
    criteria.computed(records, ("forward", "backward"), _share, _share, "the layer before the MLP, and 1/n of the MLP")
    most = max(record.flops(0) - record.figures["replicated"] for record in records)
    part = most / (_RANKS * records[0].figures["mlp"])
    return f"a rank computes {part:.0%} of the MLP; {criteria.sent_in_words(records[0])}"


def _share(record: Record) -> float:
    """Operations of the replicated layer and of this rank's share of the MLP, in forward and backward."""
    return record.figures["replicated"] + record.figures["mlp"]


def _column_row(answer: Any) -> str:
    return _mlp(answer, "column_row", "an all-reduce of the activations in forward, and one in backward", 0)


def _sequence(answer: Any) -> str:
    return _mlp(answer, "sequence", "an all-gather and a reduce-scatter in forward and in backward, and b2", 1)


def _cross_entropy(answer: Any) -> str:
    check_function(answer, ["logits", "targets"])
    records = criteria.ended(records_of("build_model_parallel.tensor", "cross_entropy", answer, _RANKS))
    criteria.results(records)
    criteria.sent_between(
        records,
        lambda record: sent("all_reduce", record.figures["token"], _RANKS),
        lambda record: 3 * sent("all_reduce", record.figures["token"], _RANKS),
        "three all-reduces of one number per token",
    )
    criteria.elements(
        records, ("forward", "backward"), lambda record: record.figures["logits"], "this rank's part of the logits", 40
    )
    logits = size(4 * records[0].figures["logits"])
    return f"{criteria.sent_in_words(records[0])}; its logits have {logits}"


def _pipeline(answer: Any, ranks: int) -> str:
    check_function(answer, ["stage", "count", "shape", "inputs", "loss_of"])
    records = criteria.ended(records_of("build_model_parallel.pipeline", "schedule", answer, ranks))
    criteria.results(records)
    criteria.neighbours(records, ring=False)
    criteria.one_f_one_b(records)
    criteria.sent_per_step(
        records,
        lambda record: (
            ((record.rank > 0) + (record.rank < ranks - 1)) * record.figures["count"] * record.figures["activation"]
        ),
        "the output of each micro-batch to the next stage, and the gradient of its input to the previous one",
    )
    criteria.computed(
        records,
        ("schedule",),
        lambda record: 5 * record.figures["product"],
        lambda record: 6 * record.figures["product"],
        "the two layers of one stage, in forward and backward",
    )
    order = criteria.schedule(records[0], 0)
    return f"rank 0 computes {' '.join(order)}: at most {criteria.live(order)} live activations"


def _two_stages(answer: Any) -> str:
    return _pipeline(answer, 2)


def _four_stages(answer: Any) -> str:
    return _pipeline(answer, 4)


def _attention(answer: Any, trial: str) -> list[Record]:
    check_function(answer, ["q", "k", "v"])
    records = criteria.ended(records_of("build_model_parallel.ring", trial, answer, _RANKS))
    criteria.results(records)
    criteria.neighbours(records, ring=True)
    criteria.sent_between(
        records,
        lambda record: record.figures["block"],
        lambda record: 3 * _RANKS * record.figures["block"],
        "n times k and v in forward, n times k, v and their gradients in backward",
    )
    criteria.memory(
        records,
        "after forward",
        lambda record: 2 * record.figures["out"] + record.figures["block"],
        "more than before it: the output and what backward needs, without the keys and values of other ranks",
    )
    return records


def _ring_attention(answer: Any) -> str:
    records = _attention(answer, "contiguous")
    whole = "the own queries with at most n blocks of keys"
    _pairs(records, ("forward",), lambda record: record.rank + 0.5, lambda record: _RANKS, whole)
    _pairs(records, ("backward",), lambda record: 2 * (record.rank + 0.5), lambda record: 4 * _RANKS, whole)
    flops = [record.flops(0, "forward") for record in records]
    return f"rank {_RANKS - 1} computes {flops[-1] / flops[0]:.3g} times the operations of rank 0 in forward"


def _balanced(answer: Any) -> str:
    records = _attention(answer, "balanced")
    blocks = 2 * _RANKS + 1
    visible = f"the {blocks} visible pairs of a chunk of queries and a chunk of keys"
    _pairs(records, ("forward",), lambda record: blocks - 1, lambda record: blocks, visible)
    _pairs(records, ("backward",), lambda record: 2 * (blocks - 1), lambda record: 4 * blocks, visible)
    made = [record.flops(0, "forward") / record.figures["flops"] for record in records]
    return f"a rank computes {min(made):.3g} to {max(made):.3g} of the {(2 * _RANKS) ** 2} pairs of chunks in forward"


def _pairs(records: Sequence[Record], phases: Sequence[str], least: Bytes, most: Bytes, why: str) -> None:
    """In these phases, a rank computes the attention of `least` to `most(record)` pairs of chunks. A half of the chunk
    on the diagonal may be left out; backward has two and a half times the products of forward."""
    criteria.computed(
        records,
        phases,
        lambda record: least(record) * record.figures["flops"],
        lambda record: most(record) * record.figures["flops"],
        why,
    )


EXERCISES = {
    "build_model_parallel.column_row": Exercise(
        "An MLP by columns and rows",
        _column_row,
        solution(__file__, "summed", "F", "G", "ParallelMLP"),
        runs="code",
    ),
    "build_model_parallel.sequence": Exercise(
        "Sequence parallelism",
        _sequence,
        solution(__file__, "gathered", "scattered", "Gather", "Scatter", "SequenceParallelMLP"),
        runs="code",
    ),
    "build_model_parallel.cross_entropy": Exercise(
        "A parallel cross-entropy",
        _cross_entropy,
        solution(__file__, "CrossEntropy", "cross_entropy"),
        runs="code",
    ),
    "build_model_parallel.two_stages": Exercise(
        "1F1B with two stages", _two_stages, solution(__file__, "one_f_one_b"), runs="code"
    ),
    "build_model_parallel.four_stages": Exercise(
        "1F1B with four stages", _four_stages, solution(__file__, "one_f_one_b"), runs="code"
    ),
    "build_model_parallel.ring_attention": Exercise(
        "Ring attention",
        _ring_attention,
        solution(__file__, "passed_on", "pairs", "scores_of", "RingAttention", "ring_attention"),
        runs="code",
    ),
    "build_model_parallel.balanced": Exercise(
        "Ring attention with balanced ranks",
        _balanced,
        solution(__file__, "balanced_ring_attention"),
        runs="code",
    ),
}
