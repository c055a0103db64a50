"""The learning rate as a function of the step, so that a resumed training continues it without further state."""

from math import cos, pi

WARMUP_STEPS = 0  # steps over which the learning rate rises
LR_DECAY = "none"  # how it then falls


def lr_factor(step: int, total: int) -> float:
    """The learning rate of a step, of 1 to `total`, as a fraction of LEARNING_RATE."""
    if WARMUP_STEPS:
        if step <= WARMUP_STEPS:
            return step / WARMUP_STEPS
    if LR_DECAY == "none":
        return 1.0
    else:
        left = (total + 1 - step) / (total - WARMUP_STEPS)
        if LR_DECAY == "cosine":
            return (1 - cos(pi * left)) / 2
        else:
            return left
