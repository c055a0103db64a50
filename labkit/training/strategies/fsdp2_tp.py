"""FSDP2 and tensor parallelism on a mesh: neighbours split the layers, and the shards of what they hold lie on the other axis."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, PRECISION, transform
from labkit.training.strategies.ddp import cleanup, evaluate, setup
from labkit.training.strategies.fsdp2 import RESHARD_AFTER_FORWARD, loss_of
from labkit.training.strategies.sharded import resume, save
from labkit.training.strategies.tp import clip_gradients
from labkit.training.workloads.cnn import tensor_plans

__all__ = ["cleanup", "clip_gradients", "evaluate", "loss_of", "parallelize", "resume", "save", "setup", "share"]

TP_SIZE = 2  # ranks that split a layer between them
SEQUENCE_PARALLEL = False  # what stands between the split matrices is split by places


@cache
def mesh() -> DeviceMesh:
    """The ranks in rows: those of a row split the layers, those of a column the batch."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (dist.get_world_size() // TP_SIZE, TP_SIZE)
    return init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))


def share() -> tuple[int, int]:
    """How many shares the samples are taken in, and which of them is this rank's."""
    return mesh()["dp"].size(), mesh()["dp"].get_local_rank()


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A part of the split layers on each rank, of which it holds only a shard."""
    model, plans = model.to(device), tensor_plans()
    for name, block in model.named_children():
        parallelize_module(block, mesh()["tp"], plans.get(name, {}))
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        model = transform(model)
    settings = {"mesh": mesh()["dp"], "reshard_after_forward": RESHARD_AFTER_FORWARD}
    if PRECISION == "bf16":
        bits = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        settings["mp_policy"] = MixedPrecisionPolicy(**bits, output_dtype=torch.float32)
    for part in (*model, model):  # every block, then what is left of the model
        fully_shard(part, **settings)
    return model
