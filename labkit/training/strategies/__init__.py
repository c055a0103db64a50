"""The table of strategies. It does not import torch, so that listing the strategies is fast.

A row contains the name of a strategy, what it splits and sends, and its limits. The module of the same name in this
package contains the training code, which `labkit.plan.script` reads as text and the tests import.
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

    - `data_ranks`: the number of data-parallel ranks, that is, of different shards of each step's batch; 1 for tensor
      parallelism,
      because all ranks see the same samples.
    - `limit`: one sentence with the nearest working choice if the strategy cannot run a Request, otherwise None;
      `unmet`: the same for
      what this machine lacks.
    - `differs`: the reason if a run is expected to train something different from one process, otherwise None.
    - `processes`: the number of processes that torchrun starts.
    - `lacks`: the common options that the strategy does not support, each with the reason.
    - `constants`: settings of the script that follow from the Request, by name.
    - `note`: how a run on a device ("cpu", "cuda") differs from what the title says, such as an emulation; otherwise
      empty.
    - `further`: listed under "more" if only a few strategies can be displayed.
    - `one_loss`: the number of adjacent ranks that must have the same loss, because they split layers and not samples.
    - `wrapper`: what synchronizes the gradients: "DDP", "FSDP", "DeepSpeed", or empty.
    - `layout`: the content of its checkpoints, one of `labkit.plan.checkpoints.LAYOUTS`. Strategies with the same
      layout can resume from
      each other's checkpoints, with any number of ranks. `layout_details`: further properties that must agree, by name.
    - `extra`: the optional extra of the project that the strategy needs.
    - `compiles`: whether its package compiles a C++ extension of torch at its first use.
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
    compiles: bool = False

    @property
    def all_options(self) -> tuple[Option, ...]:
        """The strategy's own options, then the common options that it supports."""
        return self.options + tuple(option for option in COMMON if option.name not in self.lacks)

    @property
    def module(self) -> str:
        """The module of the training code."""
        return f"{__name__}.{self.name}"


_MOST = 65_536  # maximum number of ranks, micro-batches and the like
INPUT_PIPELINE: tuple[Option, ...] = (
    Option(
        "fetch",
        "batches",
        "index whole batches, or single samples as in most tutorials",
        choices=("batches", "samples"),
    ),
    Option("workers", 0, "data loader worker processes per rank", minimum=0, maximum=64),
    Option("pin_memory", True, "load batches into page-locked memory, which a GPU can copy asynchronously"),
    Option("non_blocking", True, "continue while a batch is copied to the GPU"),
)
COMMON: tuple[Option, ...] = (
    Option("accumulate", 1, "micro-batches per step, to use less memory for the same update", minimum=1, maximum=_MOST),
    Option("clip_norm", 0.0, "maximum norm of all gradients; 0: no clipping", minimum=0.0, maximum=1e12),
    Option("checkpoint_activations", False, "discard the activations inside each block and recompute them in backward"),
    Option("compile", False, "compile each block with torch.compile"),
    *INPUT_PIPELINE,
)
_BUCKET_MB = Option(
    "bucket_mb", 25, "size of a gradient bucket in MiB; smaller ones are sent earlier", minimum=1, maximum=_MOST
)
_DDP_OPTIONS = (
    _BUCKET_MB,
    Option(
        "static_graph", False, "declare that every step runs the same graph, so that DDP can optimize after the first"
    ),
    Option(
        "compression",
        "none",
        "compress gradients to 16 bits, or to low-rank factors",
        choices=("none", "fp16", "powersgd"),
    ),
)
_RESHARD = Option(
    "reshard_after_forward", True, "free the gathered parameters after forward and all-gather them again in backward"
)
_TP_SIZE = Option("tp_size", 2, "number of ranks that split each layer", minimum=1, maximum=_MOST)
_PP_SIZE = Option("pp_size", 2, "number of ranks in a pipeline", minimum=2, maximum=_MOST)
_SCHEDULE = Option(
    "schedule",
    "1F1B",
    "order of the forward and backward passes of the micro-batches",
    choices=("GPipe", "1F1B", *rules.TWO_STAGES),
)
# Zero-bubble schedules compute parameter gradients separately, which bypasses the hooks with which DDP and FSDP2
# synchronize them.
_SCHEDULE_OF_WRAPPED = replace(_SCHEDULE, choices=("GPipe", "1F1B", "Interleaved1F1B"))
_MICRO_BATCHES = Option("micro_batches", 4, "number of micro-batches per batch", minimum=1, maximum=_MOST)
_SEQUENCE_PARALLEL = Option(
    "sequence_parallel", False, "split the activations between the split matrices along the sequence dimension"
)
_REPLICAS = Option(
    "replicas",
    1,
    "number of groups of ranks that each hold one sharded copy of the model (HSDP)",
    minimum=1,
    maximum=_MOST,
)
# Why a strategy does not support a common option.
_REPLICATED = (
    "nn.DataParallel creates new replicas at every step, which would run the blocks of device 0; use the strategy ddp"
)
_PIPELINED = "a pipeline already splits the batch into micro-batches; set micro_batches"
_SCALED = "torch's GradScaler cannot handle sharded and replicated gradients together; use --precision bf16 or fp32"

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            name="single",
            title="Single",
            splits="Nothing: one device holds the model and trains on every sample.",
            sends="Nothing.",
            data_ranks=lambda spec: 1,
            limit=rules.one_process,
            default_nproc=1,
        ),
        Strategy(
            name="dp",
            title="DP",
            splits="The batch: one process drives all devices, with a thread and a replica for each.",
            sends="Inputs, parameters, outputs and gradients at every step, all through device 0.",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.several_devices,
            processes=lambda spec: 1,
            lacks={"checkpoint_activations": _REPLICATED, "compile": _REPLICATED},
            note=rules.emulated,
        ),
        Strategy(
            name="ddp",
            title="DDP",
            splits="The batch: every rank holds the whole model and trains on its own samples.",
            sends="Gradients: one all-reduce per bucket, overlapped with backward.",
            wrapper="DDP",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.ddp_limit,
            differs=rules.ddp_differs,
            options=(
                *_DDP_OPTIONS,
                Option(
                    "join",
                    False,
                    "allow unequal numbers of samples: a rank that is done joins the collectives of the others",
                ),
            ),
        ),
        Strategy(
            name="zero1",
            title="ZeRO-1",
            splits="The batch and the optimizer state: each rank updates some of the parameters.",
            sends="Gradients: all-reduce. Parameters: broadcast by the rank that updated them.",
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
            splits="The batch and optimizer state; from stage 2 on gradients, in stage 3 parameters.",
            sends="Gradients: reduce. Parameters: all-gather, block by block in stage 3.",
            wrapper="DeepSpeed",
            extra="deepspeed",
            compiles=True,
            data_ranks=lambda spec: spec.nproc,
            unmet=rules.compiler_of_deepspeed_missing,
            options=(
                Option(
                    "stage",
                    1,
                    "ZeRO stage: shard optimizer state (1), gradients (2), parameters (3)",
                    choices=(1, 2, 3),
                ),
            ),
            lacks={
                "accumulate": "its engine counts micro-batches itself; use zero1 or fsdp2",
                **dict.fromkeys(("save_every", "resume"), "its engine uses its own format; use zero1 or fsdp2"),
            },
        ),
        Strategy(
            name="fsdp",
            title="FSDP1",
            further=True,
            splits="The batch, parameters, gradients and optimizer state: one shard per rank.",
            sends="Parameters: all-gather before forward and backward. Gradients: reduce-scatter.",
            wrapper="FSDP",
            layout="shards",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.fsdp_limit,
            options=(
                Option(
                    "sharding",
                    "FULL_SHARD",
                    "what is sharded; HYBRID_SHARD needs replicas",
                    choices=("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "SHARD_GRAD_OP"),
                ),
                Option(
                    "min_parameters",
                    20_000,
                    "wrap each module with at least this many parameters as a separate FSDP unit",
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
            splits="The batch, parameters, gradients and optimizer state: one shard per rank.",
            sends="Parameters: all-gather before forward and backward. Gradients: reduce-scatter.",
            wrapper="FSDP",
            layout="shards",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.fsdp2_limit,
            unmet=rules.fully_shard_on_cpu,
            options=(
                _RESHARD,
                Option(
                    "cpu_offload",
                    False,
                    "keep parameters, gradients and optimizer state in CPU memory, and run the optimizer there",
                ),
                Option("prefetch", 0, "number of blocks that are all-gathered ahead", choices=(0, 1, 2)),
                _REPLICAS,
            ),
        ),
        Strategy(
            name="tp",
            title="TP",
            splits="The layers: a shard of each split matrix per rank; all ranks see the same samples.",
            sends="Activations: all-reduce after every pair of split matrices, and again in backward.",
            one_loss=lambda spec: spec.nproc,
            layout="shards",
            data_ranks=lambda spec: 1,
            limit=rules.tensor_limit,
            options=(
                _SEQUENCE_PARALLEL,
                Option(
                    "loss_parallel",
                    False,
                    "keep the logits split over the vocabulary and compute the loss from the shards",
                ),
            ),
            lacks={"fp16": _SCALED},
        ),
        Strategy(
            name="pp",
            title="PP",
            splits="The blocks: each rank holds some, and batches pass through them in micro-batches.",
            sends="Activations to the rank with the next stage, and their gradients back.",
            layout="stages",
            layout_details=rules.pipeline_layout,
            data_ranks=lambda spec: 1,
            limit=rules.first_of(rules.pipeline_limit, rules.micro_batch_limit),
            unmet=rules.without_evaluation,
            options=(_SCHEDULE, _MICRO_BATCHES),
            lacks={"accumulate": _PIPELINED},
            constants=rules.pipeline_constants,
        ),
        Strategy(
            name="fsdp2_tp",
            title="FSDP2 × TP",
            further=True,
            splits="The layers along one axis of the mesh (TP); the batch and the state along the other (FSDP2).",
            sends="Activations: all-reduce (TP axis). Parameters: all-gather, gradients: reduce-scatter (FSDP2 axis).",
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
            sends=(
                "Activations and their gradients along a pipeline; parameter gradients: all-reduce between pipelines."
            ),
            wrapper="DDP",
            layout="stages",
            layout_details=rules.pipeline_layout,
            data_ranks=lambda spec: spec.nproc // spec.options["pp_size"],
            limit=rules.first_of(rules.mesh_limit, rules.pipeline_limit, rules.micro_batch_limit),
            unmet=rules.without_evaluation,
            default_nproc=4,
            options=(_PP_SIZE, _SCHEDULE_OF_WRAPPED, _MICRO_BATCHES, _BUCKET_MB),
            lacks={"accumulate": _PIPELINED},
            constants=rules.pipeline_constants,
        ),
        Strategy(
            name="pp_fsdp2_tp",
            title="PP × FSDP2 × TP",
            further=True,
            splits="The blocks (PP), the batch and the state of each rank (FSDP2), and the layers (TP).",
            sends="The traffic of PP, FSDP2 and TP, each along its own axis of the mesh.",
            wrapper="FSDP",
            one_loss=lambda spec: spec.options["tp_size"],
            layout="stages",
            layout_details=rules.pipeline_layout,
            data_ranks=lambda spec: spec.nproc // (spec.options["pp_size"] * spec.options["tp_size"]),
            limit=rules.first_of(rules.mesh_limit, rules.pipeline_limit, rules.micro_batch_limit, rules.tensor_limit),
            unmet=rules.without_evaluation,
            default_nproc=8,
            options=(_PP_SIZE, _TP_SIZE, _SCHEDULE_OF_WRAPPED, _MICRO_BATCHES, _SEQUENCE_PARALLEL),
            lacks={"accumulate": _PIPELINED, "fp16": _SCALED},
            constants=rules.pipeline_constants,
        ),
        Strategy(
            name="cp",
            title="CP",
            further=True,
            splits="The sequence: each rank holds a part of every window, and the whole model.",
            sends="Keys and values: all-gather in every layer. Gradients: all-reduce, as in DDP.",
            wrapper="DDP",
            data_ranks=lambda spec: 1,
            limit=rules.context_limit,
            options=(_BUCKET_MB,),
            note=lambda device: (
                "Keys and values are all-gathered, as in the training of Llama 3; torch's own context_parallel "
                "passes them around a ring, with kernels for GPUs only."
            ),
        ),
    )
}
