"""Exercises of lab 06: splitting a pair of matrices, and logits that stay sharded."""

from __future__ import annotations

from typing import Any

from labkit.common.units import size
from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished

_CASES = ((2, 3, 4, 5), (2, 4, 6, 3), (3, 5, 9, 4), (4, 2, 8, 6))  # ranks, width of x, inner width, width of y


def _parts(answer: Any) -> str:
    require_function(answer, "parts(a, b, rank, ranks)")
    import torch

    for ranks, width_in, inner, width_out in _CASES:
        draw = torch.Generator().manual_seed(ranks)
        shapes = ((7, width_in), (width_in, inner), (inner, width_out))
        x, a, b = (torch.randint(-3, 4, shape, generator=draw).double() for shape in shapes)
        total = torch.zeros(7, width_out, dtype=torch.double)
        for rank in range(ranks):
            case = f"rank {rank} of {ranks}, with a of {width_in}×{inner} and b of {inner}×{width_out}"
            shards = _called(answer, (a.clone(), b.clone(), rank, ranks), case)
            _shaped(shards, (width_in, inner // ranks), (inner // ranks, width_out), case)
            total += torch.relu(x @ shards[0].double()) @ shards[1].double()
        if not torch.allclose(total, torch.relu(x @ a) @ b):
            raise Wrong(
                f"on {ranks} ranks every shard has the right shape, but the sum is not relu(x @ a) @ b: a rank's"
                " columns of a and its rows of b must have the same indices, and each index must belong to one rank"
            )
    return "the sum of the partial sums is the whole product, on 2, 3 and 4 ranks"


def _called(answer: Any, given: tuple, case: str) -> tuple:
    shards = result_of(f"for {case}, parts(a, b, rank, ranks)", answer, *given)
    if (
        not isinstance(shards, (tuple, list))
        or len(shards) != 2
        or not all(hasattr(shard, "shape") for shard in shards)
    ):
        raise Wrong(
            f"for {case}, the function must return two tensors, a shard of a and one of b, got {type(shards).__name__}"
        )
    return tuple(shards)


def _shaped(shards: tuple, a: tuple[int, int], b: tuple[int, int], case: str) -> None:
    for name, shard, wanted in zip("ab", shards, (a, b)):
        if tuple(shard.shape) != wanted:
            raise Wrong(
                f"for {case}, the shard of {name} is {'×'.join(map(str, shard.shape))}; every rank has all columns of"
                f" x, and relu needs complete sums: along which dimension can {name} be split then?"
            )


def _logits(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.spec
    if spec.strategy != "tp" or spec.workload != "gpt":
        raise Wrong(f"the run must train gpt with tp, got {spec.workload or 'a script'} with {spec.strategy}")
    if run.state.world_size != 2:
        raise Wrong(f"the world size must be 2, got {run.state.world_size}")
    entries = run.ledger()
    if not entries:
        raise Wrong("no step of this run was profiled; run at least 5 steps")
    gathered = sum(entry.measured for entry in entries if entry.op == "all_gather")
    if gathered and not spec.options.get("loss_parallel"):
        raise Wrong(f"a step still all-gathers {size(gathered)}; look for an option that concerns the loss")
    return (
        "each rank computes its part of the loss from its shard of the logits: 3 numbers per position are sent instead"
        " of 256"
    )


EXERCISES = {
    "parts": Exercise(
        "Split a pair of matrices",
        _parts,
        "`return a.chunk(ranks, dim=1)[rank], b.chunk(ranks, dim=0)[rank]`: columns of the first, the same rows of the"
        " second. relu between them gets complete sums, so a single all-reduce at the end is enough.",
    ),
    "logits": Exercise(
        "Do not gather the logits",
        _logits,
        '`run("tp", workload="gpt", nproc=2, steps=5, samples=200, options={"loss_parallel": True}).wait()`: of all'
        " logits, the loss needs the maximum, the sum of exponentials and the logit of the target: three small"
        " all-reduces.",
    ),
}
