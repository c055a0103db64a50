"""Fully sharded data parallel: as DDP, but every rank keeps only a shard of the parameters, gradients and optimizer state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from labkit.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, transform
from labkit.strategies.ddp import cleanup, evaluate, load, setup

__all__ = ["cleanup", "evaluate", "load", "parallelize", "setup"]

RESHARD_AFTER_FORWARD = True  # False keeps the gathered parameters until backward


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A shard of every parameter on each rank; a block is gathered when it is needed."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        model = transform(model)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model, model):  # every block, then what is left of the model
        fully_shard(part, mesh=mesh, reshard_after_forward=RESHARD_AFTER_FORWARD)
    return model
