"""FSDP2 and tensor parallelism on a 2D mesh: the layers are split along one axis, and the state is sharded along the
other."""

import warnings
from collections.abc import Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, DTYPE, MIXED_PRECISION, transform
from labkit.training.strategies.ddp import cleanup, evaluate, setup
from labkit.training.strategies.fsdp2 import RESHARD_AFTER_FORWARD, loss_of
from labkit.training.strategies.sharded import resume, save
from labkit.training.strategies.tp import clip_gradients
from labkit.training.workloads.cnn import tensor_plans

__all__ = ["cleanup", "clip_gradients", "data_shard", "evaluate", "loss_of", "parallelize", "resume", "save", "setup"]

TP_SIZE = 2  # ranks that split each layer
SEQUENCE_PARALLEL = False  # split activations between the matrices by position


@cache
def mesh() -> DeviceMesh:
    """The ranks of a row split the layers (tp), the ranks of a column the batch (dp)."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (dist.get_world_size() // TP_SIZE, TP_SIZE)
    return init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))


def data_shard() -> tuple[int, int]:
    """num_replicas and rank of the DistributedSampler."""
    return mesh()["dp"].size(), mesh()["dp"].get_local_rank()


def parallelize(blocks: Iterable[nn.Module], device: torch.device) -> nn.Module:
    """Split the layers (TP), then shard the parameters of each rank (FSDP2)."""
    # TP returns the local parts of tensors as views, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    settings = {"mesh": mesh()["dp"], "reshard_after_forward": RESHARD_AFTER_FORWARD}
    if MIXED_PRECISION:
        dtypes = {"param_dtype": DTYPE, "reduce_dtype": torch.float32}
        settings["mp_policy"] = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32)
    model, plans = nn.Sequential(), tensor_plans()
    for number, block in enumerate(blocks):  # split each before the next one is built
        parallelize_module(block.to(device), mesh()["tp"], plans.get(number, {}))
        if CHECKPOINT_ACTIVATIONS or COMPILE:
            block = transform(block)
        model.append(fully_shard(block, **settings))
    return fully_shard(model, **settings)  # the root, which schedules the all-gathers
