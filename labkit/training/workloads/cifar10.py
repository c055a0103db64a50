"""CIFAR-10 from torchvision, read from DATA_DIR or downloaded to it."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10

DATA_DIR = "data"  # folder of the files, also for downloads
SAMPLES = 50_000  # training images


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training and test sets: images of 3×32×32, 10,000 of them for testing."""
    # One process per machine downloads; the others wait.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        CIFAR10(DATA_DIR, download=True)
    if dist.is_initialized():
        dist.barrier()
    train, test = CIFAR10(DATA_DIR, train=True), CIFAR10(DATA_DIR, train=False)
    images, test_images = channels_first(train.data[:SAMPLES]), channels_first(test.data)
    train_data = TensorDataset(images, torch.tensor(train.targets[:SAMPLES]))
    return train_data, TensorDataset(test_images, torch.tensor(test.targets))


def channels_first(images) -> torch.Tensor:
    """Bytes of (N, H, W, C) as floats of (N, C, H, W) from 0 to 1."""
    return torch.tensor(images.transpose(0, 3, 1, 2)) / 255
