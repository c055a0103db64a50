"""A data loader gets both shuffle=True and a sampler."""

from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, SEED, data_shard


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """Injected fault: shuffle and sampler both define the sample order."""
    sampler = DistributedSampler(dataset, *data_shard(), seed=SEED)
    return sampler, DataLoader(dataset, BATCH_PER_RANK, sampler=sampler, shuffle=True)
