"""Every rank loads its batches from all samples, in the same order."""

from torch.utils.data import DataLoader, Sampler, TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK


def load(dataset: TensorDataset) -> tuple[Sampler, DataLoader]:
    """Injected fault: no DistributedSampler, so all ranks load the same batches."""
    loader = DataLoader(dataset, BATCH_PER_RANK, shuffle=True)
    return loader.sampler, loader
