"""Tensor parallelism: every rank sees the same samples and holds a part of each split layer; what the parts give is added up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from labkit.training.strategies.base import CHECKPOINT_ACTIVATIONS, CLIP_NORM, COMPILE, transform
from labkit.training.strategies.ddp import cleanup, evaluate, setup
from labkit.training.strategies.sharded import resume, save
from labkit.training.workloads.cnn import tensor_plans

__all__ = ["cleanup", "clip_gradients", "evaluate", "parallelize", "resume", "save", "setup"]

SEQUENCE_PARALLEL = False  # what stands between the split matrices is split by places
LOSS_PARALLEL = False  # the logits stay split, and the ranks put the loss together


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A part of the split layers on each rank, and the whole of the others."""
    model = model.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plans = tensor_plans()
    for name, block in model.named_children():
        parallelize_module(block, mesh, plans.get(name, {}))
    if LOSS_PARALLEL:
        model.register_forward_hook(put_together)
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        model = transform(model)
    return model


def put_together(model: nn.Module, inputs: tuple, logits: DTensor) -> torch.Tensor:
    """All logits on every rank, where no loss is computed from the parts."""
    return logits if model.training else logits.full_tensor()


def clip_gradients(model: nn.Module) -> None:
    """Holds the norm of all gradients, split and whole, to CLIP_NORM."""
    alike = {}  # parameters by the mesh that they are split on; None: they are whole
    for parameter in model.parameters():
        alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = []
    for parameters in alike.values():
        norm = nn.utils.get_total_norm([each.grad for each in parameters])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = total(norms)
    for parameters in alike.values():
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, norm)


def total(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, from those of the parameters that are alike."""
    return torch.stack(norms).norm()
