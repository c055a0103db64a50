"""Installs torch's global hooks and forwards their calls to the parts of the probe.

Only the thread that runs the script has steps and phases (`threads.py` selects it). A forward that autograd's threads
recompute, or that a replica computes in another thread (measured in `replicas.py`), is part of the phase in which the
script's thread waits. The pair of hooks costs 2 to 3 µs per nested module, mostly in torch itself. Code that
torch.compile traces sees hooks that do nothing (`untraced.py`); a model compiled in place (`model.compile()`) therefore
has no forward phase, and its time is in "other".
"""

from __future__ import annotations

import atexit
import json
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from labkit.probe.backward import watch_backward
from labkit.probe.journal import Guard, Journal
from labkit.probe.looks import Looks
from labkit.probe.patches import Patches
from labkit.probe.replicas import ReplicaWatch
from labkit.probe.sampler import StepSampler
from labkit.probe.samples import Observations, Shape, shapes_in
from labkit.probe.startup import Startup
from labkit.probe.steps import StepWatch
from labkit.probe.tensors import TensorWatch
from labkit.probe.threads import is_foreign, watch_processes
from labkit.probe.torch_private import NEXT_BATCH, TENSOR_VERSION
from labkit.probe.traffic import GroupWatch, TrafficWatch
from labkit.probe.untraced import compiling, skip_frames
from labkit.record.writer import REPORT


def install(journal: Journal, patches: Patches, run: str, sample_every: int) -> StepWatch:
    """Installs all hooks; from here on every step is recorded, and every `sample_every`th step is profiled. They are
    removed at exit.
    """
    atexit.register(patches.remove)
    guard = Guard(journal, "steps")
    watch = watch_steps(journal, patches, guard)
    watch_processes(journal, patches)
    _watch_copies(patches, watch, guard)
    _watch_metrics(patches, watch, journal)
    _watch_builds(patches, watch, guard)
    watch.groups = GroupWatch(patches)
    watch.groups.before_end(watch.recorder.store_newest)
    if traffic := Guard(journal, "traffic")(TrafficWatch, journal, patches, watch.recorder):
        watch.after_step.append(lambda: traffic.step_ends(watch.finished, watch.evaluations))
    messages = (lambda: traffic.messages) if traffic else int
    watch.looks = Guard(journal, "looks")(Looks, journal, patches, watch.recorder, watch, messages)
    if looks := watch.looks:
        watch.after_step.append(lambda: looks.step_ends(watch.finished))
        watch.groups.before_end(looks.ends)
    watch.sampler = Guard(journal, "timelines")(StepSampler, journal, patches, run, watch.memory, traffic, sample_every)
    seen = (
        journal,
        patches,
        lambda: watch.finished,
        lambda: watch.between and watch.thread.here(),
        lambda: watch.models,
    )
    watch.startup = Guard(journal, "startup")(Startup, journal, patches)
    watch.observations = Guard(journal, "observations")(Observations, *seen)
    Guard(journal, "compiled code")(skip_frames)
    return watch


def watch_steps(journal: Journal, patches: Patches, guard: Guard) -> StepWatch:
    """Installs the hooks that define steps and their phases, and nothing else."""
    watch = StepWatch(journal)
    replicas, apart = ReplicaWatch(journal, watch), Guard(journal, "replicas")
    forwards: Forwards = {}
    look = watch_backward(patches, watch, guard, _taking_over(watch, guard, replicas, journal, forwards))
    _watch_forwards(patches, watch, guard, replicas, apart, forwards, look)
    watch.optimizers.follow(patches)
    Guard(journal, TENSOR_VERSION.part)(TENSOR_VERSION.get)
    _watch_loaders(patches, watch, guard)
    _watch_optimizers(patches, watch, guard, replicas, apart)
    return watch


def keep_tensors(watch: StepWatch, journal: Journal, patches: Patches, run: str, rank: int) -> TensorWatch:
    """Writes the gradients before the first step of any optimizer, and the parameters when the process group is
    destroyed.
    """
    tensors = TensorWatch(run, rank, journal, watch.groups, lambda: watch.models)

    def before(*_: Any) -> None:
        if not compiling() and not watch.creating_state:
            tensors.optimizer_begins()

    patches.hook("tensors", "torch.optim.optimizer.register_optimizer_step_pre_hook", before)
    return tensors


Forwards = dict[threading.Thread, list[tuple[weakref.ref[torch.nn.Module], list[Shape]]]]


def _watch_forwards(
    patches: Patches,
    watch: StepWatch,
    guard: Guard,
    replicas: ReplicaWatch,
    apart: Guard,
    others: Forwards,
    look: Callable[[], None],
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
            look()
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
            guard(watch.forward_ends, token, module, (args, *rest[:-1]), rest[-1], len(rest) == 1)

    of_modules = "torch.nn.modules.module.register_module_forward"
    patches.hook("steps", f"{of_modules}_pre_hook", before)
    patches.hook("steps", f"{of_modules}_hook", after, with_kwargs=True, always_call=True)
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


def _watch_loaders(patches: Patches, watch: StepWatch, guard: Guard) -> None:
    thread = watch.thread

    def timed(batch_of: Callable[[Any], Any], original: Callable[[Any], Any]) -> Callable[[Any], Any]:
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

    patches.wrap("data loading", "torch.utils.data.DataLoader.__iter__", partial(timed, lambda iterator: ()))
    patches.wrap("data loading", NEXT_BATCH.name, partial(timed, fetched))


def _watch_copies(patches: Patches, watch: StepWatch, guard: Guard) -> None:
    """Copies of a batch to the GPU: tensors that are moved there between the phases of a step."""
    thread = watch.thread

    def timed(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
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

    for name in ("to", "cuda"):
        patches.wrap("copies to the GPU", f"torch.Tensor.{name}", timed)


def _watch_optimizers(patches: Patches, watch: StepWatch, guard: Guard, replicas: ReplicaWatch, apart: Guard) -> None:
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

    patches.hook("steps", "torch.optim.optimizer.register_optimizer_step_pre_hook", before)
    patches.hook("steps", "torch.optim.optimizer.register_optimizer_step_post_hook", after)


def _watch_metrics(patches: Patches, watch: StepWatch, journal: Journal) -> None:
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

    # removed at exit: else torch would release it after interpreter shutdown, and crash
    patches.hook(
        "metrics",
        "torch.monitor.register_event_handler",
        lambda event: guard(receive, event),
        undo="torch.monitor.unregister_event_handler",
    )


def _watch_builds(patches: Patches, watch: StepWatch, guard: Guard) -> None:
    """C++ extensions that torch compiles on first use, such as DeepSpeed's operators; torch locks their build
    folder."""

    def begins(baton: Any) -> None:
        guard(watch.build_begins, Path(baton.lock_file_path).parent.name)

    def acquiring(acquire: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def try_acquire(baton: Any) -> Any:
            acquired = acquire(baton)
            if acquired:
                begins(baton)
            return acquired

        return try_acquire

    def waiting(wait: Callable[[Any], None]) -> Callable[[Any], None]:
        def wait_for_build(baton: Any) -> None:
            begins(baton)
            try:
                wait(baton)
            finally:
                guard(watch.build_ends)

        return wait_for_build

    def releasing(release: Callable[[Any], None]) -> Callable[[Any], None]:
        def release_build(baton: Any) -> None:
            release(baton)
            guard(watch.build_ends)

        return release_build

    for name, make in (("try_acquire", acquiring), ("wait", waiting), ("release", releasing)):
        patches.wrap("builds", f"torch.utils.file_baton.FileBaton.{name}", make)
