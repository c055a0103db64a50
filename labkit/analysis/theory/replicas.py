"""The expected traffic of replicas: of DataParallel's threads, of DDP, and of optimizers and engines that shard what
replicas have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from labkit.analysis.theory.pieces import Case, Flow, flow_of, scalars, scattered

# bytes of parameters that stay gathered under DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance
_KEPT = 4 * 10**9


def threads(case: Case) -> Iterator[Flow]:
    """`nn.DataParallel`: device 0 takes part in all traffic, and keeps its own part."""
    samples, others = case.batch * case.n, case.n - 1
    unseen = "copies from device 0 within its process are not measured"
    inputs = case.spec.data_row.input_bytes(case.options)
    for op, size, formula in (
        ("scatter", case.batch * inputs * others, "(n−1)/n · inputs"),
        ("broadcast", case.size * others, "(n−1) · 4P"),
    ):
        yield Flow(op, size, formula, ((-size, unseen),))
    logits = (2 if case.half else 4) * case.outputs[-1][0]
    yield Flow("gather", others / case.n * samples * logits, "(n−1)/n · logits")
    yield Flow("reduce", case.size * others, "(n−1) · 4P")


def gradients(case: Case) -> Iterator[Flow]:
    """DDP (Li et al. 2020) all-reduces every gradient once; PowerSGD (Vogels et al. 2019) the factors of a matrix, from
    step 3 on.
    """
    compression = case.options.get("compression", "none")
    if compression == "powersgd" and case.step > 2:
        yield flow_of("all_reduce", 4 * sum(map(_low_rank, case.shapes)), case.n, "4·(rows + columns + vectors)")
    elif compression == "fp16":
        yield flow_of("all_reduce", case.size / 2, case.n, "2P")
    else:
        yield flow_of("all_reduce", case.size, case.n, f"4{case.letter}")
    if case.options.get("join"):
        yield scalars("join() counts the ranks that still have batches", 8, case.n)
    if case.norms:  # two numbers per channel, and a count of batches
        buffers = sum(8 * channels + 8 for channels in case.norms)
        yield flow_of(
            "broadcast",
            0,
            case.n,
            "",
            more={"DDP broadcasts the batch-norm buffers of rank 0 before each step": buffers},
        )
    if case.step == (3 if case.options.get("static_graph") else 2):
        order = 4 * (len(case.shapes) + 1 + _buckets(case))
        yield flow_of(
            "broadcast", 0, case.n, "", more={"DDP rebuilds its buckets once, and rank 0 broadcasts the layout": order}
        )


def _buckets(case: Case) -> int:
    """The number of gradient buckets."""
    gradients = [4 * math.prod(shape) for shape in reversed(case.shapes)]
    bucket_mb = case.spec.strategy_row.constants(case.spec).get("BUCKET_MB", case.options.get("bucket_mb", 0))
    return 1 + max(bucket_numbers(gradients, bucket_mb))


def bucket_numbers(gradients: Iterable[int], bucket_mb: float) -> Iterator[int]:
    """The number of the DDP bucket that each gradient is in, from 0. `gradients` are their bytes, those of the last
    parameter first.

    A bucket is closed as soon as it is full (Li et al. 2020, section 3.2.2). `bucket_mb` is its size in MiB; 0 is
    torch's default, 1 MiB for the first bucket and 25 MiB for the others.
    """
    number = filled = 0
    for size in gradients:
        yield number
        filled += size
        if filled >= (bucket_mb or (25 if number else 1)) * 2**20:
            number, filled = number + 1, 0


def _low_rank(shape: tuple[int, ...]) -> int:
    """Elements that PowerSGD of rank 1 sends for a parameter: rows + columns of its matrix, if that is less than half
    of all.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    return rows + columns if 2 * (rows + columns) < rows * columns else rows * columns


def pseudo_gradients(case: Case) -> Iterator[Flow]:
    """DiLoCo (Douillard et al. 2023, algorithm 1): an all-reduce of all parameters in every k-th step; the formula is
    the mean over k steps."""
    every = case.options["sync_every"]
    mean = flow_of("all_reduce", case.size / every, case.n, "4P/k")
    sent = 0 if case.step % every else every * mean.theory
    if sent != mean.theory:
        why = f"all of it is sent in every step that is a multiple of {every}, and nothing in the others"
        mean = replace(mean, extra=((sent - mean.theory, why),))
    yield mean


def updated_parameters(case: Case) -> Iterator[Flow]:
    """ZeroRedundancyOptimizer broadcasts each tensor from the rank that updated it."""
    yield flow_of("broadcast", case.size, case.n, "4P")


def engine(case: Case) -> Iterator[Flow]:
    """ZeRO (Rajbhandari et al. 2020, section 7): stages 1 and 2 reduce-scatter gradients and all-gather parameters,
    stage 3 gathers twice.
    """
    size, what = case.size, "4P"
    if case.half:
        size, what = case.size - 2 * sum(block.multiplied for block in case.blocks), "(2M + 4(P − M))"
    gradients = flow_of("reduce_scatter", size, case.n, what)
    if case.options["stage"] < 3:
        twice = (gradients.theory, "DeepSpeed reduces whole buckets with all-reduce")
        yield replace(gradients, op="all_reduce", formula=f"reduce-scatter {gradients.formula}", extra=(twice,))
        filled = 4 * (-(case.size // 4) % (2 * case.n))
        yield flow_of(
            "all_gather", case.size, case.n, "4P", more={"DeepSpeed pads to a multiple of 2n elements": filled}
        )
        yield scalars("the norm of all gradients", 4, case.n)
        return
    padded = 4 * sum(-math.prod(shape) % case.n for shape in case.shapes)
    why = "DeepSpeed pads every tensor to a multiple of the number of ranks"
    yield scattered(case, flow_of("reduce_scatter", size, case.n, what, more={why: padded}))
    kept = case.size if case.size <= _KEPT else 0
    more = {
        "DeepSpeed keeps parameters gathered from forward to backward, so they are gathered only once": -kept / 2,
        why: padded if not kept else padded / 2,
    }
    yield flow_of("all_gather", case.size, case.n, "4P", more=more, times=2)
    yield scalars("the norm of all gradients", 8, case.n)
    if case.step == 2:
        order = 8 * (3 + case.spec.workload_row.visited(case.options) + 4 * len(case.shapes))
        agreed = {"DeepSpeed checks once that all ranks agree on the order of modules and parameters": order}
        yield flow_of("broadcast", 0, case.n, "", more=agreed)
