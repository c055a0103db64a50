"""Fully sharded data parallel: as DDP, but every rank keeps only a shard of the parameters, gradients and optimizer state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, PRECISION, transform
from labkit.training.strategies.ddp import cleanup, evaluate, setup, share
from labkit.training.strategies.sharded import resume, save

__all__ = ["cleanup", "evaluate", "loss_of", "parallelize", "resume", "save", "setup", "share"]

RESHARD_AFTER_FORWARD = True  # False keeps the gathered parameters until backward
CPU_OFFLOAD = False  # shards, gradients and optimizer state stay in CPU memory
PREFETCH = 0  # blocks that are gathered before their turn
REPLICAS = 1  # groups of ranks, of which each holds the whole model in shards


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A shard of every parameter on each rank; a block is gathered when it is needed."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        model = transform(model)
    if REPLICAS > 1:
        shape = (REPLICAS, dist.get_world_size() // REPLICAS)
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    else:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    settings = {"mesh": mesh, "reshard_after_forward": RESHARD_AFTER_FORWARD}
    if PRECISION == "bf16":
        bits = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        settings["mp_policy"] = MixedPrecisionPolicy(**bits, output_dtype=torch.float32)
    if PRECISION == "fp16":
        bits = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}
        settings["mp_policy"] = MixedPrecisionPolicy(**bits, output_dtype=torch.float32)
    if CPU_OFFLOAD:
        settings["offload_policy"] = CPUOffloadPolicy()
    for part in (*model, model):  # every block, then what is left of the model
        fully_shard(part, **settings)
    if PREFETCH:
        blocks = list(model)
        for number, block in enumerate(blocks):
            before = blocks[max(0, number - PREFETCH) : number]
            after = blocks[number + 1 : number + 1 + PREFETCH]
            block.set_modules_to_forward_prefetch(after)
            block.set_modules_to_backward_prefetch(before[::-1])
    return model


def loss_of(model, inputs, targets) -> torch.Tensor:
    """The mean loss of a batch, in 32 bits whatever the blocks compute in."""
    logits = model(inputs)
    return cross_entropy(logits.flatten(0, -2), targets.flatten())
