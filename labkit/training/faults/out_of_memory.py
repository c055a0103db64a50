"""One rank allocates more memory than is available."""

import os

import torch

FAULT_RANK = 1  # the affected rank
FAULT_STEP = 5


def fault_step(model, step: int) -> None:
    """Injected fault: allocate a tensor of 1 PiB."""
    if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
        torch.empty(2**50, dtype=torch.uint8, device=next(model.parameters()).device)
