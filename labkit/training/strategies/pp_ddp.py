"""Several pipelines: each trains on its own shard of the batch, and the ranks with the same stage average their
gradients."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, DTYPE, MIXED_PRECISION, transform
from labkit.training.strategies.ddp import BUCKET_MB
from labkit.training.strategies.fsdp2_tp import data_shard
from labkit.training.strategies.pp import (
    IS_LOGGING_RANK,
    PP_SIZE,
    SCALER,
    clip_gradients,
    evaluate,
    parallelize,
    stage_data,
    tensors_of,
    train_step,
)
from labkit.training.strategies.sharded import resume, save

__all__ = [
    "IS_LOGGING_RANK",
    "SCALER",
    "clip_gradients",
    "data_shard",
    "evaluate",
    "parallelize",
    "resume",
    "save",
    "stage_data",
    "tensors_of",
    "train_step",
]


@cache
def mesh() -> dist.DeviceMesh:
    """The ranks of a row hold the same stage (dp), a column is a pipeline (pp)."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (PP_SIZE, dist.get_world_size() // PP_SIZE)
    return dist.init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp"))


def wrap_stage(stage: nn.Sequential, device: torch.device) -> nn.Module:
    """A replica of the stage, whose backward averages the gradients over the ranks."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        for block in stage:
            transform(block)
    if MIXED_PRECISION:
        autocast = torch.autocast(device.type, dtype=DTYPE)
        stage.forward = autocast(stage.forward)
    options = {"process_group": mesh()["dp"].get_group()}
    # Otherwise DDP rebuilds its buckets after the pass that infers the shapes.
    options["find_unused_parameters"] = True
    if BUCKET_MB:
        options["bucket_cap_mb"] = BUCKET_MB
    replica = DistributedDataParallel(stage.to(device), **options)
    # The last backward reduces; the pass that infers the shapes must not ask for it.
    replica.require_backward_grad_sync = False
    return replica
