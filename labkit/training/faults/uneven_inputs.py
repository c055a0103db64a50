"""One rank has samples for a few batches only."""

import os

from torch.utils.data import TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, share

FAULT_RANK = 1  # the rank that it happens to
FAULT_STEP = 5


def spoil(dataset: TensorDataset) -> TensorDataset:
    """The fault: this rank runs out of batches before the others."""
    if os.environ.get("RANK", "0") != str(FAULT_RANK):
        return dataset
    shares, _ = share()
    kept = FAULT_STEP * BATCH_PER_RANK * shares
    return TensorDataset(*(part[:kept] for part in dataset.tensors))
