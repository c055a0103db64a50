"""The table of strategies: light, so that asking what there is loads no torch.

A row says what a strategy is called, what it splits and sends, and where it cannot run. The module beside this file that bears
its name holds the real training code, which `labkit.script` reads as text and the tests import.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from labkit.options import Option
from labkit.workloads import GPT_VOCABULARY

if TYPE_CHECKING:
    from labkit.machine import Machine
    from labkit.spec import Spec


@dataclass(frozen=True)
class Strategy:
    """One way to train on several devices.

    `data_ranks` gives the number of different shares that a step's batch is split into: with tensor parallelism, for
    example, all ranks see the same samples and it is 1. `limit` gives one sentence where the strategy cannot run a Spec,
    with the nearest choice that works, and None where it can; `unmet` does the same for what this machine lacks. `differs` says why a run
    rightly does not train what one process trains, and None where it does. `processes` is how
    many torchrun starts for the Spec's devices. `lacks` names the common options that it has not, each with the reason;
    `constants` gives settings of its script that follow from the Spec, by name;
    `note` says what a run on a device ("cpu", "cuda") is not of what the title says, such as an emulation; it is empty where all is as
    said. A `further` one stands behind "more" where there is room for a few only.
    """

    name: str
    title: str
    splits: str
    sends: str
    data_ranks: Callable[[Spec], int]
    limit: Callable[[Spec], str | None] = lambda spec: None
    unmet: Callable[[Spec, Machine], str | None] = lambda spec, machine: None
    differs: Callable[[Spec], str | None] = lambda spec: None
    processes: Callable[[Spec], int] = lambda spec: spec.nproc
    default_nproc: int | None = None
    options: tuple[Option, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    constants: Callable[[Spec], dict[str, Any]] = lambda spec: {}
    note: Callable[[str | None], str] = lambda device: ""
    further: bool = False

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options, then those that it shares with the others."""
        return self.options + tuple(option for option in COMMON if option.name not in self.lacks)

    @property
    def module(self) -> str:
        """The module of the training code."""
        return f"{__name__}.{self.name}"


INPUT_PIPELINE: tuple[Option, ...] = (
    Option("fetch", "batches", "a batch at once from tensors, or sample by sample as most tutorials do", choices=("batches", "samples")),
    Option("workers", 0, "processes of each rank that fetch batches ahead", minimum=0),
    Option("pin_memory", True, "batches in memory that a GPU reads by itself"),
    Option("non_blocking", True, "go on while a batch is copied to the GPU"),
)
COMMON: tuple[Option, ...] = (
    Option("accumulate", 1, "parts that a step's batch is taken in, one after the other: less memory, the same step", minimum=1),
    Option("clip_norm", 0.0, "largest norm of all gradients together; 0 leaves them as they are", minimum=0),
    Option("checkpoint_activations", False, "keep no activations inside a block: compute them again in backward"),
    Option("compile", False, "each block through torch.compile"),
    *INPUT_PIPELINE,
)


def _one_process(spec: Spec) -> str | None:
    if spec.nproc is not None and spec.nproc > 1:
        return f"single trains on one device, and {spec.nproc} were asked for; use --nproc 1, or the strategy ddp"
    return None


def _several_devices(spec: Spec) -> str | None:
    if spec.nproc is not None and spec.nproc < 2:
        return f"dp splits a batch over the devices of one process, and {spec.nproc} was asked for; use --nproc 2, or the strategy single"
    return None


def _emulated(device: str | None) -> str:
    return "" if device == "cuda" else "Emulated on CPU: devices are threads of one process, and memory is their wire."


def departures(spec: Spec) -> tuple[str, ...]:
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


_REPLICATED = "nn.DataParallel makes its replicas anew at every step, and they would run blocks of the first device; use the strategy ddp"


def _deepspeed_missing(spec: Spec, machine: Machine) -> str | None:
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed; install it with: pip install 'labkit[deepspeed]' (or pip install deepspeed)"
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        return f"deepspeed compiles a part of itself, and {compiler} is not on the PATH; install it (apt install g++), or use zero1"
    return None


_BUCKET_MB = Option("bucket_mb", 25, "size of a gradient bucket in MiB; smaller ones start earlier", minimum=1)
_DDP_OPTIONS = (
    _BUCKET_MB,
    Option("static_graph", False, "promise that every step runs the same graph, and let DDP plan by the first"),
    Option("compression", "none", "what gradients are sent as: half the bits, or low-rank factors", choices=("none", "fp16", "powersgd")),
)


def _compressed(spec: Spec) -> str | None:
    how = spec.options["compression"]
    lost = {"fp16": "rounded to 16 bits", "powersgd": "approximated by matrices of rank 1 from the third step on"}
    return f"compression={how}: gradients are {lost[how]} before they are sent" if how in lost else None


def _ddp_differs(spec: Spec) -> str | None:
    if spec.options["join"] and spec.train_samples % spec.global_batch and spec.total_steps >= spec.steps_per_epoch:
        return "join: ranks with fewer samples in the last batch of an epoch count as much as the others, or have none at all"
    return _compressed(spec)


def _ddp_limit(spec: Spec) -> str | None:
    for other in ("static_graph", "accumulate"):
        if spec.options.get("join") and spec.options[other] != (other == "accumulate"):
            return f"join goes along with ranks that have more steps, which {other}={spec.options[other]} forbids; leave one of the two out"
    if spec.options["static_graph"] and spec.options["accumulate"] > 1:
        return (
            f"static_graph plans by a first step that sends its gradients, and accumulate={spec.options['accumulate']} holds them back; "
            "leave one of the two out"
        )
    return None


_RESHARD = Option("reshard_after_forward", True, "drop the gathered parameters after forward, gather again in backward")
_TP_SIZE = Option("tp_size", 2, "ranks that split a layer between them", minimum=1)
_PP_SIZE = Option("pp_size", 2, "ranks that a batch goes through, one after the other", minimum=2)
TWO_STAGES = ("Interleaved1F1B", "InterleavedZeroBubble")  # schedules that give two stages to a rank
_SCHEDULE = Option(
    "schedule",
    "1F1B",
    "the order in which micro-batches go forward and backward",
    choices=("GPipe", "1F1B", *TWO_STAGES),
)
# A zero bubble takes the gradients of parameters after those of inputs, past the hooks by which DDP and FSDP2 send them.
_SCHEDULE_OF_WRAPPED = replace(_SCHEDULE, choices=("GPipe", "1F1B", "Interleaved1F1B"))
_MICRO_BATCHES = Option("micro_batches", 4, "parts of a batch that are in the pipe together", minimum=1)
_PARTS = "its micro-batches are such parts already; set micro_batches"
_SEQUENCE_PARALLEL = Option("sequence_parallel", False, "split by places what stands between the split matrices")
_REPLICAS = Option("replicas", 1, "groups of ranks, of which each holds the whole model in shards (HSDP)", minimum=1)


def _replicas(spec: Spec) -> str | None:
    replicas, ranks = spec.options["replicas"], spec.nproc
    if ranks is None or ranks % replicas == 0:
        return None
    near = max(number for number in range(1, min(replicas, ranks) + 1) if ranks % number == 0)
    return (
        f"a mesh of {replicas} replicas × {max(1, ranks // replicas)} shards has {replicas * max(1, ranks // replicas)} ranks, "
        f"and there are {ranks}; use replicas={near}, or --nproc {replicas * (ranks // replicas + 1)}"
    )


def _fsdp_limit(spec: Spec) -> str | None:
    sharding, replicas = spec.options["sharding"], spec.options["replicas"]
    if sharding == "HYBRID_SHARD" and replicas == 1:
        return "HYBRID_SHARD with replicas=1 is FULL_SHARD; use replicas=2 on 4 ranks, or sharding=FULL_SHARD"
    if sharding not in ("FULL_SHARD", "HYBRID_SHARD") and replicas > 1:
        return f"replicas={replicas} goes with HYBRID_SHARD, and sharding is {sharding}; use sharding=HYBRID_SHARD, or replicas=1"
    return _replicas(spec)


def _fsdp2_limit(spec: Spec) -> str | None:
    if spec.options["cpu_offload"] and spec.options["clip_norm"]:
        return (
            "cpu_offload keeps the gradients in CPU memory, where NCCL cannot add up the norm "
            f"for clip_norm={spec.options['clip_norm']:g}; leave one of the two out"
        )
    if spec.options["cpu_offload"] and spec.precision == "fp16":
        return "cpu_offload keeps the gradients in CPU memory, where fp16's loss scaling cannot look at them; use --precision bf16"
    return _replicas(spec)


def _tensor_limit(spec: Spec) -> str | None:
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


def _context_limit(spec: Spec) -> str | None:
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


def _pipe_ranks(spec: Spec) -> int | None:
    return spec.options.get("pp_size", spec.nproc)


def _pipe_constants(spec: Spec) -> dict[str, Any]:
    """Where the stages begin, and the first rank that has the last of them: ranks of a stage stand together on the mesh."""
    ranks, schedule = _pipe_ranks(spec), spec.options["schedule"]
    stages = ranks * (2 if schedule in TWO_STAGES else 1)
    last = (ranks - 1) * (spec.nproc // ranks)
    return {"STAGES": cut(spec.workload_row.costs(spec.options), stages), "LOSS_RANK": last}


def _pipe_limit(spec: Spec) -> str | None:
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


def _batch_limit(spec: Spec) -> str | None:
    parts = spec.options["micro_batches"]
    if spec.nproc is None or spec.batch_per_rank % parts == 0:
        return None
    batch = spec.batch_per_rank
    near = max(number for number in range(1, min(parts, max(batch, 1)) + 1) if batch % number == 0)
    return f"a batch of {batch} cannot be taken in {parts} equal micro-batches; use {near}, or a batch of {-(-batch // parts) * parts}"


def _row_limit(spec: Spec) -> str | None:
    """Where the ranks cannot form a mesh of whole rows."""
    wanted = [name for name in ("pp_size", "tp_size") if name in spec.options]
    size = math.prod(spec.options[name] for name in wanted)
    if spec.nproc is None or spec.nproc % size == 0:
        return None
    told = " × ".join(f"{name}={spec.options[name]}" for name in wanted)
    below = spec.nproc // size * size
    near = f"--nproc {below} or {below + size}" if below else f"--nproc {size}"
    return f"{spec.nproc} ranks are no multiple of {told}; use {near}"


def _first(*limits: Callable[[Spec], str | None]) -> Callable[[Spec], str | None]:
    """The first sentence of several limits."""
    return lambda spec: next(filter(None, (limit(spec) for limit in limits)), None)


_SCALED = "loss scaling looks at split and whole gradients at once, which torch's GradScaler cannot; use --precision bf16 or fp32"


def _without_evaluation(spec: Spec, machine: Machine) -> str | None:
    if () < machine.torch < (2, 9):
        version = ".".join(map(str, machine.torch))
        asked = f"{spec.strategy} evaluates with its schedule, which torch can do from 2.9 on, and torch {version} is installed"
        return f"{asked}; use a newer torch, or the strategy ddp"
    return None


def _fully_shard_on_cpu(spec: Spec, machine: Machine) -> str | None:
    if spec.device == "cpu" and () < machine.torch < (2, 7):
        version = ".".join(map(str, machine.torch))
        return f"fsdp2 on CPU ranks needs torch 2.7, and torch {version} is installed; use a newer torch, a GPU, or the strategy ddp"
    if spec.device == "cpu" and spec.options.get("cpu_offload"):
        return "cpu_offload moves what a GPU holds to CPU memory, and CPU ranks have it there already; leave it out, or use a GPU"
    return None


STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            name="single",
            title="Single",
            splits="Nothing: one device holds the model and sees every sample.",
            sends="Nothing.",
            data_ranks=lambda spec: 1,
            limit=_one_process,
            default_nproc=1,
        ),
        Strategy(
            name="dp",
            title="DP",
            splits="The batch: one process has a thread and a replica of the model for each device.",
            sends="At every step through device 0: inputs, parameters and outputs; their gradients back.",
            data_ranks=lambda spec: spec.nproc,
            limit=_several_devices,
            processes=lambda spec: 1,
            lacks={"checkpoint_activations": _REPLICATED, "compile": _REPLICATED},
            note=_emulated,
        ),
        Strategy(
            name="ddp",
            title="DDP",
            splits="The batch: every rank holds the whole model and trains on samples of its own.",
            sends="Gradients: one all-reduce per bucket, while backward still runs.",
            data_ranks=lambda spec: spec.nproc,
            limit=_ddp_limit,
            differs=_ddp_differs,
            options=(
                *_DDP_OPTIONS,
                Option("join", False, "ranks may have unequal numbers of samples: who is done goes along with the rest"),
            ),
        ),
        Strategy(
            name="zero1",
            title="ZeRO-1",
            splits="The batch and the optimizer state: each rank steps a part of the parameters.",
            sends="Gradients: all-reduce. Parameters: each from the rank that stepped it.",
            data_ranks=lambda spec: spec.nproc,
            limit=_ddp_limit,
            differs=_compressed,
            options=_DDP_OPTIONS,
        ),
        Strategy(
            name="deepspeed",
            title="DeepSpeed",
            further=True,
            splits="The batch; by stage 1 optimizer state, 2 gradients too, 3 parameters too.",
            sends="Gradients: reduce. Parameters: all-gather, in stage 3 block by block.",
            data_ranks=lambda spec: spec.nproc,
            unmet=_deepspeed_missing,
            options=(Option("stage", 1, "ZeRO stage: what is sharded", choices=(1, 2, 3)),),
            lacks={
                "accumulate": "its engine counts micro-batches by itself; use zero1 or fsdp2 for that",
                **dict.fromkeys(("save_every", "resume"), "its engine has a format of its own; use zero1 or fsdp2 for that"),
            },
        ),
        Strategy(
            name="fsdp",
            title="FSDP1",
            further=True,
            splits="The batch, parameters, gradients and optimizer state: a shard on each rank.",
            sends="Parameters: all-gather before forward and backward. Gradients: reduce-scatter.",
            data_ranks=lambda spec: spec.nproc,
            limit=_fsdp_limit,
            options=(
                Option(
                    "sharding",
                    "FULL_SHARD",
                    "what is kept in shards; HYBRID_SHARD takes replicas",
                    choices=("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "SHARD_GRAD_OP"),
                ),
                Option("min_parameters", 20_000, "a part of the model with so many parameters is a unit of its own", minimum=1),
                _REPLICAS,
            ),
            constants=lambda spec: {"SHARDING": "HYBRID_SHARD"} if spec.options["replicas"] > 1 else {},
        ),
        Strategy(
            name="fsdp2",
            title="FSDP2",
            splits="The batch, and parameters, gradients and optimizer state: a shard on each rank.",
            sends="Parameters: all-gather before forward and backward. Gradients: reduce-scatter.",
            data_ranks=lambda spec: spec.nproc,
            limit=_fsdp2_limit,
            unmet=_fully_shard_on_cpu,
            options=(
                _RESHARD,
                Option("cpu_offload", False, "keep shards, gradients and optimizer state in CPU memory, and step there"),
                Option("prefetch", 0, "blocks that are gathered before their turn", choices=(0, 1, 2)),
                _REPLICAS,
            ),
        ),
        Strategy(
            name="tp",
            title="TP",
            splits="The layers: each rank has a part of every split matrix; all see the same samples.",
            sends="Activations: all-reduce behind every split pair of matrices, and again in backward.",
            data_ranks=lambda spec: 1,
            limit=_tensor_limit,
            options=(
                _SEQUENCE_PARALLEL,
                Option("loss_parallel", False, "keep the logits split, and put the loss together from the parts"),
            ),
            lacks={"fp16": _SCALED},
        ),
        Strategy(
            name="pp",
            title="PP",
            splits="The blocks: each rank has some, and a batch goes through in micro-batches.",
            sends="Activations to the rank with the next blocks, their gradients back.",
            data_ranks=lambda spec: 1,
            limit=_first(_pipe_limit, _batch_limit),
            unmet=_without_evaluation,
            options=(_SCHEDULE, _MICRO_BATCHES),
            lacks={"accumulate": _PARTS},
            constants=_pipe_constants,
        ),
        Strategy(
            name="fsdp2_tp",
            title="FSDP2 × TP",
            further=True,
            splits="The layers over neighbours (TP); the batch and shards of the parts over the other axis.",
            sends="Activations: all-reduce in a row. Parameters: all-gather, gradients: reduce-scatter, in a column.",
            data_ranks=lambda spec: spec.nproc // spec.options["tp_size"],
            limit=_first(_row_limit, _tensor_limit),
            unmet=_fully_shard_on_cpu,
            default_nproc=4,
            options=(_TP_SIZE, _SEQUENCE_PARALLEL, _RESHARD),
            lacks={"fp16": _SCALED},
        ),
        Strategy(
            name="pp_ddp",
            title="PP × DDP",
            further=True,
            splits="The blocks over one axis of the mesh (PP), the batch over the other (DDP).",
            sends="Activations and their gradients along a pipeline; gradients of parameters: all-reduce between pipelines.",
            data_ranks=lambda spec: spec.nproc // spec.options["pp_size"],
            limit=_first(_row_limit, _pipe_limit, _batch_limit),
            unmet=_without_evaluation,
            default_nproc=4,
            options=(_PP_SIZE, _SCHEDULE_OF_WRAPPED, _MICRO_BATCHES, _BUCKET_MB),
            lacks={"accumulate": _PARTS},
            constants=_pipe_constants,
        ),
        Strategy(
            name="pp_fsdp2_tp",
            title="PP × FSDP2 × TP",
            further=True,
            splits="The blocks (PP), the batch and shards of what a rank holds (FSDP2), and the layers (TP).",
            sends="What PP, FSDP2 and TP send, each along its own axis of the mesh.",
            data_ranks=lambda spec: spec.nproc // (spec.options["pp_size"] * spec.options["tp_size"]),
            limit=_first(_row_limit, _pipe_limit, _batch_limit, _tensor_limit),
            unmet=_without_evaluation,
            default_nproc=8,
            options=(_PP_SIZE, _TP_SIZE, _SCHEDULE_OF_WRAPPED, _MICRO_BATCHES, _SEQUENCE_PARALLEL),
            lacks={"accumulate": _PARTS, "fp16": _SCALED},
            constants=_pipe_constants,
        ),
        Strategy(
            name="cp",
            title="CP",
            further=True,
            splits="The sequence: each rank has a part of every window, and the whole model.",
            sends="Keys and values: all-gather in every layer. Gradients: all-reduce, as in DDP.",
            data_ranks=lambda spec: 1,
            limit=_context_limit,
            options=(_BUCKET_MB,),
            note=lambda device: (
                "Keys and values are gathered, as Llama 3 was trained; torch's own context_parallel sends them round "
                "in a ring, with kernels that only GPUs have."
            ),
        ),
    )
}
