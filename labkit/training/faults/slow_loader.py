"""Each batch loads slowly, as from a network disk."""

import time

from torch.utils.data import TensorDataset


class SlowDataset(TensorDataset):
    """A data set with a delay of 0.2 s per access."""

    def __getitem__(self, index):
        time.sleep(0.2)
        return super().__getitem__(index)


def fault_data(dataset: TensorDataset) -> TensorDataset:
    """Injected fault: slow data loading."""
    return SlowDataset(*dataset.tensors)
