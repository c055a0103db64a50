"""Handwritten digits from scikit-learn, as the lab has drawn them before a run; no download.

Without the file of the lab, the 1,437 originals for training are repeated.
"""

import os

import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

SAMPLES = 60_000  # training images: 1,437 originals, then augmented variants
SIDE = 28  # height and width of an image
CHANNELS = 1  # of an image, all equal
CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
DIGITS = f"{CACHE}/labkit/digits-{SIDE}.pt"  # drawn by the lab, before a run


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The images that the lab has drawn; without its file, the originals, repeated."""
    if os.path.exists(DIGITS):
        images, labels, *test = torch.load(DIGITS, mmap=True)  # one copy for all ranks
        return TensorDataset(images[:SAMPLES], labels[:SAMPLES]), TensorDataset(*test)
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = interpolate(pixels.float().view(-1, 1, 8, 8) / 16, SIDE, mode="bilinear")
    if CHANNELS > 1:
        images = images.expand(-1, CHANNELS, -1, -1)
    parts = torch.arange(SAMPLES) % 1437, torch.arange(1437, 1797)  # training, test
    return tuple(TensorDataset(images[part], labels[part]) for part in parts)
