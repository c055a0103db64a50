"""One gradient of one rank is NaN, in one step."""

import os

FAULT_RANK = 1  # the affected rank
FAULT_STEP = 5


def fault_step(model, step: int) -> None:
    """Injected fault: NaN in the gradient of a parameter, before gradients are averaged."""
    if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
        next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
