"""One rank pauses before each step."""

import os
import time

FAULT_RANK = 1  # the affected rank


def fault_step(model, step: int) -> None:
    """Injected fault: this rank is slow."""
    if os.environ.get("RANK", "0") == str(FAULT_RANK):
        time.sleep(0.2)
