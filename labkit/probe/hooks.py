"""Installs torch's global hooks and forwards their calls to the parts of the probe.

Only the thread that runs the script has steps and phases (`threads.py` selects it). A forward that autograd's threads
recompute, or that a replica computes in another thread (measured in `replicas.py`), is part of the phase in which the
script's thread waits. The pair of hooks costs 2 to 3 µs per nested module, mostly in torch itself. Code that
torch.compile traces sees hooks that do nothing (`untraced.py`); a model compiled in place (`model.compile()`) therefore
has no forward phase, and its time is in "other".
"""

from __future__ import annotations

import atexit
import functools
import json
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.file_baton import FileBaton

from labkit.probe.backward import ScalerWatch, watch_backward
from labkit.probe.elsewhere import watch_processes
from labkit.probe.journal import Guard, Journal
from labkit.probe.observations import Observations
from labkit.probe.replicas import ReplicaWatch
from labkit.probe.sampler import StepSampler
from labkit.probe.samples import Shape, shapes_in
from labkit.probe.startup import Startup
from labkit.probe.steps import StepWatch
from labkit.probe.tensors import TensorWatch
from labkit.probe.threads import is_foreign
from labkit.probe.traffic import TrafficWatch
from labkit.probe.untraced import compiling, skip_frames
from labkit.record.events import REPORT


def install(journal: Journal, run: str, sample_every: int) -> StepWatch:
    """Installs all hooks; from here on every step is recorded, and every `sample_every`th step is profiled."""
    watch, guard = StepWatch(journal), Guard(journal, "steps")
    scalers = ScalerWatch()
    replicas, apart = ReplicaWatch(journal, watch), Guard(journal, "replicas")
    forwards: Forwards = {}
    _watch_forwards(watch, guard, replicas, apart, forwards, scalers)
    watch_backward(watch, guard, scalers, _taking_over(watch, guard, replicas, journal, forwards))
    watch.optimizers.follow()
    watch_processes(journal)
    _watch_loaders(watch, guard)
    _watch_copies(watch, guard)
    _watch_optimizers(watch, guard, replicas, apart)
    _watch_metrics(watch, journal)
    _watch_builds(watch, guard)
    if traffic := Guard(journal, "traffic")(TrafficWatch, journal):
        watch.after_step.append(lambda: traffic.step_ends(watch.finished, watch.evaluations))
    watch.sampler = Guard(journal, "sampler")(StepSampler, journal, run, watch.memory, traffic, sample_every)
    seen = (journal, lambda: watch.finished, lambda: watch.between and watch.thread.here())
    watch.startup = Guard(journal, "startup")(Startup, journal)
    watch.observations = Guard(journal, "observations")(Observations, *seen)
    skip_frames()
    return watch


def keep_tensors(watch: StepWatch, journal: Journal, run: str, rank: int) -> TensorWatch:
    """Writes the gradients before the first step of any optimizer, and the parameters when the process group is
    destroyed.
    """
    tensors = TensorWatch(run, rank, journal, lambda: watch.models)

    def before(*_: Any) -> None:
        if not compiling() and not watch.creating_state:
            tensors.optimizer_begins()

    register_optimizer_step_pre_hook(before)
    return tensors


Forwards = dict[threading.Thread, list[tuple[weakref.ref[torch.nn.Module], list[Shape]]]]


def _watch_forwards(
    watch: StepWatch, guard: Guard, replicas: ReplicaWatch, apart: Guard, others: Forwards, scalers: ScalerWatch
) -> None:
    thread = watch.thread
    depth, token = 0, None

    def before(module: torch.nn.Module, args: Any) -> None:
        nonlocal depth, token
        if compiling():
            return
        if not thread.here():
            apart(replicas.forward_begins)
            return
        depth += 1
        if depth == 1:
            scalers.look()
            token = guard(watch.forward_begins, module)

    def after(module: torch.nn.Module, args: Any, *rest: Any) -> None:
        nonlocal depth
        if compiling():
            return
        if not thread.here():
            if apart(replicas.forward_ends, module, args, rest[-1]) and thread.may_move:
                called = others.setdefault(threading.current_thread(), [])
                called.append((weakref.ref(module), shapes_in((args, *rest[:-1]))))
            return
        depth -= depth > 0
        if depth == 0:  # rest is (kwargs, result), or (result,) if forward raised
            guard(watch.forward_ends, token, module, (args, *rest[:-1]), len(rest) == 1)

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after, with_kwargs=True, always_call=True)
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")


def _taking_over(
    watch: StepWatch, guard: Guard, replicas: ReplicaWatch, journal: Journal, forwards: Forwards
) -> Callable[[bool], bool]:
    """Returns a function that tells whether the calling thread, which is about to run backward, is the followed thread.

    Its argument is whether backward starts from given gradients. If so, and another thread runs it during the followed
    thread's backward, it is a replica's part of that backward and not a separate training loop.
    """
    thread = watch.thread

    def follows(given_gradients: bool) -> bool:
        if thread.here():
            thread.trains = True
        elif is_foreign() or (given_gradients and watch.in_backward):
            return False
        elif thread.takes_over():
            replicas.forget()
            called = forwards.get(threading.current_thread(), ())
            guard(watch.moves, [(model, shapes) for ref, shapes in called if (model := ref()) is not None])
        else:
            return False
        forwards.clear()
        return True

    def trains_for_itself(name: str) -> None:
        replicas.forget()
        journal.write("saw", what="thread", name=name)

    thread.on_other = trains_for_itself
    return follows


def _watch_loaders(watch: StepWatch, guard: Guard) -> None:
    thread, iterate, advance = watch.thread, DataLoader.__iter__, _BaseDataLoaderIter.__next__

    def timed(original: Callable[[Any], Any], batch_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def call(self: Any) -> Any:
            if compiling() or not thread.here():
                return original(self)
            depth, given = guard(watch.data_begins), None
            try:
                given = original(self)
                return given
            finally:
                guard(watch.data_ends, depth, batch_of(given))

        return call

    def fetched(batch: Any) -> Any:
        if batch is not None and watch.startup:
            watch.startup.reached("batch")
        return batch

    DataLoader.__iter__ = timed(iterate, lambda iterator: ())
    _BaseDataLoaderIter.__next__ = timed(advance, fetched)


def _watch_copies(watch: StepWatch, guard: Guard) -> None:
    """Copies of a batch to the GPU: tensors that are moved there between the phases of a step."""
    thread = watch.thread

    def timed(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if compiling():
                return original(tensor, *args, **kwargs)
            moves = watch.between and tensor.device.type == "cpu" and torch.cuda.is_initialized() and thread.here()
            depth = guard(watch.enter, "copy") if moves else None
            try:
                return original(tensor, *args, **kwargs)
            finally:
                if moves:
                    guard(watch.leave, depth)

        return move

    torch.Tensor.to, torch.Tensor.cuda = timed(torch.Tensor.to), timed(torch.Tensor.cuda)


def _watch_optimizers(watch: StepWatch, guard: Guard, replicas: ReplicaWatch, apart: Guard) -> None:
    thread = watch.thread

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if compiling():
            return
        if thread.here():
            guard(watch.optimizer_begins, optimizer)
        elif is_foreign():
            guard(watch.steps_inside_backward, optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not compiling() and thread.here():
            guard(watch.optimizer_ends, optimizer)
            apart(replicas.step_ends, optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _watch_metrics(watch: StepWatch, journal: Journal) -> None:
    guard, names = Guard(journal, "metrics"), {}

    def receive(event: Any) -> None:
        if event.name == REPORT:
            journal.write("report", values=json.loads(event.data["values"]))
            return
        if event.name == "resume":
            watch.resumes(int(event.data["step"]))
        if event.name == "checkpoint":
            journal.write("checkpoint", step=event.data["checkpoint"])
        for key, value in event.data.items():
            name = key if names.setdefault(key, event.name) == event.name else f"{event.name}.{key}"
            journal.write("metric", name=name, value=value, step=watch.finished)

    handle = torch.monitor.register_event_handler(lambda event: guard(receive, event))
    # else torch would release it after interpreter shutdown, and crash
    atexit.register(torch.monitor.unregister_event_handler, handle)


def _watch_builds(watch: StepWatch, guard: Guard) -> None:
    """C++ extensions that torch compiles on first use, such as DeepSpeed's operators; torch locks their build
    folder."""
    acquire, wait, release = FileBaton.try_acquire, FileBaton.wait, FileBaton.release

    def begins(baton: Any) -> None:
        guard(watch.build_begins, Path(baton.lock_file_path).parent.name)

    @functools.wraps(acquire)
    def try_acquire(baton: Any) -> Any:
        acquired = acquire(baton)
        if acquired:
            begins(baton)
        return acquired

    @functools.wraps(wait)
    def wait_for_build(baton: Any) -> None:
        begins(baton)
        try:
            wait(baton)
        finally:
            guard(watch.build_ends)

    @functools.wraps(release)
    def release_build(baton: Any) -> None:
        release(baton)
        guard(watch.build_ends)

    FileBaton.try_acquire, FileBaton.wait, FileBaton.release = try_acquire, wait_for_build, release_build
