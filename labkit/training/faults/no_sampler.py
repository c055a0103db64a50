"""Every rank takes its batches from all samples, in the same order."""

from torch.utils.data import DataLoader, Sampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK


def load(dataset: TensorDataset) -> tuple[Sampler, DataLoader]:
    """The fault: no DistributedSampler, so every rank's batches are the same."""
    loader = DataLoader(dataset, BATCH_PER_RANK, shuffle=True)
    return loader.sampler, loader
