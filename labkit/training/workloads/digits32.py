"""The handwritten digits as images of 32×32 in three colours, all alike: the shape of CIFAR's, with nothing to download."""

from torch.utils.data import TensorDataset

from labkit.training.workloads.cache import cached
from labkit.training.workloads.digits import draw_digits

SAMPLES = 10_000  # training images: 1,437 real ones, then variants of them


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images of 3×32×32 to train on, and the last 360 real ones to test on."""
    images, labels, *test = cached(draw_digits, SAMPLES, 32)
    return in_colour(images, labels), in_colour(*test)


def in_colour(images, labels) -> TensorDataset:
    """The same pixels three times; they are kept once."""
    return TensorDataset(images.expand(-1, 3, -1, -1), labels)
