"""FSDP2 and tensor parallelism on a 2D mesh: the layers are split along one axis, and the state is sharded along the
other."""

import warnings
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import parallel
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from labkit.training.strategies.base import (
    CHECKPOINT_ACTIVATIONS,
    COMPILE,
    DTYPE,
    MIXED_PRECISION,
    evaluation_batches,
    transform,
)
from labkit.training.strategies.fsdp2 import RESHARD_AFTER_FORWARD
from labkit.training.strategies.sharded import resume, save
from labkit.training.strategies.tp import clip_gradients
from labkit.training.workloads.cnn import tensor_plans

__all__ = ["clip_gradients", "data_shard", "evaluate", "parallelize", "resume", "save"]

TP_SIZE = 2  # ranks that split each layer
SEQUENCE_PARALLEL = False  # split activations between the matrices by position


@cache
def mesh() -> dist.DeviceMesh:
    """The ranks of a row split the layers (tp), the ranks of a column the batch (dp)."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (dist.get_world_size() // TP_SIZE, TP_SIZE)
    return dist.init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))


def data_shard() -> tuple[int, int]:
    """num_replicas and rank of the DistributedSampler."""
    return mesh()["dp"].size(), mesh()["dp"].get_local_rank()


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Split the layers (TP), then shard the parameters of each rank (FSDP2)."""
    # TP returns the local parts of tensors as views, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    settings = {"mesh": mesh()["dp"]}
    if not RESHARD_AFTER_FORWARD:
        settings["reshard_after_forward"] = False
    if MIXED_PRECISION:
        dtypes = {"param_dtype": DTYPE, "reduce_dtype": torch.float32}
        settings["mp_policy"] = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32)
    model = nn.Sequential()
    plans = tensor_plans()
    for number, block in enumerate(blocks):  # split each before the next one is built
        plan = plans.get(number, {})
        parallel.parallelize_module(block.to(device), mesh()["tp"], plan)
        if CHECKPOINT_ACTIVATIONS or COMPILE:
            block = transform(block)
        model.append(fully_shard(block, **settings))
    # The root, which schedules the all-gathers.
    return fully_shard(model, **settings)


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy on the test set; each rank evaluates its shard."""
    model.eval()
    sums = torch.zeros(3, device=device)
    for indices in evaluation_batches(dataset):
        inputs, targets = (tensor.to(device) for tensor in dataset[indices])
        logits, targets = model(inputs).flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()
