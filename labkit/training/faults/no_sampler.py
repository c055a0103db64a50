"""Every rank loads its batches from all samples, in the same order."""

from torch.utils.data import DataLoader, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK


def load(train_data: TensorDataset) -> DataLoader:
    """Injected fault: no DistributedSampler, so all ranks load the same batches."""
    return DataLoader(train_data, BATCH_PER_RANK, shuffle=True)
