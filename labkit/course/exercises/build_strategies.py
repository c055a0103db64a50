"""Exercises of labs 13, 14 and 21: data and model parallelism written by the learner, and a plan for DTensor.

Every answer that runs does so on four CPU ranks, the first pipeline on two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from labkit.common.units import size
from labkit.course.answers import Wrong, number_of, require_function
from labkit.course.build import criteria
from labkit.course.build.criteria import Bytes, check_class, check_function, records_of, sent_in_words, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, drawn
from labkit.record.writer import sent

EXERCISES: dict[str, Exercise] = {}
_RANKS = 4

# ---- lab 13: data parallelism, from the all-reduce after backward to FSDP


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
    records = _trained(criteria.ended(records_of("data_parallel", "naive", answer, _RANKS)))
    return f"{_differs(records)}; {sent_in_words(records[0])}"


def _hooks(answer: Any) -> str:
    check_class(answer, "whose objects have finish()", ["model"])
    records = _trained(criteria.ended(records_of("data_parallel", "hooks", answer, _RANKS)))
    early = criteria.overlap(records, 0.5)
    return f"{early:.0%} of the bytes are sent while backward still computes; {sent_in_words(records[0])}"


def _buckets(answer: Any) -> str:
    check_class(answer, "whose objects have finish() and no_sync()", ["model", "bucket_bytes"])
    records = _trained(criteria.ended(records_of("data_parallel", "buckets", answer, _RANKS)))
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
    records = criteria.ended(records_of("data_parallel", "zero", answer, _RANKS))
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
    records = criteria.ended(records_of("data_parallel", "fsdp", answer, _RANKS))
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
        why = f"more than before the step: the activations, {units} units"
        if gradients:
            why = f"{why} and the gradients of a shard"

        def most(record: Record, units: int = units, gradients: int = gradients) -> float:
            return record.figures["activations"] + units * record.figures["unit"] + gradients * _shard(record)

        criteria.memory(records, moment, most, why)
    return f"{_has(records)}; {sent_in_words(records[0])}"


EXERCISES |= {
    "build_data_parallel.naive": Exercise(
        "All-reduce after backward", _naive, solution("build_strategies", "average_gradients"), runs="code"
    ),
    "build_data_parallel.hooks": Exercise(
        "All-reduce during backward", _hooks, solution("build_strategies", "Overlapped"), runs="code"
    ),
    "build_data_parallel.buckets": Exercise(
        "Buckets and no_sync", _buckets, solution("build_strategies", "Bucketed"), runs="code"
    ),
    "build_data_parallel.zero1": Exercise("ZeRO-1", _zero1, solution("build_strategies", "ZeRO1"), runs="code"),
    "build_data_parallel.zero2": Exercise("ZeRO-2", _zero2, solution("build_strategies", "ZeRO2"), runs="code"),
    "build_data_parallel.fsdp": Exercise(
        "One unit of FSDP", _fsdp, solution("build_strategies", "Unit", "GatherAndCompute"), runs="code"
    ),
}


# ---- lab 14: tensor parallelism, a pipeline on four ranks or two, and ring attention


_MLP = ["w1", "b1", "w2", "b2"]


def _messages(record: Record) -> float:
    """Bytes of two all-reduces of the activations, which is also two all-gathers and two reduce-scatters of them."""
    return 2 * sent("all_reduce", record.figures["message"], _RANKS)


def _mlp(answer: Any, trial: str, why: str, bias: float) -> str:
    """What an MLP does, in words; `bias` is the number of all-reduces of the replicated bias per step."""
    check_class(answer, "of modules", _MLP)
    records = criteria.ended(records_of("tensor_parallel", trial, answer, _RANKS))
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


_column_row = partial(
    _mlp, trial="column_row", why="an all-reduce of the activations in forward, and one in backward", bias=0
)
_sequence = partial(
    _mlp, trial="sequence", why="an all-gather and a reduce-scatter in forward and in backward, and b2", bias=1
)


def _cross_entropy(answer: Any) -> str:
    check_function(answer, ["logits", "targets"])
    records = criteria.ended(records_of("tensor_parallel", "cross_entropy", answer, _RANKS))
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
    records = criteria.ended(records_of("pipeline", "schedule", answer, ranks))
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


def _attention(answer: Any, trial: str) -> list[Record]:
    check_function(answer, ["q", "k", "v"])
    records = criteria.ended(records_of("ring_attention", trial, answer, _RANKS))
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


EXERCISES |= {
    "build_model_parallel.column_row": Exercise(
        "An MLP by columns and rows",
        _column_row,
        solution("build_strategies", "summed", "F", "G", "ParallelMLP"),
        runs="code",
    ),
    "build_model_parallel.sequence": Exercise(
        "Sequence parallelism",
        _sequence,
        solution("build_strategies", "gathered", "scattered", "Gather", "Scatter", "SequenceParallelMLP"),
        runs="code",
    ),
    "build_model_parallel.cross_entropy": Exercise(
        "A parallel cross-entropy",
        _cross_entropy,
        solution("build_strategies", "CrossEntropy", "cross_entropy"),
        runs="code",
    ),
    "build_model_parallel.two_stages": Exercise(
        "1F1B with two stages", partial(_pipeline, ranks=2), solution("build_strategies", "one_f_one_b"), runs="code"
    ),
    "build_model_parallel.four_stages": Exercise(
        "1F1B with four stages", partial(_pipeline, ranks=4), solution("build_strategies", "one_f_one_b"), runs="code"
    ),
    "build_model_parallel.ring_attention": Exercise(
        "Ring attention",
        _ring_attention,
        solution("build_strategies", "passed_on", "pairs", "scores_of", "RingAttention", "ring_attention"),
        runs="code",
    ),
    "build_model_parallel.balanced": Exercise(
        "Ring attention with balanced ranks",
        _balanced,
        solution("build_strategies", "balanced_ring_attention"),
        runs="code",
    ),
}


# ---- lab 21: the bytes of a change of placement, and a plan that splits a block, which each learner gets with other
# names and another order of dimensions


# ---- the bytes of a change of placement


_REPLICATE, _PARTIAL = "R", "P"
_CASES = ((4096, 4), (1 << 20, 8), (6 << 20, 2))  # bytes of the whole tensor, ranks


def _sent(before: str, after: str, whole: float, ranks: int) -> float:
    """Bytes that a rank sends, by a ring or in an all-to-all."""
    passed = whole * (ranks - 1) / ranks  # to all other ranks: everything but one chunk
    if before in (after, _REPLICATE):
        return 0.0
    if before == _PARTIAL:
        return 2 * passed if after == _REPLICATE else passed
    return passed if after == _REPLICATE else passed / ranks


def _bytes(answer: Any) -> str:
    require_function(answer, "sent(before, after, size, ranks)")
    pairs = [(before, after) for before in (_REPLICATE, _PARTIAL, "S0", "S1") for after in (_REPLICATE, "S0", "S1")]
    for whole, ranks in _CASES:
        for before, after in pairs:
            call = f"sent({before!r}, {after!r}, {whole}, {ranks})"
            given = number_of(call, "of bytes", answer, before, after, whole, ranks)
            wanted = _sent(before, after, whole, ranks)
            if not math.isclose(given, wanted, rel_tol=1e-9, abs_tol=1e-9):
                raise Wrong(f"{call} returned {given:g}: {_why(before, after, given, whole, ranks)}")
    return (
        f"right for {len(pairs)} changes of placement; only the ones from a partial sum and from a shard cost anything"
    )


def _why(before: str, after: str, given: float, whole: int, ranks: int) -> str:
    """A hint for a wrong number of bytes."""
    chunk = whole / ranks
    if before == after:
        return "nothing changes, so nothing is sent"
    if before == _REPLICATE:
        return "each rank has the whole tensor already; what does it need from the others?"
    if before == _PARTIAL and after == _REPLICATE:
        return "an all-reduce is a reduce-scatter and an all-gather: two passes around the ring"
    if before == _PARTIAL:
        return "a reduce-scatter is one pass around the ring, in which all but one chunk of the whole tensor is sent"
    if after == _REPLICATE:
        if math.isclose(given, chunk):
            return "that is this rank's own shard; in the ring, it also passes on the shards of others"
        return "an all-gather is one pass around the ring, in which a rank sends all shards but one"
    if math.isclose(given, whole - chunk):
        return "that is an all-gather; a rank needs only a part of each shard, and keeps one part"
    return "an all-to-all: a rank has size / ranks bytes, and sends all of them but the part that it keeps"


# ---- a plan for a block


_NORMS = ("norm", "input_norm", "ln_1")
_MIXERS = ("attention", "attn", "mixer")
_PROJECTIONS = ("query", "key", "value", "output")
_NAMES = ("w1", "w2", "w3", "w4")
_ORDERS = (("positions", "samples"), ("samples", "positions"))


def block_of_learner() -> tuple[dict[str, str], int]:
    """The names of the block's modules by role, and the dimension of the positions, as drawn for this learner."""
    random = drawn("dtensor.plan")
    names = {"norm": random.choice(_NORMS), "attention": random.choice(_MIXERS)}
    names |= dict(zip(_PROJECTIONS, random.sample(_NAMES, len(_NAMES))))
    return names, random.randrange(len(_ORDERS))


def _task() -> str:
    names, sequence = block_of_learner()
    return (
        f"Your block computes x + {names['attention']}({names['norm']}(x)). In {names['attention']}, {names['query']},"
        f" {names['key']} and {names['value']} compute query, key and value, and {names['output']} the output. x has"
        f" the shape ({', '.join(_ORDERS[sequence])}, width), and each of {_RANKS} ranks has 1/{_RANKS} of the"
        " positions, before and after the block"
    )


def _plan(answer: Any) -> str:
    check_function(answer, ["block", "mesh"])
    names, sequence = block_of_learner()
    recorded = records_of("dtensor", "split_block", answer, _RANKS, names=names, sequence=sequence)
    _split([record for record in recorded if record is not None])
    try:
        records = criteria.ended(recorded)
    except Wrong as wrong:
        raise Wrong(f"{wrong}{_hint_of_error(str(wrong))}") from None
    criteria.results(records)
    try:
        criteria.sent_between(
            records,
            _activations,
            lambda record: _activations(record) + sent("all_reduce", record.figures["norm"], _RANKS),
            "an all-gather and a reduce-scatter of the activations in forward and in backward, and an all-reduce of the"
            " gradient of the norm",
        )
    except Wrong as wrong:
        raise Wrong(f"{wrong}{_hint_of_calls(records[0])}") from None
    return (
        f"losses and gradients are those of one device, and {criteria.sent_in_words(records[0])}; it stores"
        f" 1/{_RANKS} of every matrix"
    )


def _activations(record: Record) -> float:
    """Bytes that a rank sends in four passes around the ring."""
    return 4 * sent("all_gather", record.figures["activation"], _RANKS)


def _split(records: list[Record]) -> None:
    """No rank stores more than its share of a matrix."""
    for record in records:
        for name, share in record.figures.get("shares", {}).items():
            if share > 1 / _RANKS:
                raise Wrong(
                    f"parameters: rank {record.rank} stores {share:.0%} of {name}, expected {1 / _RANKS:.0%}; the plan"
                    f" has no style that splits {name.removesuffix('.weight')}"
                )


def _hint_of_error(words: str) -> str:
    if "mixed torch.Tensor and DTensor" in words:
        return "; a module without a style in the plan has ordinary parameters, and cannot compute with a DTensor"
    return ""


def _hint_of_calls(record: Record) -> str:
    forward, backward = (
        [event.op for event in record.of_step(0, phase) if event.sent] for phase in ("forward", "backward")
    )
    if forward.count("all_gather") > 1:
        return (
            "; query, key and value gather the same input separately: gather it once, before the module that has all"
            " three (PrepareModuleInput)"
        )
    if backward.count("all_reduce") > 1:
        return (
            "; query, key and value reduce the gradient of their common input separately: if this input stays a DTensor"
            " (use_local_output=False), its gradient is summed up first"
        )
    return ""


EXERCISES |= {
    "dtensor.bytes": Exercise(
        "The bytes of a change of placement",
        _bytes,
        "With `passed = size * (ranks - 1) / ranks`: 0 if nothing changes or from R; from P 2 · passed to R and passed"
        " to a shard; from a shard passed to R, and passed / ranks to the other shard, because a rank has only"
        " size / ranks bytes.",
    ),
    "dtensor.plan": Exercise(
        "A plan for a block",
        _plan,
        "The names and the dimension of the positions differ between learners; the verdict on an empty answer has"
        f" them.\n\n{solution('build_strategies', 'parallelize')}",
        task=_task,
        runs="code",
    ),
}
