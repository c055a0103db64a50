"""Data parallel in one process: a thread for each device, and a replica of the model that is made anew at every step."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, FETCH, PIN_MEMORY, SEED, WORKERS

DEVICE = "cpu"  # cuda: nn.DataParallel itself, between GPUs
RANKS = 2  # devices, each with a replica and a thread of this one process
THREADS = [ThreadPoolExecutor(1, f"replica {n:03}") for n in range(RANKS)]


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The batches of all devices together, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
    how = {"pin_memory": torch.cuda.is_available()}  # copied without waiting, then
    if not PIN_MEMORY:
        how = {}
    if WORKERS:
        how |= {"num_workers": WORKERS, "persistent_workers": True}
    if FETCH == "samples":
        loader = DataLoader(dataset, BATCH_PER_RANK * RANKS, sampler=sampler, **how)
    else:
        batches = BatchSampler(sampler, BATCH_PER_RANK * RANKS, drop_last=False)
        loader = DataLoader(dataset, None, sampler=batches, **how)
    return sampler, loader


def in_threads(run, *given) -> list:
    """What `run` gives for each replica, called in the replica's own thread."""
    calls = [thread.submit(run, *call) for thread, *call in zip(THREADS, *given)]
    return [call.result() for call in calls]


class Replicas(nn.Module):
    """`nn.DataParallel`, emulated: the devices are threads, and what is sent is copied."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        learns, mixed = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        def run(replica, share):  # each thread decides for itself what it records
            with torch.set_grad_enabled(learns), torch.autocast("cpu", enabled=mixed):
                return replica(share)

        def backward(gradient):  # replica 0 has the loss
            parts = gradient.split([len(share) for share in shares])  # 4: scattered
            in_threads(torch.autograd.backward, outputs, parts)
            for copy in copies:  # 5: gradients of parameters are reduced on replica 0
                for mine, its in zip(self.module.parameters(), copy.parameters()):
                    mine.grad += its.grad

        shares = inputs.chunk(RANKS)  # 1: scattered; a small batch has fewer shares
        copies = [deepcopy(self.module) for _ in shares[1:]]  # 2: parameters broadcast
        outputs = in_threads(run, [self.module, *copies], shares)
        logits = torch.cat([output.detach() for output in outputs])  # 3: gathered
        if learns:
            logits.requires_grad_().register_hook(backward)
        return logits


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A replica on every device; each batch is scattered, and the logits are gathered."""
    if DEVICE == "cuda":
        model = model.to(device)
        model = nn.DataParallel(model, device_ids=[*range(RANKS)])
    else:
        model = Replicas(model)
    return model
