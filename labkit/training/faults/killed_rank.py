"""One rank is killed from outside, as by a scheduler or the kernel when memory is short."""

import os
import signal

FAULT_RANK = 1  # the rank that it happens to
FAULT_STEP = 5


def disturb(model, step: int) -> None:
    """The fault: this process is killed."""
    if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
        os.kill(os.getpid(), signal.SIGKILL)
