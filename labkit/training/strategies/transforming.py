"""What is applied to each block of a model before any wrapper: activation checkpointing, and torch.compile."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

CHECKPOINT_ACTIVATIONS = False  # recompute activations in backward
COMPILE = False  # compile each block with torch.compile


def transform(block: nn.Module) -> nn.Module:
    """Apply activation checkpointing and torch.compile to a block."""
    if CHECKPOINT_ACTIVATIONS:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if COMPILE:
        block.compile()
    return block
