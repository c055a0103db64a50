"""Every rank writes the model to the same file."""

import torch

from labkit.training.strategies.base import CHECKPOINTS

FAULT_STEP = 5


def disturb(model, step: int) -> None:
    """The fault: all ranks save, and to one file."""
    if step % FAULT_STEP == 0:
        torch.save(model.state_dict(), CHECKPOINTS.with_name("model.pt"))
