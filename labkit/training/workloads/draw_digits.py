"""Draws the digits on which scripts train, and writes them to the cache folder, where scripts look for them:
`python draw_digits.py FILE CHANNELS SIDE SAMPLES`.

The lab runs this once, before the first run that needs them, and a packed job before its ranks start.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import affine_grid, grid_sample, interpolate

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 works without a home


def draw_digits(channels: int, side: int, samples: int) -> tuple[torch.Tensor, ...]:
    """Images (N, channels, side, side) and labels of the training samples, then of 360 test samples.

    The training samples are the 1,437 other originals of scikit-learn, then variants of them, rotated, scaled and
    shifted at random, always the same. The channels are equal, and share their memory.
    """
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = interpolate(pixels.float().view(-1, 1, 8, 8) / 16, side, mode="bilinear")
    source = torch.arange(samples) % 1437
    random = torch.Generator().manual_seed(0)
    affine = torch.eye(2, 3) + torch.randn(samples, 2, 3, generator=random) / 10
    affine[:1437] = torch.eye(2, 3)
    grid = affine_grid(affine, (samples, 1, side, side), align_corners=False)
    drawn = grid_sample(images[source], grid, align_corners=False)
    tests = images[1437:].clone()  # not a view: what is saved is the whole memory of a tensor
    shape = (-1, channels, -1, -1)
    return drawn.expand(shape), labels[source], tests.expand(shape), labels[1437:].clone()


def main(file: str, *shape: str) -> None:
    folder = Path(CACHE, "labkit")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as place:
        new = Path(place, "new.pt")
        torch.save(draw_digits(*map(int, shape)), new)
        new.replace(folder / file)  # atomic: no rank reads half a file


if __name__ == "__main__":
    main(*sys.argv[1:])
