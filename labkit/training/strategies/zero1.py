"""ZeRO stage 1: like DDP, but each rank stores the optimizer state of some of the parameters, and updates only
those."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from labkit.training.strategies.base import LEARNING_RATE
from labkit.training.strategies.ddp import gradient_sync, parallelize

__all__ = [
    "build_optimizer",
    "gradient_sync",
    "optimizer_state",
    "parallelize",
]


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for some of the parameters on each rank, which broadcasts its updates."""
    adamw = torch.optim.AdamW
    return ZeroRedundancyOptimizer(model.parameters(), adamw, lr=LEARNING_RATE)


def optimizer_state(optimizer) -> dict:
    """The optimizer state of all ranks, gathered on the saving rank."""
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}
