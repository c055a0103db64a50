"""All three: pipelines of stages, whose layers are split between neighbours, and of what a rank then has it keeps a shard."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, COMPILE, PRECISION, transform
from labkit.training.strategies.ddp import cleanup, setup
from labkit.training.strategies.fsdp2_tp import TP_SIZE, share
from labkit.training.strategies.pp import SPEAKER, STAGES, Pipeline, evaluate, total, train_step
from labkit.training.strategies.pp_ddp import PP_SIZE
from labkit.training.strategies.sharded import resume, save
from labkit.training.strategies.tp import clip_gradients
from labkit.training.workloads.cnn import tensor_plans

__all__ = [
    "SPEAKER",
    "cleanup",
    "clip_gradients",
    "evaluate",
    "resume",
    "save",
    "setup",
    "share",
    "total",
    "train_step",
]


@cache
def mesh() -> DeviceMesh:
    """The ranks by stage, then by share of the batch, then by part of the layers."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (PP_SIZE, dist.get_world_size() // (PP_SIZE * TP_SIZE), TP_SIZE)
    return init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp", "tp"))


def pipe() -> dist.ProcessGroup:
    """The ranks that a batch goes through, in the order of their stages."""
    return mesh()["pp"].get_group()


def parallelize(model: nn.Sequential, device: torch.device) -> nn.Module:
    """Blocks, split (TP) and sharded (FSDP2), and the pipeline around them (PP)."""
    stages, plans = {}, tensor_plans()
    for n in range(dist.get_rank(pipe()), len(STAGES) - 1, pipe().size()):
        blocks = model[STAGES[n] : STAGES[n + 1]].to(device)
        for name, block in blocks.named_children():
            parallelize_module(block, mesh()["tp"], plans.get(name, {}))
        if CHECKPOINT_ACTIVATIONS or COMPILE:
            blocks = transform(blocks)
        # A stage runs once for every micro-batch: gathered once, its parameters stay.
        settings = {"mesh": mesh()["dp"], "reshard_after_forward": False}
        if PRECISION == "bf16":
            bits = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            settings["mp_policy"] = MixedPrecisionPolicy(**bits)
        for part in (*blocks, blocks):  # every block, then what is left of the stage
            fully_shard(part, **settings)
        stages[n] = blocks
    return Pipeline(stages, device)
