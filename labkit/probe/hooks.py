"""Installs torch's global hooks and forwards their calls to the parts of the probe.

Only the thread that runs the script has steps and phases (`threads.py` selects it). A forward that autograd's threads
recompute, or that a replica computes in another thread (measured there, too), is part of the phase in which the
script's thread waits. The pair of hooks costs 2 to 3 µs per nested module, mostly in torch itself. Code that
torch.compile traces sees hooks that do nothing (`journal.py`); a model compiled in place (`model.compile()`) therefore
has no forward phase, and its time is in "other".
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from labkit.probe.journal import Guard, Journal, compiling, skip_frames
from labkit.probe.looks import Looks
from labkit.probe.optimizers import edge_before, edge_of
from labkit.probe.patches import Patches
from labkit.probe.sampler import StepSampler
from labkit.probe.samples import Observations, Shape, shapes_in
from labkit.probe.steps import Startup, StepWatch
from labkit.probe.tensors import TensorWatch
from labkit.probe.threads import ReplicaWatch, is_foreign, watch_processes
from labkit.probe.torch_private import NEXT_BATCH, TENSOR_VERSION
from labkit.probe.traffic import GroupWatch, TrafficWatch
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
    watch.traffic = traffic
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


# ---- hooks calls of backward and finds the losses they start from
#
# Zero-bubble schedules of pipelines compute the gradients of a stage's inputs and those of its weights separately, with
# `torch.autograd.grad`: both are a backward, and the first one starts from the loss in the last stage.


_DEEPSPEED = "deepspeed.runtime.fp16.loss_scaler"
_PIPELINING = "torch.distributed.pipelining"


def watch_backward(
    patches: Patches, watch: StepWatch, guard: Guard, follows: Callable[[bool], bool]
) -> Callable[[], None]:
    """Reports every backward in the followed thread; `follows` returns whether the caller is in that
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
        isinstance(value, torch.Tensor) and value.is_leaf
        for value in (inputs if isinstance(inputs, tuple) else (inputs,))
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
                    self._watch(kind, "unscale_", self._unscaling)

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

    def _unscaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(scaler: Any, optimizer: Any) -> Any:
            if self._steps.looks and not compiling() and scaler.is_enabled():
                self._steps.looks.unscales(optimizer)
            return original(scaler, optimizer)

        return unscale

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._steps.scaler_steps += 1
            return original(scaler, *args, **kwargs)

        return step
