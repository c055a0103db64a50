"""3D parallelism: pipeline stages (PP), whose layers are split (TP), and whose parameters are sharded (FSDP2)."""

import warnings
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import parallel

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, DTYPE, MIXED_PRECISION, transform
from labkit.training.strategies.fsdp2_tp import TP_SIZE, data_shard
from labkit.training.strategies.pp import (
    IS_LOGGING_RANK,
    PP_SIZE,
    evaluate,
    parallelize,
    stage_data,
    tensors_of,
    total_norm,
    train_step,
)
from labkit.training.strategies.sharded import resume, save
from labkit.training.strategies.tp import clip_gradients
from labkit.training.workloads.cnn import tensor_plans

__all__ = [
    "IS_LOGGING_RANK",
    "clip_gradients",
    "data_shard",
    "evaluate",
    "parallelize",
    "resume",
    "save",
    "stage_data",
    "tensors_of",
    "total_norm",
    "train_step",
]


@cache
def mesh() -> dist.DeviceMesh:
    """The ranks by stage (pp), shard of the batch (dp), and shard of the layers (tp)."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (PP_SIZE, dist.get_world_size() // (PP_SIZE * TP_SIZE), TP_SIZE)
    return dist.init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp", "tp"))


def wrap_stage(stage: nn.Sequential, device: torch.device) -> nn.Module:
    """Split the layers of the stage (TP), then shard its parameters (FSDP2)."""
    plans = tensor_plans()
    # TP returns the local parts of tensors as views, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # A stage runs once per micro-batch: gather its parameters once, and keep them.
    settings = {"mesh": mesh()["dp"], "reshard_after_forward": False}
    if MIXED_PRECISION:
        dtypes = {"param_dtype": DTYPE, "reduce_dtype": torch.float32}
        settings["mp_policy"] = MixedPrecisionPolicy(**dtypes)
    for number, block in stage.to(device).named_children():
        parallel.parallelize_module(block, mesh()["tp"], plans.get(int(number), {}))
        if CHECKPOINT_ACTIVATIONS or COMPILE:
            block = transform(block)
        fully_shard(block, **settings)
    # The root, which schedules the all-gathers.
    return fully_shard(stage, **settings)
