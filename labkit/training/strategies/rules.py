"""What follows from a Spec for its strategy: where it cannot run, in one sentence with the nearest choice that works, what its script must
know, and why it may rightly train something else. Light, as the table is that names these functions.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from labkit.training.workloads import GPT_VOCABULARY

if TYPE_CHECKING:
    from labkit.setup.machine import Machine
    from labkit.training.request import Request

TWO_STAGES = ("Interleaved1F1B", "InterleavedZeroBubble")  # schedules that give two stages to a rank


def one_process(spec: Request) -> str | None:
    if spec.nproc is not None and spec.nproc > 1:
        return f"single trains on one device, and {spec.nproc} were asked for; use --nproc 1, or the strategy ddp"
    return None


def several_devices(spec: Request) -> str | None:
    if spec.nproc is not None and spec.nproc < 2:
        return f"dp splits a batch over the devices of one process, and {spec.nproc} was asked for; use --nproc 2, or the strategy single"
    return None


def emulated(device: str | None) -> str:
    return "" if device == "cuda" else "Emulated on CPU: devices are threads of one process, and memory is their wire."


def departures(spec: Request) -> tuple[str, ...]:
    """Why a run rightly does not train exactly what one process trains with the same global batch and seed; empty where it must."""
    reasons = [spec.strategy_row.differs(spec)]
    shares, parts = spec.data_ranks, spec.options.get("micro_batches", 1) * spec.options.get("accumulate", 1)
    if spec.workload_row.batch_norm and (shares > 1 or parts > 1):
        reasons.append(
            f"batch norm averages over the {spec.batch_per_rank // parts} samples that go together, and not over {spec.global_batch}; "
            "the running statistics that it evaluates with are those of such parts too"
        )
    rest = spec.train_samples % shares
    if rest and spec.processes > 1 and spec.total_steps >= spec.steps_per_epoch and not spec.options.get("join"):
        reasons.append(
            f"{spec.train_samples:,} samples are no multiple of {shares} shares, so the sampler repeats {shares - rest} of them in an epoch"
        )
    return tuple(filter(None, reasons))


def compiler_of_deepspeed_missing(spec: Request, machine: Machine) -> str | None:
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        return f"deepspeed compiles a part of itself, and {compiler} is not on the PATH; install it (apt install g++), or use zero1"
    return None


def compressed(spec: Request) -> str | None:
    how = spec.options["compression"]
    lost = {"fp16": "rounded to 16 bits", "powersgd": "approximated by matrices of rank 1 from the third step on"}
    return f"compression={how}: gradients are {lost[how]} before they are sent" if how in lost else None


def ddp_differs(spec: Request) -> str | None:
    if spec.options["join"] and spec.train_samples % spec.global_batch and spec.total_steps >= spec.steps_per_epoch:
        return "join: ranks with fewer samples in the last batch of an epoch count as much as the others, or have none at all"
    return compressed(spec)


def ddp_limit(spec: Request) -> str | None:
    for other, harmless in (("static_graph", False), ("accumulate", 1)):
        if spec.options.get("join") and spec.options[other] != harmless:
            return f"join goes along with ranks that have more steps, which {other}={spec.options[other]} forbids; leave one of the two out"
    if spec.options["static_graph"] and spec.options["accumulate"] > 1:
        return (
            f"static_graph plans by a first step that sends its gradients, and accumulate={spec.options['accumulate']} holds them back; "
            "leave one of the two out"
        )
    return None


def _replicas(spec: Request) -> str | None:
    replicas, ranks = spec.options["replicas"], spec.nproc
    if ranks is None or ranks % replicas == 0:
        return None
    near = max(number for number in range(1, min(replicas, ranks) + 1) if ranks % number == 0)
    return (
        f"a mesh of {replicas} replicas × {max(1, ranks // replicas)} shards has {replicas * max(1, ranks // replicas)} ranks, "
        f"and there are {ranks}; use replicas={near}, or --nproc {replicas * (ranks // replicas + 1)}"
    )


def fsdp_limit(spec: Request) -> str | None:
    sharding, replicas = spec.options["sharding"], spec.options["replicas"]
    if sharding == "HYBRID_SHARD" and replicas == 1:
        return "HYBRID_SHARD with replicas=1 is FULL_SHARD; use replicas=2 on 4 ranks, or sharding=FULL_SHARD"
    if sharding not in ("FULL_SHARD", "HYBRID_SHARD") and replicas > 1:
        return f"replicas={replicas} goes with HYBRID_SHARD, and sharding is {sharding}; use sharding=HYBRID_SHARD, or replicas=1"
    return _replicas(spec)


def fsdp2_limit(spec: Request) -> str | None:
    if spec.options["cpu_offload"] and spec.options["clip_norm"]:
        return (
            "cpu_offload keeps the gradients in CPU memory, where NCCL cannot add up the norm "
            f"for clip_norm={spec.options['clip_norm']:g}; leave one of the two out"
        )
    if spec.options["cpu_offload"] and spec.precision == "fp16":
        return "cpu_offload keeps the gradients in CPU memory, where fp16's loss scaling cannot look at them; use --precision bf16"
    return _replicas(spec)


def tensor_limit(spec: Request) -> str | None:
    """Where the layers cannot be split evenly over `tp_size` ranks, or over all."""
    row, options = spec.workload_row, spec.options
    size = options.get("tp_size", spec.nproc)
    if row.tensor_parts is None:
        return f"tensor parallelism has no plan for the layers of {row.name}; it has one for cnn, gpt and mlp, and fsdp2 takes any model"
    for asked in ("sequence_parallel", "loss_parallel"):
        if options.get(asked) and "context" not in options:
            return f"{asked} is for the places of a sequence, which {row.name} has not; leave it out, or use --workload gpt"
    if size is None:
        return None
    parts = {what: number for number, what in (row.tensor_parts(options),)}
    if options["sequence_parallel"]:
        parts["places"] = options["context"]
    if options.get("loss_parallel"):
        parts["logits"] = GPT_VOCABULARY
    for what, number in parts.items():
        if number % size:
            near = max(fits for fits in range(1, size) if all(number % fits == 0 for number in parts.values()))
            way = f"tp_size={near}" if "tp_size" in options else f"--nproc {near}"
            return f"{row.name} has {number} {what} to split, and {size} tensor-parallel ranks cannot share them evenly; use {way}"
    return None


def context_limit(spec: Request) -> str | None:
    options, ranks = spec.options, spec.nproc
    if "context" not in options:
        return f"cp splits the places of a sequence, and {spec.workload} has none; use --workload gpt, or the strategy ddp"
    if ranks is not None and options["context"] % ranks:
        near = max(fits for fits in range(1, ranks) if options["context"] % fits == 0)
        return f"a context of {options['context']} places cannot be shared by {ranks} ranks; use --nproc {near}"
    return None


def cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Where each of `stages` runs of blocks begins, and where the last ends, so that the costliest run costs as little as can be."""
    sums = [0.0, *accumulate(costs)]
    # best[last]: of all ways to cut blocks[:last] into so many runs, the least cost of the costliest, and where those runs begin
    best = {last: (cost, (0,)) for last, cost in enumerate(sums) if last}
    for _ in range(stages - 1):
        best = {
            last: min((max(worst, sums[last] - sums[first]), (*starts, first)) for first, (worst, starts) in best.items() if first < last)
            for last in range(min(best) + 1, len(sums))
        }
    return (*best[len(costs)][1], len(costs))


def _pipe_ranks(spec: Request) -> int | None:
    return spec.options.get("pp_size", spec.nproc)


def pipe_constants(spec: Request) -> dict[str, Any]:
    """Where the stages begin, and the first rank that has the last of them: ranks of a stage stand together on the mesh."""
    ranks, schedule = _pipe_ranks(spec), spec.options["schedule"]
    stages = ranks * (2 if schedule in TWO_STAGES else 1)
    last = (ranks - 1) * (spec.nproc // ranks)
    return {"STAGES": cut(spec.workload_row.costs(spec.options), stages), "LOSS_RANK": last}


def pipe_layout(spec: Request) -> dict[str, Any]:
    """The first block of the ranks' second stages, 0 if each has one: checkpoints name parameters by stage and block."""
    stages = pipe_constants(spec)["STAGES"]
    return {"second_stages_from": stages[_pipe_ranks(spec)] if spec.options["schedule"] in TWO_STAGES else 0}


def pipe_limit(spec: Request) -> str | None:
    ranks, schedule, parts = _pipe_ranks(spec), spec.options["schedule"], spec.options["micro_batches"]
    if ranks is None:
        return None
    way = "pp_size=" if "pp_size" in spec.options else "--nproc "
    if ranks < 2:
        return f"a pipeline hands on from one rank to the next, and {ranks} was asked for; use {way}2, or the strategy single"
    blocks, each = len(spec.workload_row.costs(spec.options)), 2 if schedule in TWO_STAGES else 1
    if ranks * each > blocks:
        near = f"{way}{blocks // each}" if blocks // each > 1 else f"schedule=1F1B with {way}{min(ranks, blocks)}"
        return f"{spec.workload} has {blocks} blocks, and {schedule} over {ranks} ranks makes {ranks * each} stages of them; use {near}"
    if schedule == "1F1B" and parts < ranks:
        return f"1F1B keeps {ranks} stages busy with as many micro-batches at least, and {parts} were asked for; use {ranks}, or GPipe"
    rounds = max(1, parts // ranks)
    if each == 2 and parts % rounds:
        near = parts // ranks * ranks
        return f"{schedule} takes micro-batches in {rounds} equal rounds, and {parts} cannot be; use {near} or {near + ranks}"
    return None


def micro_batch_limit(spec: Request) -> str | None:
    parts = spec.options["micro_batches"]
    if spec.nproc is None or spec.batch_per_rank % parts == 0:
        return None
    batch = spec.batch_per_rank
    near = max(number for number in range(1, min(parts, max(batch, 1)) + 1) if batch % number == 0)
    return f"a batch of {batch} cannot be taken in {parts} equal micro-batches; use {near}, or a batch of {-(-batch // parts) * parts}"


def mesh_limit(spec: Request) -> str | None:
    """Where the ranks cannot form a mesh of whole rows."""
    wanted = [name for name in ("pp_size", "tp_size") if name in spec.options]
    size = math.prod(spec.options[name] for name in wanted)
    if spec.nproc is None or spec.nproc % size == 0:
        return None
    told = " × ".join(f"{name}={spec.options[name]}" for name in wanted)
    below = spec.nproc // size * size
    near = f"--nproc {below} or {below + size}" if below else f"--nproc {size}"
    return f"{spec.nproc} ranks are no multiple of {told}; use {near}"


def first_of(*limits: Callable[[Request], str | None]) -> Callable[[Request], str | None]:
    """The first sentence of several limits."""
    return lambda spec: next(filter(None, (limit(spec) for limit in limits)), None)


def without_evaluation(spec: Request, machine: Machine) -> str | None:
    if () < machine.torch < (2, 9):
        version = ".".join(map(str, machine.torch))
        asked = f"{spec.strategy} evaluates with its schedule, which torch can do from 2.9 on, and torch {version} is installed"
        return f"{asked}; use a newer torch, or the strategy ddp"
    return None


def fully_shard_on_cpu(spec: Request, machine: Machine) -> str | None:
    if spec.device == "cpu" and () < machine.torch < (2, 7):
        version = ".".join(map(str, machine.torch))
        return f"fsdp2 on CPU ranks needs torch 2.7, and torch {version} is installed; use a newer torch, a GPU, or the strategy ddp"
    if spec.device == "cpu" and spec.options.get("cpu_offload"):
        return "cpu_offload moves what a GPU holds to CPU memory, and CPU ranks have it there already; leave it out, or use a GPU"
    return None
