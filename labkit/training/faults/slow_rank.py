"""One rank takes longer than the others before each step."""

import os
import time

FAULT_RANK = 1  # the rank that it happens to


def disturb(model, step: int) -> None:
    """The fault: this rank is slow."""
    if os.environ.get("RANK", "0") == str(FAULT_RANK):
        time.sleep(0.2)
