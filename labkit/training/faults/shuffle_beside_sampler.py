"""A loader is told to shuffle, and has a sampler that does."""

from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, SEED, share


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The fault: shuffle and sampler, which both say the order."""
    sampler = DistributedSampler(dataset, *share(), seed=SEED)
    return sampler, DataLoader(dataset, BATCH_PER_RANK, sampler=sampler, shuffle=True)
