"""Two hidden layers of 512 units for images of 28×28: 669,706 parameters. The model is a sequence of blocks."""

from torch import nn
from torch.distributed.tensor import parallel


def build_blocks():
    """Blocks that map images of (batch, 1, 28, 28) to logits of (batch, 10)."""
    yield nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 512), nn.ReLU())
    yield nn.Sequential(nn.Linear(512, 512), nn.ReLU())
    yield nn.Linear(512, 10)


def tensor_plans() -> dict[int, dict]:
    """Split the 512 units of the first hidden layer."""
    return {0: {"1": parallel.ColwiseParallel()}, 1: {"0": parallel.RowwiseParallel()}}
