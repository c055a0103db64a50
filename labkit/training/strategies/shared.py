"""Options of several strategies, and reasons why several do not support a common option. Like the table, it does not
import torch."""

from __future__ import annotations

from dataclasses import replace

from labkit.training.options import MOST, Option
from labkit.training.strategies import pipelines

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
    choices=("GPipe", "1F1B", *pipelines.TWO_STAGES),
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
