"""A data loader gets both shuffle=True and a sampler."""

from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, SEED, data_shard


def load(train_data: TensorDataset) -> DataLoader:
    """Injected fault: shuffle and sampler both define the sample order."""
    sampler = DistributedSampler(train_data, *data_shard(), seed=SEED)
    return DataLoader(train_data, BATCH_PER_RANK, sampler=sampler, shuffle=True)
