"""Each batch is fetched slowly, as from a network disk."""

import time

from torch.utils.data import TensorDataset


class SlowDataset(TensorDataset):
    """Samples that take their time."""

    def __getitem__(self, index):
        time.sleep(0.2)
        return super().__getitem__(index)


def spoil(dataset: TensorDataset) -> TensorDataset:
    """The fault: the samples come slowly."""
    return SlowDataset(*dataset.tensors)
