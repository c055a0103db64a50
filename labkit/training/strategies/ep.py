"""Expert parallelism: each rank holds some of the experts of every layer; all-to-all sends tokens to the ranks of
their experts, and the outputs back. The rest is data parallel over the same ranks.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from labkit.training.strategies.base import (
    BATCH_PER_RANK,
    CHECKPOINT_ACTIVATIONS,
    CLIP_NORM,
    COMPILE,
    DTYPE,
    LEARNING_RATE,
    MIXED_PRECISION,
    transform,
)
from labkit.training.strategies.sharded import resume, save
from labkit.training.workloads.moe import EXPERTS, mixtures

__all__ = ["resume", "save"]

DENSE = "whole"  # other parameters: whole on each rank (DDP), or "sharded" (FSDP2)


class AllToAll(torch.autograd.Function):
    """Sends the n-th part of a tensor to rank n; backward sends the gradients back."""

    @staticmethod
    def forward(ctx, parts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return AllToAll.apply(gradient.contiguous())


def apply_experts(experts: nn.ModuleDict, slots: torch.Tensor) -> torch.Tensor:
    """The output of each expert for its slots: (sequence, expert, slot, width)."""
    if MIXED_PRECISION and torch.is_autocast_enabled(slots.device.type):  # in training
        slots = slots.to(DTYPE)
    sent = slots.transpose(0, 1).contiguous()  # the experts of each rank in turn
    received = AllToAll.apply(sent).unflatten(0, (dist.get_world_size(), -1))
    outputs = [expert(received[:, n]) for n, expert in enumerate(experts.values())]
    returned = AllToAll.apply(torch.stack(outputs, dim=1).flatten(0, 1))
    return returned.transpose(0, 1)


def keep_own_experts(block: nn.Module) -> nn.Module:
    """Free the experts of other ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = [str(n) for n in range(EXPERTS) if n * ranks // EXPERTS == rank]
    for mixture in mixtures(block):
        mixture.experts = nn.ModuleDict({n: mixture.experts[n] for n in own})
        for parameter in mixture.experts.parameters():  # its gradient: from all ranks
            parameter.register_hook(lambda gradient: gradient / ranks)
    return block


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of this rank's experts."""
    experts = [mixture.experts for mixture in mixtures(model)]
    return [parameter for expert in experts for parameter in expert.parameters()]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All other parameters."""
    experts = {*expert_parameters(model)}
    return [parameter for parameter in model.parameters() if parameter not in experts]


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Keep this rank's experts, and replicate or shard the other parameters."""
    blocks = map(keep_own_experts, blocks)
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    if DENSE == "sharded":
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        model = nn.Sequential()
        for block in blocks:
            own = {*expert_parameters(block.to(device))}
            model.append(fully_shard(block, mesh=mesh, ignored_params=own))
        return fully_shard(model, mesh=mesh, ignored_params={*expert_parameters(model)})
    model = nn.Sequential(*blocks).to(device)
    own = expert_parameters(model)
    for parameter in own:  # DDP averages the gradients of the others only
        parameter.requires_grad_(False)
    model = DistributedDataParallel(model, init_sync=False)
    for parameter in own:
        parameter.requires_grad_(True)
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; sharded and whole parameters are separate groups."""
    groups = [{"params": dense_parameters(model)}, {"params": expert_parameters(model)}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def gradient_sync(model: nn.Module, last: bool) -> AbstractContextManager:
    """Accumulate gradients locally; DDP synchronizes them with the last micro-batch."""
    if DENSE == "sharded":
        return nullcontext()
    return nullcontext() if last else model.no_sync()


def clip_gradients(model: nn.Module) -> None:
    """Clip the norm of all gradients, over the experts of all ranks, to CLIP_NORM."""
    experts, dense = expert_parameters(model), dense_parameters(model)
    squares = nn.utils.get_total_norm([parameter.grad for parameter in experts]).square()
    dist.all_reduce(squares)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in dense])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = (squares + norm.square()).sqrt()
    for parameters in (experts, dense):
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, norm)


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy on the test set. Ranks that exchange tokens need batches of
    equal size: they are filled up with samples that are ignored."""
    model.eval()
    sums, ranks, samples = torch.zeros(2, device=device), dist.get_world_size(), len(dataset)
    shard = torch.arange(samples + -samples % ranks)[dist.get_rank() :: ranks]
    for indices in shard.split(BATCH_PER_RANK):
        inputs, targets = (tensor.to(device) for tensor in dataset[indices % samples])
        targets[indices >= samples] = -100  # is ignored
        logits, targets = model(inputs).flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
    dist.all_reduce(sums)
    return (sums / dataset.tensors[1].numel()).tolist()
