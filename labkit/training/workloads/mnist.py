"""MNIST from torchvision, read from DATA_DIR or downloaded to it."""

import os

import torch.distributed as dist
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST

DATA_DIR = "data"  # folder of the files, also for downloads
SAMPLES = 60_000  # training images


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training and test sets: images of 28×28, 10,000 of them for testing."""
    # One process per machine downloads; the others wait.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        MNIST(DATA_DIR, download=True)
    if dist.is_initialized():
        dist.barrier()
    train, test = MNIST(DATA_DIR, train=True), MNIST(DATA_DIR, train=False)
    images, test_images = train.data.unsqueeze(1) / 255, test.data.unsqueeze(1) / 255
    train_data = TensorDataset(images[:SAMPLES], train.targets[:SAMPLES])
    return train_data, TensorDataset(test_images, test.targets)
