"""Each batch loads slowly, as from a network disk."""

import time

from torch.utils.data import TensorDataset

from labkit.training.strategies.base import FETCH


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
