"""Exercises of lab 21: the bytes of a change of placement, and a plan that splits a block on four CPU ranks. The block
has other names and another order of dimensions for each learner."""

from __future__ import annotations

import math
from typing import Any

from labkit.course.build import criteria
from labkit.course.build.criteria import check_function, records_of, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, Wrong, drawn, number_of, require_function
from labkit.record.writer import sent

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


_RANKS = 4
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
    recorded = records_of("dtensor.trial", "split_block", answer, _RANKS, names=names, sequence=sequence)
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


EXERCISES = {
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
        f" them.\n\n{solution(__file__, 'parallelize')}",
        task=_task,
        runs="code",
    ),
}
