"""Exercises of lab 03: steps and last batches, a sampler of one's own, and a run with buckets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished
from labkit.plan.spec import Spec

_BATCH, _STEPS, _MOST = 192, 12, 4


def _steps(answer: Any) -> str:
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or len(answer) != 2:
        raise Wrong(f"the answer is two numbers, (steps, samples), and this is {answer!r}")
    steps, last = answer
    if steps == 521:
        raise Wrong("521 steps are those of one rank alone; eight ranks share the 50,000 images")
    if steps == 65:
        raise Wrong("65 full steps leave a rest: each rank has samples that no full batch takes")
    if steps != 66:
        raise Wrong("first divide the images by the ranks, then a rank's share by its batch")
    if last == 80:
        raise Wrong("80 are left over for all ranks together; each has a part of them")
    if last != 10:
        raise Wrong(f"{last!r}: a rank's share less what it took in the full steps is left for the last one")
    return "6,250 images a rank: 65 batches of 96, and one of 10"


def _sampler(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function of (order, rank, ranks), and this is {answer!r}")
    for samples, ranks in ((12, 2), (12, 3), (10, 4), (7, 5)):
        order = random.Random(samples).sample(range(100, 100 + samples), samples)
        parts = [_part(answer, order, rank, ranks) for rank in range(ranks)]
        where = f"with {samples} samples on {ranks} ranks"
        lengths = [len(part) for part in parts]
        if len(set(lengths)) > 1:
            raise Wrong(f"{where} the parts are {lengths} long: ranks with less leave the others waiting; fill up with samples again")
        taken = [sample for part in parts for sample in part]
        if set(taken) - set(order):
            raise Wrong(f"{where} there is {sorted(set(taken) - set(order))[0]} in a part, which is no sample of the order")
        missing = [sample for sample in order if sample not in taken]
        if missing:
            raise Wrong(f"{where} nobody takes the sample at place {order.index(missing[0])} of the order")
        if lengths[0] > -(-samples // ranks):
            raise Wrong(f"{where} each rank takes {lengths[0]} samples; {-(-samples // ranks)} are enough for all to be taken")
    return "every sample is taken, by ranks of equal length: what DistributedSampler does"


def _part(function: Any, order: list[int], rank: int, ranks: int) -> list[Any]:
    """What a learner's function gives one rank, as a list."""
    given = list(order)
    try:
        part = function(given, rank, ranks)
    except Exception as error:
        raise Wrong(f"mine({order}, {rank}, {ranks}) raised {type(error).__name__}: {error}") from None
    if not isinstance(part, Sequence) or isinstance(part, (str, bytes)):
        raise Wrong(f"mine({order}, {rank}, {ranks}) gave {part!r}, and a list of samples is asked for")
    return list(part)


def _buckets(answer: Any) -> str:
    state = finished(answer).state
    if (state.spec or {}).get("strategy") != "ddp" or state.world_size < 2:
        raise Wrong(f"DDP on two ranks or more was asked for, and this is {answer.name}")
    if any(found.name in ("same_samples", "no_set_epoch") for found in answer.findings()):
        raise Wrong("its ranks do not take each sample once; look at its findings()")
    spec = Spec.from_json(state.spec)
    if spec.global_batch != _BATCH:
        raise Wrong(f"a step of all ranks takes {spec.global_batch} samples, and not {_BATCH}: {spec.batch_sentence}")
    if state.step < _STEPS:
        raise Wrong(f"{state.step} steps are too few; {_STEPS} were asked for")
    calls = sum(entry.calls for entry in answer.ledger() if entry.op == "all_reduce")
    if calls <= 1:
        raise Wrong("its gradients go out in one bucket, which is full only when backward is over: nothing can be hidden")
    if calls > _MOST:
        raise Wrong(f"its gradients go out in {calls:.0f} buckets, and {_MOST} are the most that were asked for")
    return f"{calls:.0f} buckets a step: the first can travel while backward still works on the layers before it"


EXERCISES = {
    "steps": Exercise(
        "Steps, and the last batch",
        _steps,
        "**(66, 10).** A rank's share is 50,000 / 8 = 6,250; 65 batches of 96 are 6,240, and the 66th has 10.",
    ),
    "sampler": Exercise(
        "A sampler of your own",
        _sampler,
        "`whole = order + order[: -len(order) % ranks]`, then `return whole[rank::ranks]`: filled up from the front, dealt out in turns.",
    ),
    "buckets": Exercise(
        "A run with buckets",
        _buckets,
        '`run("ddp", **place(2), batch_size=96, steps=12, options={"bucket_mb": 1}).wait()`: the 1.5 MiB of the CNN make two buckets of '
        "1 MiB at the least. With 25, DDP's own, they make one.",
    ),
}
