"""Small experiments with torch in a process group of one rank; `measured.py` runs them in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from labkit.training.workloads.cnn import build_blocks


def behaviour() -> dict[str, Any]:
    """The results of all experiments, as plain values by name."""
    with _one_rank():
        return {
            "torch": torch.__version__,
            "bucket_device": _bucket_device(),
            "two_devices": _two_devices(),
            "update_ratios": {
                "SGD": _update_ratio(partial(torch.optim.SGD, lr=0.1)),
                "AdamW": _update_ratio(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.0)),
            },
            "units": {str(smallest): _units(smallest) for smallest in (1_000_000, 100_000)},
            "parameters_kept": {"DDP": _keeps_parameters(DistributedDataParallel), "FSDP2": _keeps_parameters(_shard)},
            "broadcasts_in_evaluation": {
                "Linear": _broadcasts_in_evaluation(nn.Linear(2, 2)),
                "BatchNorm": _broadcasts_in_evaluation(nn.BatchNorm1d(2)),
            },
        }


@contextmanager
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _bucket_device() -> str:
    """The kind of device on which DDP reduces the gradients of a model on the CPU."""
    devices = set()

    def reduce(state, bucket):  # torch compares annotations, which are strings here
        devices.add(bucket.buffer().device.type)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, reduce)
    model(torch.ones(1, 2)).sum().backward()
    return ", ".join(sorted(devices))


def _two_devices() -> str:
    """The error of DDP with two devices for one process; empty if it raises none."""
    try:
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    except ValueError as error:
        return str(error).splitlines()[0]
    return ""


def _update_ratio(optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """How many times as large the first update is if the gradient is doubled."""

    def update(factor: float) -> float:
        weight = nn.Parameter(torch.ones(3))
        weight.grad = factor * torch.tensor([0.1, 0.2, 0.3])
        optimizer([weight]).step()
        return float((weight.detach() - 1).norm())

    return update(2) / update(1)


def _units(smallest: int) -> int:
    """The number of FSDP units of the CNN, with the policy by size, the root included."""
    policy = partial(size_based_auto_wrap_policy, min_num_params=smallest)
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Sequential(*build_blocks()), auto_wrap_policy=policy, device_id=cpu)
    return sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _shard(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))


def _keeps_parameters(wrap: Callable[[nn.Module], nn.Module]) -> bool:
    """Whether the parameters of the wrapped model are those from before: an optimizer built earlier still has them."""
    model = nn.Linear(2, 2)
    before = list(model.parameters())
    return all(old is new for old, new in zip(before, wrap(model).parameters()))


def _broadcasts_in_evaluation(model: nn.Module) -> bool:
    """Whether a forward pass through the DDP wrapper communicates in evaluation."""
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), model)).eval()
    with torch.no_grad(), torch.profiler.profile() as profile:
        wrapped(torch.ones(2, 2))
    return any("broadcast" in event.key for event in profile.key_averages())
