"""Fully sharded data parallel (FSDP2): like DDP, but each rank stores only a shard of parameters, gradients and
optimizer state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, DTYPE, MIXED_PRECISION, transform
from labkit.training.strategies.sharded import resume, save

__all__ = ["parallelize", "resume", "save"]

RESHARD_AFTER_FORWARD = True  # False keeps the gathered parameters until backward
CPU_OFFLOAD = False  # keep parameters, gradients and optimizer state in CPU memory
PREFETCH = 0  # number of blocks that are all-gathered ahead
REPLICAS = 1  # groups of ranks that each hold one sharded copy of the model


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Shard each block as soon as it is built; it is all-gathered when it is needed."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    if REPLICAS > 1:
        shape = (REPLICAS, dist.get_world_size() // REPLICAS)
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    else:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    settings = {"mesh": mesh}
    if not RESHARD_AFTER_FORWARD:
        settings["reshard_after_forward"] = False
    if MIXED_PRECISION:
        dtypes = {"param_dtype": DTYPE, "reduce_dtype": torch.float32}
        settings["mp_policy"] = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32)
    if CPU_OFFLOAD:
        settings["offload_policy"] = CPUOffloadPolicy()
    model = nn.Sequential(*(fully_shard(block, **settings) for block in blocks))
    if PREFETCH:
        blocks = list(model)
        for number, block in enumerate(blocks):
            before = blocks[max(0, number - PREFETCH) : number]
            after = blocks[number + 1 : number + 1 + PREFETCH]
            block.set_modules_to_forward_prefetch(after)
            block.set_modules_to_backward_prefetch(before[::-1])
    # The root, which schedules the all-gathers.
    return fully_shard(model, **settings)
