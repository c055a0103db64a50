"""What a script does with other processes, in a trace that has none: data loaders without workers, exchanges of Python
objects, in which every rank has the same one, pipeline stages that must know the shapes of their inputs and outputs,
and groups of torch's fake backend."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from labkit.prediction.tracing.guard import Refused
from labkit.prediction.tracing.tape import Tape
from labkit.prediction.tracing.torch_private import GIVEN_SHAPES, NEEDS_SHAPES, STAGES_AGREE
from labkit.prediction.tracing.world import replaced
from labkit.probe.torch_private import NEXT_BATCH

_OF_WORKERS = (
    *("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "worker_init_fn"),
    *("pin_memory", "pin_memory_device", "in_order"),
)


def works_alone(tape: Tape) -> None:
    """Replaces these functions, for the rest of the process. What workers of a loader would do counts as theirs."""
    create, iterate, fetch, group = DataLoader.__init__, DataLoader.__iter__, NEXT_BATCH.get(), dist.new_group

    @wraps(create)
    def init(loader: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(create).bind(loader, *args, **kwargs).arguments
        create(**{name: value for name, value in given.items() if name not in _OF_WORKERS})
        loader.labkit_has_workers = bool(given.get("num_workers"))

    @wraps(iterate)
    def iterator(loader: Any) -> Any:
        batches = iterate(loader)
        batches.labkit_has_workers = loader.labkit_has_workers
        return batches

    def fetched(batches: Any) -> Any:
        with tape.in_other_processes() if batches.labkit_has_workers else nullcontext():
            return fetch(batches)

    DataLoader.__init__, DataLoader.__iter__ = init, iterator
    NEXT_BATCH.replace(wraps(fetch)(fetched))
    if STAGES_AGREE.exists() and NEEDS_SHAPES.exists():
        STAGES_AGREE.replace(_stages_know)
    torch.compile = lambda model=None, **_: (lambda function: function) if model is None else model
    replaced(
        (group, wraps(group)(lambda ranks=None, *_, **kwargs: group(ranks, **kwargs | {"backend": None}))),
        (dist.all_gather_object, _gathered),
        (dist.gather_object, _gathered_by_one),
        (dist.broadcast_object_list, lambda objects, *_, **__: None),
        (dist.scatter_object_list, _scattered),
        (dist.send_object_list, _exchanged),
        (dist.recv_object_list, _exchanged),
    )


def _stages_know(stage: Any, received_result: Any = None) -> torch.Tensor:
    """What the stages of a pipeline agree on before their first step: that each was given its shapes."""
    if NEEDS_SHAPES.get()(GIVEN_SHAPES.of(stage), True):
        _exchanged()
    return torch.tensor([1], dtype=torch.int32)


def _gathered(objects: list[Any], one: Any, group: Any = None) -> None:
    objects[:] = [one] * len(objects)


def _gathered_by_one(one: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        _gathered(objects, one)


def _scattered(output: list[Any], inputs: list[Any] | None = None, *_: Any, **__: Any) -> None:
    output[0] = inputs[dist.get_rank()] if inputs else None


def _exchanged(*_: Any, **__: Any) -> NoReturn:
    raise Refused(
        "exchanges Python objects with another rank",
        "a trace has no other ranks, and a PipelineStage does without them if it is given input_args and output_args",
    )
