"""Torch's global hooks, and who is told by them.

Only the thread that runs the script has steps and phases: a forward that autograd's own threads compute again, or that a replica
computes in a thread of its own (`replicas.py` measures those), belongs to what the script's thread waits in. The pair of hooks costs two
to three microseconds for every module inside the outermost one, most of it torch's own. Code that torch.compile traces sees hooks that do
nothing; a model compiled in place (`model.compile()`) therefore has no forward phase, and its time is in "other".
"""

from __future__ import annotations

import atexit
import functools
import json
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from labkit.events import REPORT
from labkit.probe.journal import Guard, Journal
from labkit.probe.observations import Observations
from labkit.probe.replicas import ReplicaWatch
from labkit.probe.sampler import StepSampler
from labkit.probe.steps import StepWatch
from labkit.probe.tensors import TensorWatch
from labkit.probe.traffic import TrafficWatch


def install(journal: Journal, run: str, sample_every: int) -> StepWatch:
    """Hooks everything; from here on the journal is told of every step, and of one in `sample_every` closely."""
    watch, guard = StepWatch(journal), Guard(journal, "steps")
    unscaled = _watch_scalers()
    replicas, apart = ReplicaWatch(journal, watch), Guard(journal, "replicas")
    _watch_forwards(watch, guard, replicas, apart)
    _watch_backward(watch, guard, unscaled)
    _watch_loaders(watch, guard)
    _watch_copies(watch, guard)
    _watch_optimizers(watch, guard, replicas, apart)
    _watch_metrics(watch, journal)
    if traffic := Guard(journal, "traffic")(TrafficWatch, journal):
        register_optimizer_step_post_hook(lambda *_: traffic.step_ends(watch.finished, watch.evaluations))
    watch.sampler = Guard(journal, "sampler")(StepSampler, journal, run, watch.memory, traffic, sample_every)
    seen = (journal, lambda: watch.finished, lambda: watch.between)
    watch.observations = Guard(journal, "observations")(Observations, *seen)
    return watch


def keep_tensors(watch: StepWatch, journal: Journal, run: str, rank: int) -> TensorWatch:
    """Has the gradients written before the first step of any optimizer, and the parameters when the group ends."""
    tensors = TensorWatch(run, rank, journal, lambda: watch.models)
    register_optimizer_step_pre_hook(lambda *_: tensors.optimizer_begins())
    return tensors


def _watch_forwards(watch: StepWatch, guard: Guard, replicas: ReplicaWatch, apart: Guard) -> None:
    mine, here, compiling = threading.get_ident(), threading.get_ident, torch.compiler.is_compiling
    depth, token = 0, None

    def before(module: torch.nn.Module, args: Any) -> None:
        nonlocal depth, token
        if compiling():
            return
        if here() != mine:
            apart(replicas.forward_begins)
            return
        depth += 1
        if depth == 1:
            token = guard(watch.forward_begins, module)

    def after(module: torch.nn.Module, args: Any, *rest: Any) -> None:
        nonlocal depth
        if compiling():
            return
        if here() != mine:
            apart(replicas.forward_ends, module, args, rest[-1])
            return
        depth -= depth > 0
        if depth == 0:
            guard(watch.forward_ends, token, module, (args, *rest[:-1]))  # rest is (kwargs, result), or (result,) where forward raised

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after, with_kwargs=True, always_call=True)
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")


def _watch_backward(watch: StepWatch, guard: Guard, unscaled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mine, original = threading.get_ident(), torch.autograd.backward

    def begin(tensors: Any) -> int:
        root = _scalar(tensors)
        if root is None:
            return watch.backward_begins(None)
        loss, made_by = unscaled(root), root.grad_fn
        if loss is not root and made_by is not None:
            made_by = made_by.next_functions[0][0]  # before the scaler
        return watch.backward_begins(loss, made_by)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != mine:
            return original(*args, **kwargs)
        depth = guard(begin, args[0] if args else kwargs.get("tensors"))
        try:
            return original(*args, **kwargs)
        finally:
            guard(watch.leave, depth)

    torch.autograd.backward = backward


def _scalar(tensors: Any) -> torch.Tensor | None:
    """The one scalar that backward is called on; None where it is called on anything else."""
    if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
        tensors = tensors[0]
    return tensors if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 else None


def _watch_scalers() -> Callable[[torch.Tensor], torch.Tensor]:
    """Remembers what a gradient scaler was given; the result gives the loss for the scaled loss, and any other tensor back."""
    last: tuple[Any, Any] = (lambda: None, None)
    watched: set[type] = set()

    def watch(scaler: type) -> None:
        original = scaler.__dict__.get("scale")
        if original is None or scaler in watched:
            return
        watched.add(scaler)

        @functools.wraps(original)
        def scale(self: Any, outputs: Any) -> Any:
            nonlocal last
            scaled = original(self, outputs)
            if isinstance(scaled, torch.Tensor):
                last = weakref.ref(scaled), outputs.detach()
            return scaled

        scaler.scale = scale

    begin = torch.amp.GradScaler.__init__

    @functools.wraps(begin)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for parent in type(self).__mro__:
            watch(parent)

    torch.amp.GradScaler.__init__ = init
    return lambda tensor: last[1] if last[0]() is tensor else tensor


def _watch_loaders(watch: StepWatch, guard: Guard) -> None:
    mine, iterate, advance = threading.get_ident(), DataLoader.__iter__, _BaseDataLoaderIter.__next__

    def timed(original: Callable[[Any], Any], batch_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def call(self: Any) -> Any:
            if threading.get_ident() != mine:
                return original(self)
            depth, given = guard(watch.data_begins), None
            try:
                given = original(self)
                return given
            finally:
                guard(watch.data_ends, depth, batch_of(given))

        return call

    DataLoader.__iter__ = timed(iterate, lambda iterator: ())
    _BaseDataLoaderIter.__next__ = timed(advance, lambda batch: batch)


def _watch_copies(watch: StepWatch, guard: Guard) -> None:
    """A batch's way to the GPU: what is moved there between the phases of a step."""
    mine = threading.get_ident()

    def timed(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            moves = watch.between and tensor.device.type == "cpu" and torch.cuda.is_initialized() and threading.get_ident() == mine
            depth = guard(watch.enter, "copy") if moves else None
            try:
                return original(tensor, *args, **kwargs)
            finally:
                if moves:
                    guard(watch.leave, depth)

        return move

    torch.Tensor.to, torch.Tensor.cuda = timed(torch.Tensor.to), timed(torch.Tensor.cuda)


def _watch_optimizers(watch: StepWatch, guard: Guard, replicas: ReplicaWatch, apart: Guard) -> None:
    mine = threading.get_ident()

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == mine:
            guard(watch.optimizer_begins, optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == mine:
            guard(watch.optimizer_ends, optimizer)
            apart(replicas.step_ends, optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _watch_metrics(watch: StepWatch, journal: Journal) -> None:
    guard, names = Guard(journal, "metrics"), {}

    def told(event: Any) -> None:
        if event.name == REPORT:
            journal.write("report", values=json.loads(event.data["values"]))
            return
        if event.name == "resume":
            watch.finished = int(event.data["step"])  # the steps go on where the checkpoint was written
        if event.name == "checkpoint":
            journal.write("checkpoint", step=event.data["checkpoint"])
        for key, value in event.data.items():
            name = key if names.setdefault(key, event.name) == event.name else f"{event.name}.{key}"
            journal.write("metric", name=name, value=value, step=watch.finished)

    handle = torch.monitor.register_event_handler(lambda event: guard(told, event))
    atexit.register(torch.monitor.unregister_event_handler, handle)  # torch would let go of it after the interpreter is gone, and crash
