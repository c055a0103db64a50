"""Real handwritten digits that come with scikit-learn, and variants of them: nothing to download."""

import torch
from torch.nn.functional import affine_grid, grid_sample, interpolate
from torch.utils.data import TensorDataset

from labkit.training.workloads.cache import cached

SAMPLES = 60_000  # training images: 1,437 real ones, then variants of them


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images of 28×28 to train on, and the last 360 real ones to test on."""
    images, labels, *test = cached(draw_digits, SAMPLES, 28)
    return TensorDataset(images, labels), TensorDataset(*test)


def draw_digits(count: int, side: int) -> tuple[torch.Tensor, ...]:
    """Images and labels: so many to train on, variants of real ones, and 360 real ones."""
    from sklearn.datasets import load_digits  # a second to import, and needed once

    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = interpolate(pixels.float().view(-1, 1, 8, 8) / 16, side, mode="bilinear")
    source = torch.arange(count) % 1437
    random = torch.Generator().manual_seed(0)
    maps = torch.eye(2, 3) + torch.randn(count, 2, 3, generator=random) / 10
    maps[:1437] = torch.eye(2, 3)  # once as it is; then turned, stretched and shifted
    drawn = []
    for which, how in zip(source.split(1000), maps.split(1000)):  # few at once
        grid = affine_grid(how, (len(how), 1, side, side), align_corners=False)
        drawn.append(grid_sample(images[which], grid, align_corners=False))
    return torch.cat(drawn), labels[source], images[1437:], labels[1437:]
