"""Pipeline parallelism: every rank holds some of the blocks, and hands on what comes out of them in micro-batches."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.strategies.base import BATCH_PER_RANK, SEED
from labkit.strategies.ddp import cleanup, setup

__all__ = ["cleanup", "evaluate", "load", "parallelize", "setup", "train_step"]

MICRO_BATCHES = 4  # parts of a batch that are in the pipe at the same time
LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1  # the rank that has the loss
SPEAKER = os.environ.get("RANK", "0") == str(LAST)  # the one process that prints and logs


class Stage(nn.Module):
    """This rank's blocks, and the schedule that runs them in step with the other ranks'."""

    def __init__(self, blocks: nn.Sequential, device: torch.device):
        super().__init__()
        self.blocks = blocks.to(device)
        stage = PipelineStage(self.blocks, dist.get_rank(), LAST + 1, device)
        self.schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=mean_loss)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of one micro-batch."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The same batches on every rank, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
    # All of one size: the buffers between the stages are made once.
    batches = BatchSampler(sampler, BATCH_PER_RANK, drop_last=True)
    pin = torch.cuda.is_available()
    return sampler, DataLoader(dataset, None, sampler=batches, pin_memory=pin)


def parallelize(model: nn.Sequential, device: torch.device) -> nn.Module:
    """An even share of the blocks on each rank, in order."""
    share, rank = len(model) / (LAST + 1), dist.get_rank()
    return Stage(model[round(share * rank) : round(share * (rank + 1))], device)


def train_step(model, optimizer, inputs, targets) -> torch.Tensor | None:
    """One step; its loss is given back by the last rank, which alone has one."""
    optimizer.zero_grad()
    losses = []
    given = () if dist.get_rank() else (inputs,)  # the others get what the one before made
    model.schedule.step(*given, target=targets, losses=losses)
    optimizer.step()
    return torch.stack(losses).mean() if losses else None


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy over the test set, counted by the last rank."""
    model.eval()
    sums = torch.zeros(2, device=device)
    # The last batch is filled up from the beginning; what was filled in is not counted.
    for indices in torch.arange(len(dataset)).split(BATCH_PER_RANK):
        filled = torch.arange(BATCH_PER_RANK).add(indices[0]) % len(dataset)
        inputs, targets = (part.to(device) for part in dataset[filled])
        given = () if dist.get_rank() else (inputs,)
        logits = model.schedule.eval(*given, target=targets)
        if logits is not None:
            logits, targets = (each[: len(indices)] for each in (logits, targets))
            logits, targets = logits.flatten(0, -2), targets.flatten()
            sums[0] += cross_entropy(logits, targets, reduction="sum")
            sums[1] += (logits.argmax(-1) == targets).sum()
    dist.all_reduce(sums)
    return (sums / dataset.tensors[1].numel()).tolist()
