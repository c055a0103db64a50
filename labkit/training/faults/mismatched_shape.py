"""One rank calls a collective with a different shape than the others."""

import torch
import torch.distributed as dist

FAULT_RANK = 1  # the affected rank
FAULT_STEP = 5


def fault_step(model, step: int) -> None:
    """Injected fault: the shapes of an all-reduce do not match."""
    if step == FAULT_STEP:
        size = 1000 + 24 * (dist.get_rank() == FAULT_RANK)
        dist.all_reduce(torch.zeros(size, device=next(model.parameters()).device))
