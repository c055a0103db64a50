"""Fully sharded data parallel, first version (FSDP1): each wrapped unit is one flat parameter, sharded over the
ranks."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, CLIP_NORM, COMPILE, transform
from labkit.training.strategies.sharded import resume, save

__all__ = ["SCALER", "clip_gradients", "parallelize", "resume", "save"]

SHARDING = "FULL_SHARD"  # SHARD_GRAD_OP keeps parameters gathered until backward
MIN_PARAMETERS = 20_000  # modules of at least this size become separate FSDP units
REPLICAS = 1  # groups of ranks that each hold one sharded copy of the model
SCALER = ShardedGradScaler()  # checks for overflow on all ranks


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Shard every unit over the ranks; each unit is all-gathered when it is needed."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    model = nn.Sequential(*blocks)
    units = partial(size_based_auto_wrap_policy, min_num_params=MIN_PARAMETERS)
    settings = {"auto_wrap_policy": units, "device_id": device, "use_orig_params": True}
    if REPLICAS > 1:
        shape = (REPLICAS, dist.get_world_size() // REPLICAS)
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
        settings["device_mesh"] = mesh
    sharding = ShardingStrategy[SHARDING]
    return FullyShardedDataParallel(model, sharding_strategy=sharding, **settings)


def clip_gradients(model: nn.Module) -> None:
    """Clip the norm of all gradients, over all shards, to CLIP_NORM."""
    model.clip_grad_norm_(CLIP_NORM)
