"""Distributed data parallel: every rank holds the whole model and trains on its own samples; gradients are averaged."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, CHECKPOINT_ACTIVATIONS, COMPILE, transform

BUCKET_MB = 0  # MiB per gradient bucket; 0: 1 for the first, 25 for the others
STATIC_GRAPH = False  # every step runs the same graph, recorded in the first step
COMPRESSION = "none"  # fp16 or powersgd: compression of the gradients


def setup() -> torch.device:
    """Join the process group: NCCL between GPUs, gloo between CPU processes."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def data_shard() -> tuple[int, int]:
    """num_replicas and rank of the DistributedSampler."""
    return dist.get_world_size(), dist.get_rank()


def parallelize(blocks: Iterable[nn.Module], device: torch.device) -> nn.Module:
    """A replica on every rank; backward averages the gradients over the ranks."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    model = nn.Sequential(*blocks).to(device)
    if BUCKET_MB and STATIC_GRAPH:
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, static_graph=True)
    elif BUCKET_MB:
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    elif STATIC_GRAPH:
        model = DistributedDataParallel(model, static_graph=True)
    else:
        model = DistributedDataParallel(model)
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


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy on the test set; each rank evaluates its shard."""
    model.eval()
    sums = torch.zeros(3, device=device)
    num_replicas, rank = data_shard()
    batches = len(dataset) // (num_replicas * BATCH_PER_RANK) + 1  # equal on all ranks
    for indices in torch.arange(len(dataset))[rank::num_replicas].tensor_split(batches):
        inputs, targets = (tensor.to(device) for tensor in dataset[indices])
        logits, targets = model(inputs).flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()


def cleanup() -> None:
    """Leave the process group."""
    dist.destroy_process_group()
