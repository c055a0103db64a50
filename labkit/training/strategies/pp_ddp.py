"""Pipelines side by side: each trains on its own share of the batch, and the ranks with the same stage average their gradients."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, PRECISION, transform
from labkit.training.strategies.ddp import BUCKET_MB, cleanup, setup
from labkit.training.strategies.fsdp2_tp import share
from labkit.training.strategies.pp import SCALER, SPEAKER, STAGES, Pipeline, clip_gradients, evaluate, train_step
from labkit.training.strategies.sharded import resume, save

__all__ = [
    "SCALER",
    "SPEAKER",
    "cleanup",
    "clip_gradients",
    "evaluate",
    "resume",
    "save",
    "setup",
    "share",
    "train_step",
]

PP_SIZE = 2  # ranks that a batch goes through, one after the other


@cache
def mesh() -> DeviceMesh:
    """The ranks in rows: a row holds the same stage, a column is a pipeline."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (PP_SIZE, dist.get_world_size() // PP_SIZE)
    return init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp"))


def pipe() -> dist.ProcessGroup:
    """The ranks that a batch goes through, in the order of their stages."""
    return mesh()["pp"].get_group()


def parallelize(model: nn.Sequential, device: torch.device) -> nn.Module:
    """Stages whose gradients backward averages, and the pipeline around them."""
    stages = {}
    for n in range(dist.get_rank(pipe()), len(STAGES) - 1, pipe().size()):
        blocks = model[STAGES[n] : STAGES[n + 1]]
        if CHECKPOINT_ACTIVATIONS or COMPILE:
            blocks = transform(blocks)
        if PRECISION == "bf16":
            mixed = torch.autocast(device.type, dtype=torch.bfloat16)
            blocks.forward = mixed(blocks.forward)
        if PRECISION == "fp16":
            mixed = torch.autocast(device.type, dtype=torch.float16)
            blocks.forward = mixed(blocks.forward)
        how = {"process_group": mesh()["dp"].get_group(), "bucket_cap_mb": BUCKET_MB}
        # Else DDP lays out buckets anew after the pass by which a stage is tried out.
        how["find_unused_parameters"] = True
        stages[n] = DistributedDataParallel(blocks.to(device), **how)
    return Pipeline(stages, device)
