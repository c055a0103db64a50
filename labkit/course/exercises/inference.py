"""Exercises of lab 25: what a sampler's GPU holds and what limits it, and weights that go from two trainers to two
samplers on four CPU ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from labkit.common.units import size
from labkit.course.answers import Wrong, explained, numbers_of, require_function
from labkit.course.build import criteria
from labkit.course.build.criteria import check_function, records_of, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise

# ---- weights, cache and batch of one GPU


Figures = Mapping[str, float]
Case = tuple[Figures, Figures, int, int]  # model, gpu, tp, context
_GPUS = (  # bytes, FLOP/s in bf16, bytes per second, by data sheet: A100, H100, H200
    {"memory": 80e9, "flops": 312e12, "bandwidth": 2.0e12},
    {"memory": 80e9, "flops": 989e12, "bandwidth": 3.35e12},
    {"memory": 141e9, "flops": 989e12, "bandwidth": 4.8e12},
)
_WHAT = ("bytes of weights", "bytes of cache", "the largest batch", "the batch from which decode is compute-bound")
_CLEAR = 0.1  # a draw in which reading caches costs about as much as computing, or almost nothing, says little


def _first(make: Callable[[], Case], fits: Callable[[float], bool]) -> Case:
    """The first case whose `_spared` fits."""
    while not fits(_spared(case := make())):
        pass
    return case


def _case(billions: int, kv_heads: int, group: int, tp: int, context: int) -> Case:
    """A case with `group` heads for each key-value head."""
    model = {
        "parameters": 1e9 * billions,
        "layers": random.randrange(32, 65),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_width": random.choice((64, 128)),
    }
    return model, random.choice(_GPUS), tp, context


def cases() -> list[Case]:
    """Four cases, drawn anew: one that is compute-bound from some batch on; one with a context with which no batch is;
    one with fewer key-value heads than GPUs; and one whose weights do not fit."""
    draw = random.randrange
    return [
        _first(
            lambda: _case(draw(20, 60), 8, random.choice((5, 7)), 4, 128 * draw(2, 40)),
            lambda spared: _CLEAR < spared < 1 - _CLEAR,
        ),
        _first(lambda: _case(draw(5, 12), 8, 4, 1, 1024 * draw(8, 32)), lambda spared: spared < -_CLEAR),
        _first(lambda: _case(draw(60, 120), 2, 16, 8, 128 * draw(2, 16)), lambda spared: abs(spared) > _CLEAR),
        _first(lambda: _case(draw(80, 120), 8, 8, 1, 128 * draw(8, 64)), lambda spared: abs(spared) > _CLEAR),
    ]


def _ridge(gpu: Figures) -> float:
    """The FLOP per byte from which on computing limits."""
    return gpu["flops"] / gpu["bandwidth"]


def _spared(case: Case) -> float:
    """What is left of the time of a sequence's operations when its cache is read, as a fraction; negative if reading
    takes longer."""
    weights, cache, *_ = served(*case)
    return 1 - cache * _ridge(case[1]) / weights


def served(model: Figures, gpu: Figures, tp: int, context: int) -> tuple[float, float, int, float]:
    """Of one GPU: bytes of weights, bytes of the cache of one sequence, the largest batch, and the batch from which
    decode is compute-bound, infinite if there is none. Everything is in bf16.

    A step computes 2 operations per parameter and sequence, and reads the weights once and the cache of each sequence.
    """
    weights = 2 * model["parameters"] / tp
    heads = max(1, model["kv_heads"] / tp)
    cache = 2 * 2 * model["layers"] * heads * model["head_width"] * context
    batch = max(0, math.floor((gpu["memory"] - weights) / cache))
    spared = 1 - cache * _ridge(gpu) / weights
    return weights, cache, batch, _ridge(gpu) / spared if spared > 0 else math.inf


def _memory(answer: Any) -> str:
    require_function(answer, "served(model, gpu, tp, context)")
    for case in cases():
        model, gpu, tp, context = case
        call = f"served({dict(model)}, {dict(gpu)}, {tp}, {context})"
        given = numbers_of(call, _WHAT, answer, dict(model), dict(gpu), tp, context)
        for what, got, right, why in zip(_WHAT, given, served(*case), _WHY):
            whole = what == _WHAT[3] and right < math.inf and got == math.ceil(right)  # the first batch that is
            if not _near(got, right) and not whole:
                raise Wrong(f"{call}: {what}: {got:,.6g}: {why(got, case)}")
    return (
        "right for four drawn cases; grouped-query attention makes room for a larger batch, and every sequence brings"
        " bytes of its own to read, so that a long context is never compute-bound"
    )


def _near(got: float, right: float) -> bool:
    return got == right or math.isclose(got, right, rel_tol=1e-6)


def _why_weights(got: float, case: Case) -> str:
    model, _, tp, _ = case
    mistakes = (
        (2 * model["parameters"], "tensor parallelism splits the weights over the GPUs"),
        (4 * model["parameters"] / tp, "a number in bf16 has two bytes"),
    )
    return explained(got, mistakes, "how many of the parameters does a GPU have, and how many bytes has each?")


def _why_cache(got: float, case: Case) -> str:
    model, _, tp, _ = case
    right, heads = served(*case)[1], max(1, model["kv_heads"] / tp)
    mistakes = (
        (right / 2, "keys and values are both stored"),
        (right * model["heads"] / tp / heads, "queries are not stored: several heads share a key and a value"),
        (right * model["kv_heads"] / heads, "each GPU has the keys and values of its own heads only"),
        (right * 2, "a number in bf16 has two bytes"),
        (right / model["layers"], "every layer has keys and values"),
        (
            right * model["kv_heads"] / tp / heads,
            "a head is not split: with more GPUs than key-value heads, each GPU has a copy of a whole one",
        ),
    )
    otherwise = "for each layer, position and key-value head of this GPU: a key and a value of head_width numbers"
    return explained(got, mistakes, otherwise)


def _why_batch(got: float, case: Case) -> str:
    weights, cache, batch, _ = served(*case)
    memory = case[1]["memory"]
    if got < 0:
        return "the weights alone do not fit, so that no sequence does: 0"
    if _near(got, memory // cache):
        return "the weights need memory as well"
    if _near(got, (memory - weights) / cache) or got == batch + 1:
        return "a sequence that fits in part does not fit"
    return "what the weights leave of the memory, divided by the cache of a sequence"


def _why_bound(got: float, case: Case) -> str:
    *_, right = served(*case)
    ridge = _ridge(case[1])
    if _near(got, ridge) or got == math.ceil(ridge):
        return "that is without the cache: each sequence adds bytes to read as well as operations"
    if math.isinf(right):
        return (
            "reading the cache of a sequence takes longer than its operations, so that no batch is large enough:"
            " math.inf"
        )
    if _near(got, right / 2) or _near(got, 2 * right):
        return "a parameter has 2 bytes, and costs 2 operations for each sequence"
    return "with which batch do 2 operations per parameter and sequence take as long as reading weights and caches?"


_WHY = (_why_weights, _why_cache, _why_batch, _why_bound)


# ---- weights from trainers to samplers


_RANKS = 4
_COUNTED = 3 / 4  # of what it needs, an all-to-all over all four ranks is counted with this share as sent
_FEW = 4096  # bytes that a sampler may send, such as a message that it is ready
_UNITS = 2  # times the largest matrix, which a rank may hold beyond what it ends with


def _weights(answer: Any) -> str:
    check_function(answer, ["matrices", "shards"])
    records = criteria.ended(records_of("inference", "hand_over", answer, _RANKS))
    _formats(records)
    criteria.results(records)
    try:
        criteria.sent_between(
            records,
            lambda record: _COUNTED * record.figures["shard"],
            lambda record: record.figures["shard"] or _FEW,
            "a trainer sends each number of its shard in bf16 to the one sampler that needs it, and samplers send"
            " nothing",
        )
    except Wrong as wrong:
        raise Wrong(f"{wrong}{_why_sent(records)}") from None
    criteria.memory(
        records,
        "at the peak",
        lambda record: _UNITS * record.figures["largest"] + (0 if record.figures["trains"] else _part(record)),
        f"{_UNITS} matrices in bf16, and on a sampler its part of the weights: hand over one matrix after the other",
    )
    peak = criteria.most_memory(records[2:], "at the peak")
    return (
        f"the samplers have exactly what the trainers have, in bf16; a trainer sends {size(records[0].sent(0))} per"
        f" hand-over, which is its shard once, and a sampler holds {size(peak)} at most, while the model has"
        f" {size(records[0].figures['whole'])}"
    )


def _part(record: Record) -> float:
    """Bytes of a sampler's part of the weights; matrices with an odd number of rows are split along the other one."""
    return record.figures["whole"] / 2


def _formats(records: list[Record]) -> None:
    for record in records:
        wrong = sorted(set(record.figures["formats"]) - {"bfloat16"})
        if wrong:
            raise Wrong(f"parameters: the sampler on rank {record.rank} gets {', '.join(wrong)}, expected bfloat16")


def _why_sent(records: list[Record]) -> str:
    """What a number of bytes that is wrong comes from."""
    trainers = [record for record in records if record.figures["trains"]]
    calls = {event.op for record in trainers for event in record.of_step(0) if event.sent}
    if "all_gather" in calls or any(record.sent(0) > _FEW for record in records[len(trainers) :]):
        return "; nobody needs whole matrices: which rows and columns does each sampler need, and who has them?"
    if any(record.sent(0) > 1.5 * record.figures["shard"] for record in trainers):
        return "; is it cast to bf16 before it is sent, and does a sampler get only what it keeps?"
    return ""


EXERCISES = {
    "inference.memory": Exercise(
        "What a sampler holds, and what limits it",
        _memory,
        "With `weights = 2 * parameters / tp` and `cache = 4 * layers * max(1, kv_heads / tp) * head_width * context`:"
        " the largest batch is `max(0, (memory - weights) // cache)`. A step computes `weights * batch` operations"
        " (2 per parameter, which has 2 bytes) and reads `weights + batch * cache` bytes. With `ridge = flops /"
        " bandwidth`, both take equally long at `ridge / (1 - cache * ridge / weights)`; if the denominator is not"
        " positive, never: `math.inf`.",
    ),
    "inference.weights": Exercise(
        "Weights from trainers to samplers",
        _weights,
        solution("inference", "hand_over"),
        given="sampler.py",
        runs="code",
    ),
}
