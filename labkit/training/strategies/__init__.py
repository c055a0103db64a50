"""The table of strategies. It does not import torch, so that listing the strategies is fast.

A row contains every fact about a strategy (`labkit.training.rows` has the fields). The module of the same name in this
package contains the training code, which `labkit.plan.script` reads as text and the tests import.
"""

from __future__ import annotations

from labkit.setup.preflight import Needs
from labkit.training.options import MOST, Option
from labkit.training.rows import Strategy
from labkit.training.strategies import combinations, pipelines, rules, shared

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
            sends="Inputs, parameters, outputs and gradients at every step, all through device 0.",
            traffic=("threads",),
            states="whole",
            data_ranks=lambda spec: spec.nproc,
            limit=rules.first_of(rules.added_losses, rules.several_devices),
            processes=lambda spec: 1,
            process_group=False,
            lacks={"checkpoint_activations": shared.REPLICATED, "compile": shared.REPLICATED},
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
                *shared.DDP_OPTIONS,
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
            options=shared.DDP_OPTIONS,
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
                shared.REPLICAS,
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
                shared.RESHARD,
                Option(
                    "cpu_offload",
                    False,
                    "keep parameters, gradients and optimizer state in CPU memory, and run the optimizer there",
                ),
                Option("prefetch", 0, "number of blocks that are all-gathered ahead", choices=(0, 1, 2)),
                shared.REPLICAS,
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
                shared.SEQUENCE_PARALLEL,
                Option(
                    "loss_parallel",
                    False,
                    "keep the logits split over the vocabulary and compute the loss from the shards",
                ),
            ),
            lacks={"fp16": shared.SCALED},
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
            limit=rules.first_of(rules.added_losses, pipelines.limit, pipelines.micro_batch_limit),
            unmet=rules.without_evaluation,
            options=(shared.SCHEDULE, shared.MICRO_BATCHES),
            lacks={"accumulate": shared.PIPELINED},
            constants=pipelines.constants,
        ),
        *combinations.ROWS,
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
            traffic=("vectors", "gradients_of_dense", "norms_of_experts"),
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
            splits="The sequence: each rank holds two chunks of every window, and the whole model.",
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
                shared.BUCKET_MB,
            ),
            note=lambda device: (
                "Attention is written in PyTorch; torch's own context_parallel has kernels for GPUs only."
            ),
        ),
    )
}
BASELINE = STRATEGIES["single"]  # one device: what every other strategy is compared with
DEFAULT = STRATEGIES["ddp"]  # if a Spec names no strategy
