"""What faults add to a program. A script with a fault takes the definitions of its block, which replace those of
strategy and base."""

import os
import signal
import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, FAULT, FETCH, SEED, data_shard
from labkit.training.strategies.checkpoints import CHECKPOINTS

FAULT_RANK = 1  # the affected rank
FAULT_STEP = 5

if FAULT == "slow_rank":  # One rank pauses before each step.

    def fault_step(model, step: int) -> None:
        """Injected fault: this rank is slow."""
        if os.environ.get("RANK", "0") == str(FAULT_RANK):
            time.sleep(0.2)


if FAULT == "slow_loader":  # Each batch loads slowly, as from a network disk.

    class SlowDataset(TensorDataset):
        """A data set that takes 0.2 s to read a batch."""

        if FETCH == "batches":

            def __getitem__(self, indices):
                time.sleep(0.2)
                return super().__getitem__(indices)

        else:

            def __getitems__(self, indices):  # the data loader calls it once per batch
                time.sleep(0.2)
                return [self[index] for index in indices]

    def fault_data(dataset: TensorDataset) -> TensorDataset:
        """Injected fault: slow data loading."""
        return SlowDataset(*dataset.tensors)


if FAULT == "killed_rank":  # As by a scheduler, or by the kernel's out-of-memory killer.

    def fault_step(model, step: int) -> None:
        """Injected fault: this process is killed."""
        if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
            os.kill(os.getpid(), signal.SIGKILL)


if FAULT == "skipped_collective":  # One rank skips a barrier.

    def fault_step(model, step: int) -> None:
        """Injected fault: one rank does not call the barrier."""
        if step == FAULT_STEP and dist.get_rank() != FAULT_RANK:
            dist.barrier()


if FAULT == "mismatched_shape":  # One rank calls a collective with a different shape than the others.

    def fault_step(model, step: int) -> None:
        """Injected fault: the shapes of an all-reduce do not match."""
        if step == FAULT_STEP:
            size = 1000 + 24 * (dist.get_rank() == FAULT_RANK)
            dist.all_reduce(torch.zeros(size, device=next(model.parameters()).device))


if FAULT == "no_sampler":  # Every rank loads its batches from all samples, in the same order.

    def load(train_data: TensorDataset) -> DataLoader:
        """Injected fault: no DistributedSampler, so all ranks load the same batches."""
        return DataLoader(train_data, BATCH_PER_RANK, shuffle=True)


if FAULT == "shuffle_beside_sampler":  # A data loader gets both shuffle=True and a sampler.

    def load(train_data: TensorDataset) -> DataLoader:
        """Injected fault: shuffle and sampler both define the sample order."""
        sampler = DistributedSampler(train_data, *data_shard(), seed=SEED)
        return DataLoader(train_data, BATCH_PER_RANK, sampler=sampler, shuffle=True)


if FAULT == "everyone_saves":  # Every rank writes the model to the same file.

    def fault_step(model, step: int) -> None:
        """Injected fault: all ranks write to the same file."""
        if step % FAULT_STEP == 0:
            torch.save(model.state_dict(), CHECKPOINTS.with_name("model.pt"))


if FAULT == "out_of_memory":  # One rank allocates more memory than is available.

    def fault_step(model, step: int) -> None:
        """Injected fault: allocate a tensor of 1 PiB."""
        if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
            torch.empty(2**50, dtype=torch.uint8, device=next(model.parameters()).device)


if FAULT == "nan_gradient":  # One gradient of one rank is NaN, in one step.

    def fault_step(model, step: int) -> None:
        """Injected fault: NaN in the gradient of a parameter, before gradients are averaged."""
        if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
            next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))


if FAULT == "unused_parameters":  # The model has a parameter that its forward pass does not use.

    class UnusedParameter(nn.Identity):
        """A block that passes on its inputs, and does not use its parameter."""

        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(8, 8))

    def fault_model(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
        """Injected fault: a parameter that gets no gradient."""
        yield from blocks
        yield UnusedParameter()


if FAULT == "uneven_inputs":  # One rank has samples for only a few batches.

    def fault_data(dataset: TensorDataset) -> TensorDataset:
        """Injected fault: this rank runs out of batches before the others."""
        if os.environ.get("RANK", "0") != str(FAULT_RANK):
            return dataset
        num_replicas, _ = data_shard()
        samples = FAULT_STEP * BATCH_PER_RANK * num_replicas
        return TensorDataset(*(tensor[:samples] for tensor in dataset.tensors))
