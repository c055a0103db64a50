"""Every rank writes the model to the same file."""

import torch

from labkit.training.strategies.checkpoints import CHECKPOINTS

FAULT_STEP = 5


def fault_step(model, step: int) -> None:
    """Injected fault: all ranks write to the same file."""
    if step % FAULT_STEP == 0:
        torch.save(model.state_dict(), CHECKPOINTS.with_name("model.pt"))
