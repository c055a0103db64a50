"""Data parallel in one process: one thread per device, and a replica of the model that is created again at every
step."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, FETCH, PIN_MEMORY, SEED, WORKERS

DEVICE = "cpu"  # cuda: use nn.DataParallel
RANKS = 2  # devices, each with one replica and one thread of this process
THREADS = [ThreadPoolExecutor(1, f"replica {n:03}") for n in range(RANKS)]


def load(train_data: TensorDataset) -> DataLoader:
    """The global batches of all devices, reshuffled in each epoch."""
    sampler = DistributedSampler(train_data, num_replicas=1, rank=0, seed=SEED)
    options = {}
    size = BATCH_PER_RANK * RANKS
    if PIN_MEMORY:
        pinned = torch.cuda.is_available()  # page-locked batches, for asynchronous copies
        options["pin_memory"] = pinned
    if WORKERS:
        options["num_workers"] = WORKERS
        options["persistent_workers"] = True
    if FETCH == "batches":
        indices = BatchSampler(sampler, size, drop_last=False)
        return DataLoader(train_data, batch_size=None, sampler=indices, **options)
    return DataLoader(train_data, size, sampler=sampler, **options)


def in_threads(function, *inputs) -> list:
    """Call a function once per replica, in the replica's thread; returns the results."""
    calls = [thread.submit(function, *args) for thread, *args in zip(THREADS, *inputs)]
    return [call.result() for call in calls]


class Replicas(nn.Module):
    """Emulation of nn.DataParallel: devices are threads, transfers are copies in memory."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        training, mixed = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        def apply(replica, chunk):  # grad mode and autocast are set per thread
            with torch.set_grad_enabled(training), torch.autocast("cpu", enabled=mixed):
                return replica(chunk)

        def backward(gradient):  # replica 0 has the loss
            gradients = gradient.split([len(chunk) for chunk in chunks])  # 4: scatter
            in_threads(torch.autograd.backward, outputs, gradients)
            for copy in copies:  # 5: reduce the parameter gradients on replica 0
                for target, source in zip(self.module.parameters(), copy.parameters()):
                    target.grad += source.grad

        chunks = inputs.chunk(RANKS)  # 1: scatter; a small batch has fewer chunks
        copies = [deepcopy(self.module) for _ in chunks[1:]]  # 2: broadcast parameters
        outputs = in_threads(apply, [self.module, *copies], chunks)
        logits = torch.cat([output.detach() for output in outputs])  # 3: gather
        if training:
            logits.requires_grad_().register_hook(backward)
        return logits


def parallelize(blocks, device: torch.device) -> nn.Module:
    """One replica per device: each batch is scattered, and the logits are gathered."""
    model = nn.Sequential(*blocks)
    if DEVICE == "cuda":
        model = model.to(device)
        model = nn.DataParallel(model, device_ids=[*range(RANKS)])
    else:
        model = Replicas(model)
    return model
