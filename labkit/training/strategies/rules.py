"""Limits of the strategies (one sentence with the nearest working choice), constants of their scripts, and the reasons
why a strategy is expected to train something different from one process. Like the table that refers to these functions,
it does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from labkit.training.rows import MOST
from labkit.training.workloads import WORKLOADS

if TYPE_CHECKING:
    from labkit.plan.spec import Spec
    from labkit.setup.machine import Machine

# ---- pipelines: where the blocks are cut into stages, and limits of the schedules


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


def pipeline_constants(spec: Spec) -> dict[str, Any]:
    """The stage boundaries, and the first rank that holds the last stage; ranks with the same stage are adjacent in the
    mesh."""
    ranks, schedule = _ranks(spec), spec.options["schedule"]
    stages = ranks * (2 if schedule in TWO_STAGES else 1)
    last = holder(stages - 1, ranks, schedule) * (spec.nproc // ranks)
    bounds = cut(spec.workload_row.costs(spec.options), stages)
    return {"STAGES": bounds, "LOSS_RANK": last, "MESH": "pp_size" in spec.options}


def pipeline_limit(spec: Spec) -> str | None:
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


# ---- all other strategies


def one_process(spec: Spec) -> str | None:
    if spec.nproc is not None and spec.nproc > 1:
        return f"single trains on one device, got --nproc {spec.nproc}; use --nproc 1, or the strategy ddp"
    return None


def several_devices(spec: Spec) -> str | None:
    if spec.nproc is not None and spec.nproc < 2:
        return (
            f"dp splits the batch over several devices, got --nproc {spec.nproc}; use --nproc 2, or the strategy single"
        )
    return None


def emulated(device: str | None) -> str:
    return "" if device == "cuda" else "Emulated on CPU: the devices are threads of one process and share its memory."


def departures(spec: Spec) -> tuple[str, ...]:
    """Why a run is expected to differ from one process with the same global batch and seed; empty if the losses must be
    equal."""
    reasons = [spec.strategy_row.differs(spec)]
    ranks, micro_batches = spec.data_ranks, spec.options.get("micro_batches", 1) * spec.options.get("accumulate", 1)
    if spec.workload_row.batch_norm and (ranks > 1 or micro_batches > 1):
        reasons.append(
            f"batch norm averages over {spec.batch_per_rank // micro_batches} samples at a time, not over the global"
            f" batch of {spec.global_batch}, and so do the running statistics that the evaluation uses"
        )
    rest = spec.train_samples % ranks
    if rest and spec.processes > 1 and spec.total_steps >= spec.steps_per_epoch and not spec.options.get("join"):
        reasons.append(
            f"{spec.train_samples:,} samples are not divisible by {ranks} ranks, so the sampler repeats {ranks - rest}"
            " of them per epoch"
        )
    return tuple(filter(None, reasons))


def engine(spec: Spec) -> dict[str, Any]:
    """What must agree for DeepSpeed's engine to load its checkpoint: each rank loads the file that it wrote."""
    return {"engine": {"stage": spec.options["stage"], "ranks": spec.nproc, "precision": spec.precision or "fp32"}}


def compressed(spec: Spec) -> str | None:
    method = spec.options["compression"]
    loss = {"fp16": "rounded to 16 bits", "powersgd": "approximated by rank-1 matrices from the third step on"}
    return f"compression={method}: gradients are {loss[method]} before they are sent" if method in loss else None


def ddp_differs(spec: Spec) -> str | None:
    if spec.options["join"] and spec.train_samples % spec.global_batch and spec.total_steps >= spec.steps_per_epoch:
        return (
            "join: in the last step of an epoch, ranks with fewer samples have the same weight as the others, or have"
            " no samples"
        )
    return compressed(spec)


def local_steps(spec: Spec) -> str:
    """Why replicas that are not synchronized in each step train something different."""
    return (
        f"sync_every={spec.options['sync_every']}: each replica trains on its own samples, and an outer optimizer moves"
        " all replicas to a common point only then"
    )


def ddp_limit(spec: Spec) -> str | None:
    for other, default in (("static_graph", False), ("accumulate", 1), ("lr_decay", "none")):
        if spec.options.get("join") and spec.options[other] != default:
            return f"join does not work with {other}={spec.options[other]}; use only one of the two"
    if spec.options["static_graph"] and spec.options["accumulate"] > 1:
        return (
            f"static_graph needs gradient sync in the first pass, and accumulate={spec.options['accumulate']} delays"
            " it; use only one of the two"
        )
    if _needs_one_bucket(spec) and spec.options["bucket_mb"]:
        return (
            f"bucket_mb={spec.options['bucket_mb']} does not work with compression=powersgd on CPU ranks, where several"
            " buckets would block gloo's threads; leave bucket_mb out"
        )
    return None


def _needs_one_bucket(spec: Spec) -> bool:
    """Whether all gradients must be in one bucket: PowerSGD's callbacks wait for all-reduces in the threads with which
    gloo runs them, so several buckets block each other."""
    return spec.options["compression"] == "powersgd" and spec.device == "cpu"


def in_gloos_threads(spec: Spec) -> str:
    """Why the peak memory of a step with PowerSGD is not measured on CPU ranks; empty for any other."""
    reason = "PowerSGD's callbacks allocate memory in gloo's threads, which torch's profiler does not record"
    return reason if _needs_one_bucket(spec) else ""


def ddp_constants(spec: Spec) -> dict[str, Any]:
    """The bucket size in MiB, if it is not the one of the options."""
    return {"BUCKET_MB": MOST} if _needs_one_bucket(spec) else {}


def _replicas(spec: Spec) -> str | None:
    replicas, ranks = spec.options["replicas"], spec.nproc
    if ranks is None or ranks % replicas == 0:
        return None
    near = max(number for number in range(1, min(replicas, ranks) + 1) if ranks % number == 0)
    return (
        f"{ranks} ranks are not divisible by replicas={replicas}; "
        f"use replicas={near}, or --nproc {replicas * (ranks // replicas + 1)}"
    )


def fsdp_limit(spec: Spec) -> str | None:
    sharding, replicas = spec.options["sharding"], spec.options["replicas"]
    if sharding == "HYBRID_SHARD" and replicas == 1:
        return (
            "sharding=HYBRID_SHARD with replicas=1 is the same as FULL_SHARD; use replicas=2 on 4 ranks, or"
            " sharding=FULL_SHARD"
        )
    if sharding not in ("FULL_SHARD", "HYBRID_SHARD") and replicas > 1:
        return (
            f"replicas={replicas} needs sharding=HYBRID_SHARD, got sharding={sharding}; use sharding=HYBRID_SHARD, or"
            " replicas=1"
        )
    return _replicas(spec)


def fsdp2_limit(spec: Spec) -> str | None:
    if spec.options["cpu_offload"] and spec.options["clip_norm"]:
        return (
            "cpu_offload keeps the gradients in CPU memory, where NCCL cannot reduce their norm "
            f"for clip_norm={spec.options['clip_norm']:g}; use only one of the two"
        )
    if spec.options["cpu_offload"] and spec.precision == "fp16":
        return (
            "cpu_offload keeps the gradients in CPU memory, where the loss scaling of fp16 cannot check them; use"
            " --precision fp32 or bf16"
        )
    return _replicas(spec)


def tensor_limit(spec: Spec) -> str | None:
    """Refuses layers that cannot be split evenly over `tp_size` ranks, or over all ranks."""
    row, options = spec.workload_row, spec.options
    size = options.get("tp_size", spec.nproc)
    if row.tensor_parts is None:
        *others, last = sorted(other.name for other in WORKLOADS.values() if other.tensor_parts)
        fix = f"use --workload {', '.join(others)} or {last}, or the strategy fsdp2"
        return f"there is no tensor-parallel plan for {row.name}; {fix}"
    for name in ("sequence_parallel", "loss_parallel"):
        if options.get(name) and "context" not in options:
            return f"{name} needs a sequence dimension, and {row.name} has none; leave it out, or use --workload gpt"
    if size is None:
        return None
    dimensions = {what: number for number, what in (row.tensor_parts(options),)}
    if options["sequence_parallel"]:
        dimensions["positions"] = options["context"]
    if options.get("loss_parallel"):
        dimensions["logits"] = row.transformer(options).vocabulary
    for what, number in dimensions.items():
        if number % size:
            near = max(fits for fits in range(1, size) if all(number % fits == 0 for number in dimensions.values()))
            fix = f"tp_size={near}" if "tp_size" in options else f"--nproc {near}"
            return f"{row.name} has {number} {what}, which is not divisible by {size} tensor-parallel ranks; use {fix}"
    return None


def added_losses(spec: Spec) -> str | None:
    """Refuses a model whose layers add a loss, for a strategy that does not collect it, or splits sequences."""
    if spec.workload_row.mixture:
        return (
            f"the layers of {spec.workload} add a loss for each whole sequence, which {spec.strategy} does not collect;"
            " use the strategy ep, or --workload gpt"
        )
    return None


def expert_limit(spec: Spec) -> str | None:
    """Refuses a model without experts, and experts that cannot be split evenly over the ranks."""
    row = spec.workload_row
    if row.mixture is None:
        return f"ep splits the experts of a model, and {spec.workload} has none; use --workload moe, or ddp"
    experts, ranks = row.mixture(spec.options).experts, spec.nproc
    if ranks is not None and experts % ranks:
        near = max(fits for fits in range(1, ranks) if experts % fits == 0)
        return f"{experts} experts are not divisible by {ranks} ranks; use --nproc {near}"
    return None


def context_limit(spec: Spec) -> str | None:
    options, ranks = spec.options, spec.nproc
    if "context" not in options:
        return (
            f"cp splits the sequence dimension, and {spec.workload} has none; use --workload gpt, or the strategy ddp"
        )
    if ranks is not None and options["context"] % (2 * ranks):
        near = max(fits for fits in range(1, ranks) if options["context"] % (2 * fits) == 0)
        return (
            f"a context of {options['context']} positions is not divisible into two chunks for each of {ranks} ranks;"
            f" use --nproc {near}"
        )
    heads = spec.workload_row.transformer(options).heads
    if options["method"] == "ulysses" and ranks is not None and heads % ranks:
        return (
            f"{spec.workload} has {heads} heads, which ulysses cannot split over {ranks} ranks; use method=ring, or"
            f" --nproc {math.gcd(heads, ranks)}"
        )
    return None


def mesh_limit(spec: Spec) -> str | None:
    """Refuses a number of ranks that is not divisible by the other axes of the mesh."""
    axes = [name for name in ("pp_size", "tp_size") if name in spec.options]
    size = math.prod(spec.options[name] for name in axes)
    if spec.nproc is None or spec.nproc % size == 0:
        return None
    divisor = " × ".join(f"{name}={spec.options[name]}" for name in axes)
    below = spec.nproc // size * size
    near = f"--nproc {below} or {below + size}" if below else f"--nproc {size}"
    return f"{spec.nproc} ranks are not divisible by {divisor}; use {near}"


def first_of(*limits: Callable[[Spec], str | None]) -> Callable[[Spec], str | None]:
    """The first refusal of several limits."""
    return lambda spec: next(filter(None, (limit(spec) for limit in limits)), None)


def without_evaluation(spec: Spec, machine: Machine) -> str | None:
    if () < machine.torch < (2, 9):
        version = ".".join(map(str, machine.torch))
        reason = (
            f"{spec.strategy} evaluates with schedule.eval, which needs torch 2.9 or newer, and torch {version} is"
            " installed"
        )
        return f"{reason}; use a newer torch, or the strategy ddp"
    return None


def fully_shard_on_cpu(spec: Spec, machine: Machine) -> str | None:
    if spec.device == "cpu" and () < machine.torch < (2, 7):
        version = ".".join(map(str, machine.torch))
        return (
            f"fsdp2 on CPU ranks needs torch 2.7 or newer, got torch {version}; use a newer torch, a GPU, or the"
            " strategy ddp"
        )
    if spec.device == "cpu" and spec.options.get("cpu_offload"):
        return (
            "cpu_offload moves state from GPU to CPU memory, and the state of CPU ranks is already there; leave it out,"
            " or use a GPU"
        )
    return None
