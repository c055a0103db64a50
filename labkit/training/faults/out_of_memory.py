"""One rank asks for more memory than there is."""

import os

import torch

FAULT_RANK = 1  # the rank that it happens to
FAULT_STEP = 5


def disturb(model, step: int) -> None:
    """The fault: a tensor of a pebibyte."""
    if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
        torch.empty(2**50, dtype=torch.uint8, device=next(model.parameters()).device)
