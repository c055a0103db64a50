"""One rank hands another shape to a collective than the others."""

import torch
import torch.distributed as dist

FAULT_RANK = 1  # the rank that it happens to
FAULT_STEP = 5


def disturb(model, step: int) -> None:
    """The fault: shapes that do not go together."""
    if step == FAULT_STEP:
        size = 1000 + 24 * (dist.get_rank() == FAULT_RANK)
        dist.all_reduce(torch.zeros(size, device=next(model.parameters()).device))
