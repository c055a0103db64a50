"""Three 5×5 convolutions for images of 28×28: 405,898 parameters. The model is a sequence of blocks."""

from torch import nn
from torch.distributed.tensor import parallel


def build_blocks():
    """Blocks that map images of (batch, 1, 28, 28) to logits of (batch, 10)."""
    yield nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
    yield nn.Sequential(nn.Conv2d(32, 64, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
    yield nn.Sequential(nn.Conv2d(64, 128, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
    yield nn.Sequential(nn.Flatten(), nn.Linear(128 * 3 * 3, 128), nn.ReLU())
    yield nn.Linear(128, 10)


def tensor_plans() -> dict[int, dict]:
    """Split the 128 units of the linear layers; replicate the convolutions."""
    return {3: {"1": parallel.ColwiseParallel()}, 4: {"": parallel.RowwiseParallel()}}
