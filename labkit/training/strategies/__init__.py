"""The table of strategies: light, so that asking what there is loads no torch.

A row says what a strategy is called, what it splits and sends, and where it cannot run. The module beside this file that bears
its name holds the real training code, which `labkit.plan.script` reads as text and the tests import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from labkit.training.options import Option
from labkit.training.strategies import rules

if TYPE_CHECKING:
    from labkit.setup.machine import Machine
    from labkit.training.request import Request


@dataclass(frozen=True)
class Strategy:
    """One way to train on several devices.

    `data_ranks` gives the number of different shares that a step's batch is split into: with tensor parallelism, for
    example, all ranks see the same samples and it is 1. `limit` gives one sentence where the strategy cannot run a Request,
    with the nearest choice that works, and None where it can; `unmet` does the same for what this machine lacks. `differs` says why a run
    rightly does not train what one process trains, and None where it does. `processes` is how
    many torchrun starts for the Spec's devices. `lacks` names the common options that it has not, each with the reason;
    `constants` gives settings of its script that follow from the Request, by name;
    `note` says what a run on a device ("cpu", "cuda") is not of what the title says, such as an emulation; it is empty where all is as
    said. A `further` one stands behind "more" where there is room for a few only. `one_loss` is how many neighbouring ranks must have
    the same loss, because they split layers and not samples. `wrapper` is what sends the gradients: "DDP",
    "FSDP", "DeepSpeed", or nothing. `layout` is what its checkpoints hold, one of `labkit.plan.checkpoints.LAYOUTS`: strategies
    with the same layout resume from each other's checkpoints, with any number of ranks. `layout_details` gives what else
    must agree, by name. `extra` is the optional extra of the project
    that it needs.
    """

    name: str
    title: str
    splits: str
    sends: str
    data_ranks: Callable[[Request], int]
    limit: Callable[[Request], str | None] = lambda spec: None
    unmet: Callable[[Request, Machine], str | None] = lambda spec, machine: None
    differs: Callable[[Request], str | None] = lambda spec: None
    processes: Callable[[Request], int] = lambda spec: spec.nproc
    default_nproc: int | None = None
    options: tuple[Option, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    constants: Callable[[Request], dict[str, Any]] = lambda spec: {}
    note: Callable[[str | None], str] = lambda device: ""
    further: bool = False
    one_loss: Callable[[Request], int] = lambda spec: 1
    wrapper: str = ""
    layout: str = "whole"
    layout_details: Callable[[Request], dict[str, Any]] = lambda spec: {}
    extra: str | None = None

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options, then those that it shares with the others."""
        return self.options + tuple(option for option in COMMON if option.name not in self.lacks)

    @property
    def module(self) -> str:
        """The module of the training code."""
        return f"{__name__}.{self.name}"


_MOST = 65_536  # of ranks, and of what is counted in ranks or micro-batches
INPUT_PIPELINE: tuple[Option, ...] = (
    Option("fetch", "batches", "a batch at once from tensors, or sample by sample as most tutorials do", choices=("batches", "samples")),
    Option("workers", 0, "processes of each rank that fetch batches ahead", minimum=0, maximum=64),
    Option("pin_memory", True, "batches in memory that a GPU reads by itself"),
    Option("non_blocking", True, "go on while a batch is copied to the GPU"),
)
COMMON: tuple[Option, ...] = (
    Option("accumulate", 1, "micro-batches that a step's batch is split into: less memory, the same step", minimum=1, maximum=_MOST),
    Option("clip_norm", 0.0, "largest norm of all gradients together; 0: no clipping", minimum=0.0, maximum=1e12),
    Option("checkpoint_activations", False, "keep no activations inside a block: compute them again in backward"),
    Option("compile", False, "each block through torch.compile"),
    *INPUT_PIPELINE,
)
_BUCKET_MB = Option("bucket_mb", 25, "size of a gradient bucket in MiB; smaller ones start earlier", minimum=1, maximum=_MOST)
_DDP_OPTIONS = (
    _BUCKET_MB,
    Option("static_graph", False, "promise that every step runs the same graph, and let DDP plan by the first"),
    Option("compression", "none", "what gradients are sent as: half the bits, or low-rank factors", choices=("none", "fp16", "powersgd")),
)
_RESHARD = Option("reshard_after_forward", True, "drop the gathered parameters after forward, gather again in backward")
_TP_SIZE = Option("tp_size", 2, "ranks that split a layer between them", minimum=1, maximum=_MOST)
_PP_SIZE = Option("pp_size", 2, "ranks that a batch goes through, one after the other", minimum=2, maximum=_MOST)
_SCHEDULE = Option(
    "schedule",
    "1F1B",
    "the order in which micro-batches go forward and backward",
    choices=("GPipe", "1F1B", *rules.TWO_STAGES),
)
# A zero bubble takes the gradients of parameters after those of inputs, past the hooks by which DDP and FSDP2 send them.
_SCHEDULE_OF_WRAPPED = replace(_SCHEDULE, choices=("GPipe", "1F1B", "Interleaved1F1B"))
_MICRO_BATCHES = Option("micro_batches", 4, "parts of a batch that are in the pipe together", minimum=1, maximum=_MOST)
_SEQUENCE_PARALLEL = Option("sequence_parallel", False, "split by places what stands between the split matrices")
_REPLICAS = Option("replicas", 1, "groups of ranks, of which each holds the whole model in shards (HSDP)", minimum=1, maximum=_MOST)
# Why a strategy lacks what the others have.
_REPLICATED = "nn.DataParallel makes its replicas anew at every step, and they would run blocks of the first device; use the strategy ddp"
_PARTS = "its micro-batches are such parts already; set micro_batches"
_SCALED = "loss scaling looks at split and whole gradients at once, which torch's GradScaler cannot; use --precision bf16 or fp32"

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            name="single",
            title="Single",
            splits="Nothing: one device holds the model and sees every sample.",
            sends="Nothing.",
            data_ranks=lambda spec: 1,
            limit=rules.one_process,
            default_nproc=1,
        ),
        Strategy(
            name="dp",
            title="DP",
            splits="The batch: one process has a thread and a replica of the model for each device.",
            sends="At every step through device 0: inputs, parameters and outputs; their gradients back.",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.several_devices,
            processes=lambda spec: 1,
            lacks={"checkpoint_activations": _REPLICATED, "compile": _REPLICATED},
            note=rules.emulated,
        ),
        Strategy(
            name="ddp",
            title="DDP",
            splits="The batch: every rank holds the whole model and trains on samples of its own.",
            sends="Gradients: one all-reduce per bucket, while backward still runs.",
            wrapper="DDP",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.ddp_limit,
            differs=rules.ddp_differs,
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
            wrapper="DDP",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.ddp_limit,
            differs=rules.compressed,
            options=_DDP_OPTIONS,
        ),
        Strategy(
            name="deepspeed",
            title="DeepSpeed",
            further=True,
            splits="The batch; by stage 1 optimizer state, 2 gradients too, 3 parameters too.",
            sends="Gradients: reduce. Parameters: all-gather, in stage 3 block by block.",
            wrapper="DeepSpeed",
            extra="deepspeed",
            data_ranks=lambda spec: spec.nproc,
            unmet=rules.compiler_of_deepspeed_missing,
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
            wrapper="FSDP",
            layout="shards",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.fsdp_limit,
            options=(
                Option(
                    "sharding",
                    "FULL_SHARD",
                    "what is kept in shards; HYBRID_SHARD takes replicas",
                    choices=("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "SHARD_GRAD_OP"),
                ),
                Option(
                    "min_parameters",
                    20_000,
                    "a module with at least this many parameters becomes an FSDP unit of its own",
                    minimum=1,
                    maximum=10**12,
                ),
                _REPLICAS,
            ),
            constants=lambda spec: {"SHARDING": "HYBRID_SHARD"} if spec.options["replicas"] > 1 else {},
        ),
        Strategy(
            name="fsdp2",
            title="FSDP2",
            splits="The batch, and parameters, gradients and optimizer state: a shard on each rank.",
            sends="Parameters: all-gather before forward and backward. Gradients: reduce-scatter.",
            wrapper="FSDP",
            layout="shards",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.fsdp2_limit,
            unmet=rules.fully_shard_on_cpu,
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
            one_loss=lambda spec: spec.nproc,
            layout="shards",
            data_ranks=lambda spec: 1,
            limit=rules.tensor_limit,
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
            layout="stages",
            layout_details=rules.pipe_layout,
            data_ranks=lambda spec: 1,
            limit=rules.first_of(rules.pipe_limit, rules.micro_batch_limit),
            unmet=rules.without_evaluation,
            options=(_SCHEDULE, _MICRO_BATCHES),
            lacks={"accumulate": _PARTS},
            constants=rules.pipe_constants,
        ),
        Strategy(
            name="fsdp2_tp",
            title="FSDP2 × TP",
            further=True,
            splits="The layers over neighbours (TP); the batch and shards of the parts over the other axis.",
            sends="Activations: all-reduce in a row. Parameters: all-gather, gradients: reduce-scatter, in a column.",
            one_loss=lambda spec: spec.options["tp_size"],
            wrapper="FSDP",
            layout="shards",
            data_ranks=lambda spec: spec.nproc // spec.options["tp_size"],
            limit=rules.first_of(rules.mesh_limit, rules.tensor_limit),
            unmet=rules.fully_shard_on_cpu,
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
            wrapper="DDP",
            layout="stages",
            layout_details=rules.pipe_layout,
            data_ranks=lambda spec: spec.nproc // spec.options["pp_size"],
            limit=rules.first_of(rules.mesh_limit, rules.pipe_limit, rules.micro_batch_limit),
            unmet=rules.without_evaluation,
            default_nproc=4,
            options=(_PP_SIZE, _SCHEDULE_OF_WRAPPED, _MICRO_BATCHES, _BUCKET_MB),
            lacks={"accumulate": _PARTS},
            constants=rules.pipe_constants,
        ),
        Strategy(
            name="pp_fsdp2_tp",
            title="PP × FSDP2 × TP",
            further=True,
            splits="The blocks (PP), the batch and shards of what a rank holds (FSDP2), and the layers (TP).",
            sends="What PP, FSDP2 and TP send, each along its own axis of the mesh.",
            wrapper="FSDP",
            one_loss=lambda spec: spec.options["tp_size"],
            layout="stages",
            layout_details=rules.pipe_layout,
            data_ranks=lambda spec: spec.nproc // (spec.options["pp_size"] * spec.options["tp_size"]),
            limit=rules.first_of(rules.mesh_limit, rules.pipe_limit, rules.micro_batch_limit, rules.tensor_limit),
            unmet=rules.without_evaluation,
            default_nproc=8,
            options=(_PP_SIZE, _TP_SIZE, _SCHEDULE_OF_WRAPPED, _MICRO_BATCHES, _SEQUENCE_PARALLEL),
            lacks={"accumulate": _PARTS, "fp16": _SCALED},
            constants=rules.pipe_constants,
        ),
        Strategy(
            name="cp",
            title="CP",
            further=True,
            splits="The sequence: each rank has a part of every window, and the whole model.",
            sends="Keys and values: all-gather in every layer. Gradients: all-reduce, as in DDP.",
            wrapper="DDP",
            data_ranks=lambda spec: 1,
            limit=rules.context_limit,
            options=(_BUCKET_MB,),
            note=lambda device: (
                "Keys and values are gathered, as Llama 3 was trained; torch's own context_parallel sends them round "
                "in a ring, with kernels that only GPUs have."
            ),
        ),
    )
}
