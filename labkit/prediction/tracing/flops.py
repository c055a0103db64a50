"""Floating-point operations (FLOPs) of a traced step: matrix products, convolutions and attention, by the formulas of
torch's own counter (`torch.utils.flop_counter`). A multiplication and an addition are two; a causal mask saves nothing.

What a backward pass computes a second time is counted apart: blocks with activation checkpointing, and the scores of
attention, which fused kernels do not store. Such a block runs in backward with gradients enabled. So does a backward
pass that is itself differentiated (`create_graph`), whose FLOPs therefore also count as recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from labkit.prediction.tracing.script import batch, load
from labkit.prediction.tracing.torch_private import DISPATCH_MODE, GRAPH_TASK

_NONE = -1  # the number of the backward pass outside of one


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# torch's counter has no formula for the kernels of a CPU, on which every trace runs
_FORWARD, _BACKWARD = (
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}", None) for end in ("", "_backward")
)
FORMULAS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {**flop_registry, _FORWARD: _attention, _BACKWARD: _attention_backward}
)


class Flops:
    """The FLOPs of a rank: all that it `executed`, and how many of them were `recomputed`."""

    def __init__(self) -> None:
        self.executed = self.recomputed = 0

    def add(self, function: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Counts an operation on local tensors, and returns its FLOPs."""
        formula = FORMULAS.get(function.overloadpacket)
        if formula is None:
            return 0
        count = int(formula(*args, **kwargs, out_val=result))
        self.executed += count
        if torch.is_grad_enabled() and GRAPH_TASK.get()() != _NONE:
            self.recomputed += count
        elif function.overloadpacket is _BACKWARD:
            self.recomputed += _scores(args[1], args[2])
        return count


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    """FLOPs of the scores of attention."""
    return 2 * math.prod(query.shape) * key.shape[-2]


class _Counter(DISPATCH_MODE.get()):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.flops = Flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops.add(func, args, kwargs or {}, result)
        return result


def of_a_sample(path: str, source: str, sample: Any) -> int:
    """The FLOPs that the model of a script for one device needs for forward and backward of one sample of a shape,
    without what it recomputes. To be called under fake tensors."""
    script = load(path, source)
    inputs, targets = batch(script, sample, 1).tensors
    model = torch.nn.Sequential(*script.build_blocks())
    with _Counter() as counter:
        cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    return counter.flops.executed - counter.flops.recomputed
