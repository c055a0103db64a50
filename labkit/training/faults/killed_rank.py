"""One rank is killed with SIGKILL, as by a scheduler or by the kernel's out-of-memory killer."""

import os
import signal

FAULT_RANK = 1  # the affected rank
FAULT_STEP = 5


def fault_step(model, step: int) -> None:
    """Injected fault: this process is killed."""
    if step == FAULT_STEP and os.environ.get("RANK", "0") == str(FAULT_RANK):
        os.kill(os.getpid(), signal.SIGKILL)
