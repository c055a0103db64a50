"""Distributed data parallel: every rank holds the whole model and trains on its own samples; gradients are averaged."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, transform

BUCKET_MB = 0  # MiB per gradient bucket; 0: 1 for the first, 25 for the others
STATIC_GRAPH = False  # every step runs the same graph, recorded in the first step
COMPRESSION = "none"  # fp16 or powersgd: compression of the gradients


def parallelize(blocks, device: torch.device) -> nn.Module:
    """A replica on every rank; backward averages the gradients over the ranks."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    options = {}
    if BUCKET_MB:
        options["bucket_cap_mb"] = BUCKET_MB
    if STATIC_GRAPH:
        options["static_graph"] = True
    model = nn.Sequential(*blocks).to(device)
    model = DistributedDataParallel(model, **options)
    if COMPRESSION == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    if COMPRESSION == "powersgd":
        # Two uncompressed steps, then low-rank factors instead of each matrix. It waits in
        # gloo's threads, where several buckets would block each other.
        low_rank = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(low_rank, powerSGD_hook)
    return model


def gradient_sync(model: nn.Module, last: bool) -> AbstractContextManager:
    """Accumulate gradients locally; synchronize them with the last micro-batch."""
    return nullcontext() if last else model.no_sync()
