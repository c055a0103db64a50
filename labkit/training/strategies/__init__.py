"""The table of strategies. It does not import torch, so that listing the strategies is fast.

A row contains every fact about a strategy (`labkit.training.rows` has the fields). The module of the same name in this
package contains the training code, which `labkit.plan.script` reads as text and the tests import.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.setup.preflight import Needs
from labkit.training.rows import MOST, Option, Strategy
from labkit.training.strategies import rules

# ---- options of several strategies, and reasons why several do not support a common option

BUCKET_MB = Option(
    "bucket_mb",
    0,
    "size of a gradient bucket in MiB; smaller ones are sent earlier; 0: torch's default, 1 MiB for the first bucket"
    " and 25 MiB for the others",
    minimum=0,
    maximum=MOST,
)
DDP_OPTIONS = (
    BUCKET_MB,
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
RESHARD = Option(
    "reshard_after_forward", True, "free the gathered parameters after forward and all-gather them again in backward"
)
TP_SIZE = Option("tp_size", 2, "number of ranks that split each layer", minimum=1, maximum=MOST)
PP_SIZE = Option("pp_size", 2, "number of ranks in a pipeline", minimum=2, maximum=MOST)
SCHEDULE = Option(
    "schedule",
    "1F1B",
    "order of the forward and backward passes of the micro-batches",
    choices=("GPipe", "1F1B", *rules.TWO_STAGES),
)
# Zero-bubble schedules compute parameter gradients separately, which bypasses the hooks with which DDP and FSDP2
# synchronize them.
SCHEDULE_OF_WRAPPED = replace(SCHEDULE, choices=("GPipe", "1F1B", "Interleaved1F1B"))
MICRO_BATCHES = Option("micro_batches", 4, "number of micro-batches per batch", minimum=1, maximum=MOST)
SEQUENCE_PARALLEL = Option(
    "sequence_parallel", False, "split the activations between the split matrices along the sequence dimension"
)
REPLICAS = Option(
    "replicas",
    1,
    "number of groups of ranks that each hold one sharded copy of the model (HSDP)",
    minimum=1,
    maximum=MOST,
)
# Why a strategy does not support a common option.
REPLICATED = (
    "nn.DataParallel creates new replicas at every step, which would run the blocks of device 0; use the strategy ddp"
)
PIPELINED = "a pipeline already splits the batch into micro-batches; set micro_batches"
SCALED = "torch's GradScaler cannot handle sharded and replicated gradients together; use --precision bf16 or fp32"


# ---- the table

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            name="single",
            title="Single",
            splits="Nothing: one device holds the model and trains on every sample.",
            sends="Nothing.",
            traffic=(),
            states="whole",
            data_ranks=lambda spec: 1,
            limit=rules.one_process,
            process_group=False,
            default_nproc=1,
        ),
        Strategy(
            name="dp",
            title="DP",
            splits="The batch: one process drives all devices, with a thread and a replica for each.",
            sends="At every step from device 0 inputs and parameters, and to it outputs and gradients.",
            traffic=("threads",),
            states="whole",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.first_of(rules.added_losses, rules.several_devices),
            processes=lambda spec: 1,
            process_group=False,
            lacks={"checkpoint_activations": REPLICATED, "compile": REPLICATED},
            note=rules.emulated,
        ),
        Strategy(
            name="ddp",
            title="DDP",
            splits="The batch: every rank holds the whole model and trains on its own samples.",
            sends="Gradients: one all-reduce per bucket, overlapped with backward.",
            wrapper="DDP",
            compared=True,
            traffic=("gradients",),
            states="whole",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.ddp_limit,
            unmeasured=rules.in_gloos_threads,
            constants=rules.ddp_constants,
            differs=rules.ddp_differs,
            options=(
                *DDP_OPTIONS,
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
            traffic=("gradients", "updated_parameters"),
            states="by_tensor",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.ddp_limit,
            unmeasured=rules.in_gloos_threads,
            constants=rules.ddp_constants,
            differs=rules.compressed,
            options=DDP_OPTIONS,
        ),
        Strategy(
            name="deepspeed",
            title="DeepSpeed",
            further=True,
            splits="The batch and optimizer state; from stage 2 on gradients, in stage 3 parameters.",
            sends="Gradients: reduce. Parameters: all-gather, block by block in stage 3.",
            wrapper="DeepSpeed",
            needs=Needs("deepspeed", instead="the strategy zero1"),
            traffic=("engine",),
            data_ranks=lambda spec: spec.nproc,
            limit=rules.added_losses,
            options=(
                Option(
                    "stage",
                    1,
                    "ZeRO stage: shard optimizer state (1), gradients (2), parameters (3)",
                    choices=(1, 2, 3),
                ),
            ),
            layout="engine",
            reads=("engine",),
            layout_details=rules.engine,
            constants=lambda spec: {"LOSS_SCALING": False},  # in fp16, its engine scales the loss
            lacks={"accumulate": "its engine counts micro-batches itself; use zero1 or fsdp2"},
        ),
        Strategy(
            name="fsdp",
            title="FSDP1",
            further=True,
            splits="The batch, parameters, gradients and optimizer state: one shard per rank.",
            sends="Parameters: all-gather before forward and backward. Gradients: reduce-scatter.",
            wrapper="FSDP",
            layout="shards",
            traffic=("units",),
            states="units",
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
                REPLICAS,
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
            compared=True,
            autocast=False,
            traffic=("rows", "norms"),
            states="rows",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.fsdp2_limit,
            unmet=rules.fully_shard_on_cpu,
            options=(
                RESHARD,
                Option(
                    "cpu_offload",
                    False,
                    "keep parameters, gradients and optimizer state in CPU memory, and run the optimizer there",
                ),
                Option("prefetch", 0, "number of blocks that are all-gathered ahead", choices=(0, 1, 2)),
                REPLICAS,
            ),
        ),
        Strategy(
            name="tp",
            title="TP",
            splits="The layers: a shard of each split matrix per rank; all ranks see the same samples.",
            sends="Activations: all-reduce after every pair of split matrices, and again in backward.",
            one_loss=lambda spec: spec.nproc,
            layout="shards",
            traffic=("layers", "norms_of_layers"),
            states="whole",
            data_ranks=lambda spec: 1,
            limit=rules.tensor_limit,
            options=(
                SEQUENCE_PARALLEL,
                Option(
                    "loss_parallel",
                    False,
                    "keep the logits split over the vocabulary and compute the loss from the shards",
                ),
            ),
            lacks={"fp16": SCALED},
        ),
        Strategy(
            name="pp",
            title="PP",
            splits="The blocks: each rank holds some, and batches pass through them in micro-batches.",
            sends="Activations to the rank with the next stage, and their gradients back.",
            layout="shards",
            traffic=("stages", "agreements"),
            states="whole",
            data_ranks=lambda spec: 1,
            limit=rules.first_of(rules.added_losses, rules.pipeline_limit, rules.micro_batch_limit),
            unmet=rules.without_evaluation,
            options=(SCHEDULE, MICRO_BATCHES),
            lacks={"accumulate": PIPELINED},
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
            autocast=False,
            traffic=("layers", "rows", "norms", "norms_of_layers"),
            states="rows",
            data_ranks=lambda spec: spec.nproc // spec.options["tp_size"],
            limit=rules.first_of(rules.mesh_limit, rules.tensor_limit),
            unmet=rules.fully_shard_on_cpu,
            default_nproc=4,
            options=(TP_SIZE, SEQUENCE_PARALLEL, RESHARD),
            lacks={"fp16": SCALED},
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
            layout="shards",
            traffic=("stages", "gradients_of_stages", "agreements"),
            states="whole",
            data_ranks=lambda spec: spec.nproc // spec.options["pp_size"],
            limit=rules.first_of(rules.added_losses, rules.mesh_limit, rules.pipeline_limit, rules.micro_batch_limit),
            unmet=rules.without_evaluation,
            default_nproc=4,
            options=(PP_SIZE, SCHEDULE_OF_WRAPPED, MICRO_BATCHES, BUCKET_MB),
            lacks={"accumulate": PIPELINED},
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
            layout="shards",
            autocast=False,
            traffic=("stages", "layers", "rows", "norms", "norms_of_layers", "agreements"),
            states="rows",
            data_ranks=lambda spec: spec.nproc // (spec.options["pp_size"] * spec.options["tp_size"]),
            limit=rules.first_of(rules.mesh_limit, rules.pipeline_limit, rules.micro_batch_limit, rules.tensor_limit),
            unmet=rules.without_evaluation,
            default_nproc=8,
            options=(PP_SIZE, TP_SIZE, SCHEDULE_OF_WRAPPED, MICRO_BATCHES, SEQUENCE_PARALLEL),
            lacks={"accumulate": PIPELINED, "fp16": SCALED},
            constants=rules.pipeline_constants,
        ),
        Strategy(
            name="diloco",
            title="DiLoCo",
            further=True,
            splits="The batch: every rank trains its own replica on its own samples.",
            sends="Pseudo-gradients: one all-reduce of all parameters every few steps.",
            traffic=("pseudo_gradients",),
            states="outer",
            data_ranks=lambda spec: spec.nproc,
            differs=rules.local_steps,
            options=(
                Option("sync_every", 10, "steps between two steps of the outer optimizer", minimum=1, maximum=MOST),
                Option("outer_learning_rate", 0.7, "learning rate of the outer optimizer", minimum=0.0, maximum=10.0),
            ),
            lacks={
                "fp16": "a rank that skips a step after an overflow would miss a synchronization; use --precision bf16",
                **dict.fromkeys(("save_every", "resume"), "a checkpoint would hold one of the replicas; use ddp"),
            },
            note=lambda device: (
                "The replicas differ between two synchronizations: the losses are not those of one process."
            ),
        ),
        Strategy(
            name="ep",
            title="EP",
            further=True,
            splits="The batch and the experts: each rank holds some experts of every layer, and all other parameters.",
            sends="Vectors: all-to-all to the ranks of their experts and back. Other gradients: all-reduce.",
            wrapper="DDP",
            layout="shards",
            traffic=("tokens", "gradients_of_dense", "norms_of_experts"),
            states="experts",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.expert_limit,
            unmet=lambda spec, machine: (
                rules.fully_shard_on_cpu(spec, machine) if spec.options["dense"] == "sharded" else None
            ),
            options=(
                Option(
                    "dense",
                    "whole",
                    "parameters outside of the experts: whole on each rank (DDP), or sharded over the ranks (FSDP2)",
                    choices=("whole", "sharded"),
                ),
            ),
            lacks={"fp16": "only the rank of an expert would see that its gradient overflowed; use --precision bf16"},
        ),
        Strategy(
            name="cp",
            title="CP",
            further=True,
            splits="The sequence: each rank holds two chunks of every sequence, and the whole model.",
            sends=("Keys and values: all-gather, ring or all-to-all in every layer. Gradients: all-reduce, as in DDP."),
            wrapper="DDP",
            traffic=("keys_and_values", "gradients"),
            states="whole",
            data_ranks=lambda spec: 1,
            limit=rules.first_of(rules.added_losses, rules.context_limit),
            options=(
                Option(
                    "method",
                    "all_gather",
                    "how attention gets the keys and values of other ranks: all-gather, ring, or ulysses, which trades"
                    " positions for heads",
                    choices=("all_gather", "ring", "ulysses"),
                ),
                BUCKET_MB,
            ),
            note=lambda device: (
                "Attention is written in PyTorch; torch's own context_parallel has kernels for GPUs only."
            ),
        ),
    )
}
BASELINE = STRATEGIES["single"]  # one device: what every other strategy is compared with
DEFAULT = STRATEGIES["ddp"]  # if a Spec names no strategy
