"""The handwritten digits as 3×32×32 images with three equal channels: the shape of CIFAR-10, without a download."""

from torch.utils.data import TensorDataset

from labkit.training.workloads.digits import cached, draw_digits

SAMPLES = 10_000  # training images: 1,437 originals, then augmented variants


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training set of 3×32×32 images, and the last 360 originals as the test set."""
    images, labels, *test = cached(draw_digits, SAMPLES, 32)
    return three_channels(images, labels), three_channels(*test)


def three_channels(images, labels) -> TensorDataset:
    """Repeat the channel three times, without copying memory."""
    return TensorDataset(images.expand(-1, 3, -1, -1), labels)
