"""Data parallelism in one process: a thread and a replica for each device, as `nn.DataParallel` has it between GPUs."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.strategies.base import BATCH_PER_RANK, SEED

DEVICES = 2  # replicas, each with a thread of this process


class Replicas(nn.Module):
    """The model, run by one thread for each share of a batch."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        # One module for several threads would mix up their parameters: a copy for each,
        # which is lent those of the model at every call, so that all gradients meet there.
        self.copies = [deepcopy(model) for _ in range(DEVICES)]
        self.threads = ThreadPoolExecutor(DEVICES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parameters = dict(self.model.named_parameters())
        learns = torch.is_grad_enabled()  # which every thread decides for itself

        def run(copy: nn.Module, share: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(learns):
                return functional_call(copy, parameters, (share,))

        return torch.cat(list(self.threads.map(run, self.copies, inputs.chunk(DEVICES))))


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The batches of all devices together, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
    # One index for a whole batch: far quicker than to collate it from samples.
    batches = BatchSampler(sampler, BATCH_PER_RANK * DEVICES, drop_last=False)
    pin = torch.cuda.is_available()
    return sampler, DataLoader(dataset, None, sampler=batches, pin_memory=pin)


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A replica on every device; each batch is scattered, and the logits are gathered."""
    return Replicas(model.to(device))
