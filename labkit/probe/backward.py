"""Hooks calls of backward and finds the losses they start from.

Zero-bubble schedules of pipelines compute the gradients of a stage's inputs and those of its weights separately, with
`torch.autograd.grad`: both are a backward, and the first one starts from the loss in the last stage.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from labkit.probe.journal import Guard
from labkit.probe.losses import edge_before, edge_of
from labkit.probe.patches import Patches
from labkit.probe.steps import StepWatch
from labkit.probe.untraced import compiling

_DEEPSPEED = "deepspeed.runtime.fp16.loss_scaler"
_PIPELINING = "torch.distributed.pipelining"


def watch_backward(
    patches: Patches, watch: StepWatch, guard: Guard, follows: Callable[[bool], bool]
) -> Callable[[], None]:
    """Reports every backward in the followed thread; `follows` (in hooks.py) returns whether the caller is in that
    thread.

    The returned function also hooks what the script has imported since: pipeline stages, and DeepSpeed's scalers.
    """
    scalers, pipelines = ScalerWatch(patches, watch), False

    def begin(tensors: Any) -> int:
        root = _scalar(tensors)
        if root is None:
            return watch.backward_begins(None)
        loss, made_by = scalers.unscaled(root), edge_of(root)
        if loss is not root and made_by is not None:
            made_by = edge_before(made_by)  # before the scaler
        return watch.backward_begins(loss, made_by)

    def whole(original: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
            if compiling() or not follows(gradients is not None):
                return original(*args, **kwargs)
            depth = guard(begin, args[0] if args else kwargs.get("tensors"))
            try:
                return original(*args, **kwargs)
            finally:
                guard(watch.backward_ends, depth)

        return backward

    def partial(original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            """Counts as backward only if a script with hand-written updates computes the gradients of a loss for all
            its parameters.
            """
            if (
                compiling()
                or not watch.by_hand
                or _scalar(outputs) is None
                or not watch.thread.here()
                or kwargs.get("create_graph")
            ):
                return original(outputs, inputs, *args, **kwargs)
            inputs = inputs if isinstance(inputs, torch.Tensor) else tuple(inputs)
            depth = guard(begin, outputs) if _are_leaves(inputs) and follows(False) else None
            try:
                return original(outputs, inputs, *args, **kwargs)
            finally:
                guard(watch.backward_ends, depth)

        return grad

    def half(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(stage: Any, kind: str, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            loss = given["stage_output"] if stage.is_last and kind == "input" else None
            if kind == "full" or compiling() or not follows(loss is None):
                return original(stage, kind, given, *args, **kwargs)
            depth = guard(begin, loss)
            try:
                return original(stage, kind, given, *args, **kwargs)
            finally:
                guard(watch.backward_ends, depth)

        return backward

    def look() -> None:
        nonlocal pipelines
        scalers.look()
        if not pipelines and _PIPELINING in sys.modules:
            pipelines = True
            patches.wrap("halves of backward", f"{_PIPELINING}.PipelineStage.backward_maybe_with_nosync", half)

    patches.wrap("steps", "torch.autograd.backward", whole)
    patches.wrap("steps", "torch.autograd.grad", partial)
    return look


def _are_leaves(inputs: Any) -> bool:
    return all(
        isinstance(one, torch.Tensor) and one.is_leaf for one in (inputs if isinstance(inputs, tuple) else (inputs,))
    )


def _scalar(tensors: Any) -> torch.Tensor | None:
    """The scalar that backward is called on; None if it is called on anything else."""
    if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
        tensors = tensors[0]
    return tensors if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 else None


class ScalerWatch:
    """Remembers the unscaled loss that was passed to a gradient scaler of torch or DeepSpeed.

    A disabled scaler returns its input, which is then not a scaled loss. Also counts the calls of `step`, which may
    skip the optimizer's.
    """

    def __init__(self, patches: Patches, watch: StepWatch) -> None:
        self._patches, self._steps = patches, watch
        self._last: tuple[Any, Any] = (lambda: None, None)
        self._watched: set[tuple[type, str]] = set()

        def make(begin: Callable[..., None]) -> Callable[..., None]:
            def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
                begin(scaler, *args, **kwargs)
                for kind in type(scaler).__mro__:
                    self._watch(kind, "scale", self._remembering)
                    self._watch(kind, "step", self._counting)

            return init

        patches.wrap("scaled losses", "torch.amp.GradScaler.__init__", make)

    def look(self) -> None:
        """Also hooks DeepSpeed's scalers once the script has imported them."""
        module = sys.modules.get(_DEEPSPEED)
        if module is not None:
            self._watch(module.LossScalerBase, "scale_loss", self._remembering)

    def unscaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """The original loss if `tensor` is the newest scaled loss, otherwise `tensor` itself."""
        scaled, loss = self._last
        return loss if scaled() is tensor else tensor

    def _watch(self, kind: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        if name in vars(kind) and (kind, name) not in self._watched:
            self._watched.add((kind, name))
            self._patches.wrap_method("scaled losses", kind, name, make)

    def _remembering(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if not compiling() and isinstance(scaled, torch.Tensor) and scaled is not outputs:
                self._last = weakref.ref(scaled), outputs.detach()
            return scaled

        return scale

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._steps.scaler_steps += 1
            return original(scaler, *args, **kwargs)

        return step
