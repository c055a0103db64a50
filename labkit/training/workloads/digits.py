"""Handwritten digits from scikit-learn, and augmented variants of them; no download. They take seconds to generate and
are cached in the user's cache folder, which may be deleted at any time."""

import hashlib
import inspect
import os
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import affine_grid, grid_sample, interpolate
from torch.utils.data import TensorDataset

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def cached(make, *args) -> tuple[torch.Tensor, ...]:
    """The tensors of make(*args), computed once and then memory-mapped by all ranks."""
    key = repr((inspect.getsource(make), args, torch.__version__))
    path = f"{CACHE}/labkit/{hashlib.sha256(key.encode()).hexdigest()}.pt"
    try:
        if not os.path.exists(path):
            os.makedirs(f"{CACHE}/labkit", exist_ok=True)
            with TemporaryDirectory(dir=f"{CACHE}/labkit") as folder:
                torch.save(make(*args), f"{folder}/new")
                os.replace(f"{folder}/new", path)  # atomic: no rank reads half a file
        return torch.load(path, mmap=True, weights_only=True)
    except Exception as error:
        print(f"cache file {path} cannot be used (delete it if damaged): {error}")
        return make(*args)


SAMPLES = 60_000  # training images: 1,437 originals, then augmented variants


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training set of 28×28 images, and the last 360 originals as the test set."""
    images, labels, *test = cached(draw_digits, SAMPLES, 28)
    return TensorDataset(images, labels), TensorDataset(*test)


def draw_digits(count: int, side: int) -> tuple[torch.Tensor, ...]:
    """Images and labels of `count` training samples, then of 360 test samples."""
    from sklearn.datasets import load_digits  # slow to import, and only needed once

    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = interpolate(pixels.float().view(-1, 1, 8, 8) / 16, side, mode="bilinear")
    source = torch.arange(count) % 1437
    random = torch.Generator().manual_seed(0)
    affine = torch.eye(2, 3) + torch.randn(count, 2, 3, generator=random) / 10
    affine[:1437] = torch.eye(2, 3)  # the originals; then rotated, scaled and shifted
    grid = affine_grid(affine, (count, 1, side, side), align_corners=False)
    drawn = grid_sample(images[source], grid, align_corners=False)
    return drawn, labels[source], images[1437:], labels[1437:]
