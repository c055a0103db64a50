"""Exercises of lab 03: steps and the last batch, a distributed sampler, and a run with several buckets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished

_BATCH, _MIN_STEPS, _MIN_BUCKETS, _MAX_BUCKETS = 24, 12, 3, 4


def _steps(answer: Any) -> str:
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or len(answer) != 2:
        raise Wrong(f"the answer must be two numbers, (steps, images), got {answer!r}")
    steps, last = answer
    if steps == 521:
        raise Wrong("521 steps are for a single rank; here eight ranks split the 50,000 images")
    if steps == 65:
        raise Wrong("after 65 full steps each rank has images left that do not fill a batch")
    if steps != 66:
        raise Wrong("first divide the images by the ranks, then the images of a rank by its batch size")
    if last == 80:
        raise Wrong("80 is the remainder over all ranks; what is the remainder of one rank?")
    if last != 10:
        raise Wrong(f"{last!r}: subtract the images of the full steps from the images of a rank")
    return "6,250 images per rank: 65 batches of 96, and one of 10"


def _sampler(answer: Any) -> str:
    require_function(answer, "of (order, rank, ranks)")
    for samples, ranks in ((12, 2), (12, 3), (10, 4), (7, 5)):
        order = random.Random(samples).sample(range(100, 100 + samples), samples)
        shards = [_shard(answer, order, rank, ranks) for rank in range(ranks)]
        case = f"with {samples} samples on {ranks} ranks"
        lengths = [len(shard) for shard in shards]
        if len(set(lengths)) > 1:
            raise Wrong(
                f"{case}, the ranks get {lengths} samples: ranks that finish early make the others hang; repeat some"
                " samples"
            )
        taken = [sample for shard in shards for sample in shard]
        if set(taken) - set(order):
            raise Wrong(f"{case}, a rank gets {sorted(set(taken) - set(order))[0]}, which is not in order")
        missing = [sample for sample in order if sample not in taken]
        if missing:
            raise Wrong(f"{case}, no rank gets the sample at index {order.index(missing[0])} of order")
        if lengths[0] > -(-samples // ranks):
            raise Wrong(f"{case}, each rank gets {lengths[0]} samples; {-(-samples // ranks)} per rank are enough")
    return "every sample is used, and all ranks get the same number: this is what DistributedSampler does"


def _shard(function: Any, order: list[int], rank: int, ranks: int) -> list[Any]:
    """The samples that a learner's function returns for one rank, as a list."""
    given = list(order)
    shard = result_of(f"mine({order}, {rank}, {ranks})", function, given, rank, ranks)
    if not isinstance(shard, Sequence) or isinstance(shard, (str, bytes)):
        raise Wrong(f"mine({order}, {rank}, {ranks}) must return a list of samples, got {shard!r}")
    return list(shard)


def _buckets(answer: Any) -> str:
    state = finished(answer).state
    if state.spec.strategy != "ddp" or state.world_size < 2:
        raise Wrong(f"the run must be DDP on at least two ranks, got {answer.name}")
    if any(finding.name in ("same_samples", "no_set_epoch") for finding in answer.findings()):
        raise Wrong("the ranks do not use each sample once per epoch; see the findings() of the run")
    spec = state.spec.to_spec()
    if spec.global_batch != _BATCH:
        raise Wrong(f"the global batch size must be {_BATCH}, got {spec.global_batch} ({spec.batch_sentence})")
    if state.step < _MIN_STEPS:
        raise Wrong(f"the run must have at least {_MIN_STEPS} steps, got {state.step}")
    calls = sum(entry.calls for entry in answer.ledger() if entry.op == "all_reduce")
    if calls < _MIN_BUCKETS:
        raise Wrong(
            f"the run must have at least {_MIN_BUCKETS} buckets per step, got {calls:.0f}: how many bytes of gradients"
            " does the workload have, and how large is a bucket?"
        )
    if calls > _MAX_BUCKETS:
        raise Wrong(f"the run must have at most {_MAX_BUCKETS} buckets per step, got {calls:.0f}")
    return f"{calls:.0f} buckets per step: the first one is sent while backward still computes the earlier layers"


EXERCISES = {
    "steps": Exercise(
        "Steps, and the last batch",
        _steps,
        "**(66, 10).** A rank has 50,000 / 8 = 6,250 images; 65 batches of 96 are 6,240, and the 66th has 10.",
    ),
    "sampler": Exercise(
        "Write a distributed sampler",
        _sampler,
        "`padded = order + order[: -len(order) % ranks]`, then `return padded[rank::ranks]`: padded with the first"
        " samples, assigned round-robin.",
    ),
    "buckets": Exercise(
        "A run with several buckets",
        _buckets,
        '`run("ddp", **place(2), workload="gpt", batch_size=12, steps=12, options={"bucket_mb": 1}).wait()`: the 4.1'
        " MiB of the GPT fill four buckets of 1 MiB, and two by default. The 1.5 MiB of the CNN fill at most two.",
    ),
}
