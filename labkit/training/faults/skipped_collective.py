"""One rank skips a barrier."""

import torch.distributed as dist

FAULT_RANK = 1  # the affected rank
FAULT_STEP = 5


def fault_step(model, step: int) -> None:
    """Injected fault: one rank does not call the barrier."""
    if step == FAULT_STEP and dist.get_rank() != FAULT_RANK:
        dist.barrier()
