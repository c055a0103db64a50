"""Tensor parallelism: every rank sees the same samples and holds a shard of each split layer; an all-reduce adds the
partial sums."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, parallel

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, CLIP_NORM, COMPILE, LEARNING_RATE, transform
from labkit.training.strategies.sharded import resume, save
from labkit.training.workloads.cnn import tensor_plans

__all__ = ["build_optimizer", "clip_gradients", "parallelize", "resume", "save"]

SEQUENCE_PARALLEL = False  # split activations between the matrices by position
LOSS_PARALLEL = False  # keep the logits split and compute the loss from the shards


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Shard the split layers over the ranks; replicate the others."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    model = nn.Sequential()
    plans = tensor_plans()
    for number, block in enumerate(blocks):  # split each before the next one is built
        parallel.parallelize_module(block.to(device), mesh, plans.get(number, {}))
        if CHECKPOINT_ACTIVATIONS or COMPILE:
            block = transform(block)
        model.append(block)
    if LOSS_PARALLEL:
        model.register_forward_hook(gather_logits)
    return model


def gather_logits(model: nn.Module, inputs: tuple, logits: DTensor) -> torch.Tensor:
    """In evaluation, all-gather the logits; in training, keep them split."""
    return logits if model.training else logits.full_tensor()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; a group has either DTensors or plain tensors, as a GPU updates it at once."""
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    return torch.optim.AdamW([{"params": split}, {"params": whole}], lr=LEARNING_RATE)


def clip_gradients(model: nn.Module) -> None:
    """Clip the norm of all gradients, sharded and replicated, to CLIP_NORM."""
    groups = {}  # parameters by the mesh that they are sharded on; None: replicated
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = []
    for parameters in groups.values():
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = total_norm(norms)
    for parameters in groups.values():
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, norm)


def total_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, from the norms of the groups."""
    return torch.stack(norms).norm()
