"""DiLoCo (Douillard et al. 2023): every rank trains its own replica with AdamW; every SYNC_EVERY steps, an outer
optimizer with Nesterov momentum moves all replicas to a common point."""

from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from labkit.training.strategies.base import LEARNING_RATE

SYNC_EVERY = 10  # steps between two steps of the outer optimizer
OUTER_LEARNING_RATE = 0.7


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, and the outer optimizer, which steps after every SYNC_EVERY steps of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    common = [parameter.detach().clone() for parameter in model.parameters()]
    outer = torch.optim.SGD(common, lr=OUTER_LEARNING_RATE, momentum=0.9, nesterov=True)
    steps = count(1)

    @torch.no_grad()
    def synchronize(*_) -> None:
        if next(steps) % SYNC_EVERY:
            return
        for point, parameter in zip(common, model.parameters()):
            point.grad = point - parameter  # how far this replica has come
            dist.all_reduce(point.grad)
            point.grad /= dist.get_world_size()
        outer.step()
        for point, parameter in zip(common, model.parameters()):
            parameter.copy_(point)

    optimizer.register_step_post_hook(synchronize)
    return optimizer
