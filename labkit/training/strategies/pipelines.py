"""Pipelines: where the blocks are cut into stages, and limits of the schedules (one sentence with the nearest working
choice). Like the table that refers to these functions, it does not import torch.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.plan.spec import Spec

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # schedules whose stages go down the ranks and up again
TWO_STAGES = ("Interleaved1F1B", "InterleavedZeroBubble", *V_SHAPED)  # schedules with two stages per rank
# schedules that need at least one micro-batch per stage, each with one that does not
ONE_PER_STAGE = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}


def holder(stage: int, ranks: int, schedule: str) -> int:
    """The rank, of the `ranks` of a pipeline, that holds a stage."""
    return min(stage, 2 * ranks - 1 - stage) if schedule in V_SHAPED else stage % ranks


def cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """The boundaries of `stages` contiguous stages of blocks, `stages` + 1 indices, that minimize the cost of the most
    expensive stage."""
    sums = [0.0, *accumulate(costs)]
    # best[last]: for blocks[:last], the minimal cost of the most expensive stage, and the first block of each stage
    best = {last: (cost, (0,)) for last, cost in enumerate(sums) if last}
    for _ in range(stages - 1):
        best = {
            last: min(
                (max(worst, sums[last] - sums[first]), (*starts, first))
                for first, (worst, starts) in best.items()
                if first < last
            )
            for last in range(min(best) + 1, len(sums))
        }
    return (*best[len(costs)][1], len(costs))


def _ranks(spec: Spec) -> int | None:
    return spec.options.get("pp_size", spec.nproc)


def constants(spec: Spec) -> dict[str, Any]:
    """The stage boundaries, and the first rank that holds the last stage; ranks with the same stage are adjacent in the
    mesh."""
    ranks, schedule = _ranks(spec), spec.options["schedule"]
    stages = ranks * (2 if schedule in TWO_STAGES else 1)
    last = holder(stages - 1, ranks, schedule) * (spec.nproc // ranks)
    bounds = cut(spec.workload_row.costs(spec.options), stages)
    return {"STAGES": bounds, "LOSS_RANK": last, "MESH": "pp_size" in spec.options}


def limit(spec: Spec) -> str | None:
    ranks, schedule, micro_batches = _ranks(spec), spec.options["schedule"], spec.options["micro_batches"]
    if ranks is None:
        return None
    flag = "pp_size=" if "pp_size" in spec.options else "--nproc "
    if ranks < 2:
        return f"a pipeline needs at least 2 ranks, got {flag}{ranks}; use {flag}2, or the strategy single"
    blocks, each = len(spec.workload_row.costs(spec.options)), 2 if schedule in TWO_STAGES else 1
    if ranks * each > blocks:
        near = f"{flag}{blocks // each}" if blocks // each > 1 else f"schedule=1F1B with {flag}{min(ranks, blocks)}"
        return (
            f"{spec.workload} has {blocks} blocks, too few for the {ranks * each} stages of {schedule} on {ranks}"
            f" ranks; use {near}"
        )
    if schedule in ONE_PER_STAGE and micro_batches < ranks * each:
        return (
            f"{schedule} needs at least one micro-batch per stage, got micro_batches={micro_batches} for"
            f" {ranks * each} stages; use micro_batches={ranks * each}, or schedule={ONE_PER_STAGE[schedule]}"
        )
    rounds = max(1, micro_batches // ranks)
    if each == 2 and schedule not in V_SHAPED and micro_batches % rounds:
        near = micro_batches // ranks * ranks
        return (
            f"{schedule} runs the micro-batches in {rounds} equal rounds, and micro_batches={micro_batches} is not"
            f" divisible by {rounds}; use micro_batches={near} or {near + ranks}"
        )
    return None


def micro_batch_limit(spec: Spec) -> str | None:
    count = spec.options["micro_batches"]
    if spec.nproc is None or spec.batch_per_rank % count == 0:
        return None
    batch = spec.batch_per_rank
    near = max(number for number in range(1, min(count, max(batch, 1)) + 1) if batch % number == 0)
    larger = -(-batch // count) * count
    return (
        f"a batch of {batch} is not divisible by micro_batches={count}; use micro_batches={near}, or a batch of"
        f" {larger} per rank"
    )
