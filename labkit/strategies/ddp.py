"""Distributed data parallel: every rank holds the whole model, trains on its own samples, and the gradients are averaged."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.strategies.base import (
    BATCH_PER_RANK,
    CHECKPOINT_ACTIVATIONS,
    COMPILE,
    SEED,
    transform,
)

BUCKET_MB = 25  # gradients are sent in buckets of this size, while backward still runs


def setup() -> torch.device:
    """Joins the process group: NCCL between GPUs, gloo between CPU processes."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def share() -> tuple[int, int]:
    """How many shares the samples are taken in, and which of them is this rank's."""
    return dist.get_world_size(), dist.get_rank()


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The batches of this rank, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, *share(), seed=SEED)
    batches = BatchSampler(sampler, BATCH_PER_RANK, drop_last=False)  # not one by one
    pin = torch.cuda.is_available()
    return sampler, DataLoader(dataset, None, sampler=batches, pin_memory=pin)


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A replica on every rank; backward averages the gradients over the ranks."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        model = transform(model)
    return DistributedDataParallel(model.to(device), bucket_cap_mb=BUCKET_MB)


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy over the test set, of which each rank takes a share."""
    model.eval()
    sums = torch.zeros(3, device=device)
    shares, mine = share()
    rounds = len(dataset) // (shares * BATCH_PER_RANK) + 1  # as many for every rank
    for indices in torch.arange(len(dataset))[mine::shares].tensor_split(rounds):
        inputs, targets = (part.to(device) for part in dataset[indices])
        logits, targets = model(inputs).flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)
    dist.barrier()  # nobody leaves while another still sends
    return (sums[:2] / sums[2]).tolist()


def cleanup() -> None:
    """Leaves the process group."""
    dist.destroy_process_group()
