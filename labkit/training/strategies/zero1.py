"""ZeRO stage 1: as DDP, but each rank keeps the optimizer state of its share of the parameters alone, and steps only those."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from labkit.training.strategies.base import LEARNING_RATE
from labkit.training.strategies.ddp import cleanup, evaluate, exchange, parallelize, setup, share

__all__ = ["build_optimizer", "cleanup", "evaluate", "exchange", "optimizer_state", "parallelize", "setup", "share"]


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for this rank's share of the parameters; what it steps is sent to all."""
    adamw = torch.optim.AdamW
    return ZeroRedundancyOptimizer(model.parameters(), adamw, lr=LEARNING_RATE)


def optimizer_state(optimizer) -> dict:
    """What the optimizer keeps on all ranks, gathered on the one that saves."""
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}
