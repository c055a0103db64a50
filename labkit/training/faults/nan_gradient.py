"""One gradient of one rank is not a number, once."""

import os

FAULT_RANK = 1  # the rank that it happens to
FAULT_STEP = 5


def disturb(model, step: int) -> None:
    """The fault: NaN in the gradient of a parameter, before it is exchanged."""
    if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
        next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
