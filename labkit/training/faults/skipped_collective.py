"""All ranks but one wait for each other."""

import torch.distributed as dist

FAULT_RANK = 1  # the rank that it happens to
FAULT_STEP = 5


def disturb(model, step: int) -> None:
    """The fault: one rank does not come to the barrier."""
    if step == FAULT_STEP and dist.get_rank() != FAULT_RANK:
        dist.barrier()
