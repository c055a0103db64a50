"""One rank has samples for only a few batches."""

import os

from torch.utils.data import TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, data_shard

FAULT_RANK = 1  # the affected rank
FAULT_STEP = 5


def fault_data(dataset: TensorDataset) -> TensorDataset:
    """Injected fault: this rank runs out of batches before the others."""
    if os.environ.get("RANK", "0") != str(FAULT_RANK):
        return dataset
    num_replicas, _ = data_shard()
    samples = FAULT_STEP * BATCH_PER_RANK * num_replicas
    return TensorDataset(*(tensor[:samples] for tensor in dataset.tensors))
