"""Turns the hooks' calls into steps and phases, times them, and writes each once the device has finished it."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from labkit.probe.clocks import CpuClock, CudaClock, clock_for, computes_on, likely_device
from labkit.probe.hosts import exchange
from labkit.probe.journal import Guard, Journal
from labkit.probe.looks import Looks
from labkit.probe.memory import MemoryWatch, local
from labkit.probe.optimizers import (
    Edge,
    InsideBackward,
    Loss,
    LossWatch,
    Optimizers,
    Pace,
    Share,
    UpdateWatch,
    share_of,
)
from labkit.probe.patches import Patches
from labkit.probe.sampler import StepSampler
from labkit.probe.samples import Observations, SampleCount, Shape, packed, shapes_in
from labkit.probe.threads import ScriptThread
from labkit.probe.traffic import FlightRecorder, GroupWatch, TrafficWatch
from labkit.record import clock
from labkit.record.writer import PHASES, STARTUP

# ---- milestones of a rank before its first step: `startup` events, each at most once per process, and so once per
# attempt
#
# ======= =====================================================================================
# name    written when
# ======= =====================================================================================
# group   `init_process_group` has returned for the first time
# data    a DataLoader is created for the first time, so its data set is ready
# batch   a loader returned its first batch, or a model is called in training before that
# ======= =====================================================================================
#
# Milestones that a script never reaches are not written, for example `group` without a process group or `data` without
# a loader.


class Startup:
    """Writes each milestone once; later calls cost one lookup in a small set."""

    def __init__(self, journal: Journal, patches: Patches):
        self._journal, self._guard = journal, Guard(journal, "startup")
        self._hosts = Guard(journal, "hosts")
        self._awaited = set(STARTUP)
        if torch.distributed.is_available():
            patches.wrap("startup", "torch.distributed.init_process_group", self._forming)
        patches.wrap("startup", "torch.utils.data.DataLoader.__init__", self._loading)

    def reached(self, name: str) -> None:
        """The rank has reached `name`, one of `events.STARTUP`."""
        if name in self._awaited:
            self._awaited.discard(name)
            self._journal.write("startup", name=name)

    def _forming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            given = original(*args, **kwargs)
            first = "group" in self._awaited
            self._guard(self.reached, "group")
            if first:
                self._hosts(exchange, self._journal)  # its NodesDiffer, a SystemExit, ends the script
            return given

        return init_process_group

    def _loading(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            self._guard(self.reached, "data")

        return init


# ---- steps whose work was submitted to the device, until their times and losses are known


_TOGETHER = 1000  # maximum number of losses in one event
_OFTEN = 1.0  # seconds between two such events


@dataclass
class Step:
    """A submitted step; `marks` are the times at which the phases `names` began, and the end of the step."""

    number: int
    t: float
    clock: CpuClock | CudaClock
    marks: list[Any]
    names: list[str]
    losses: list[Loss]
    samples: int
    memory: dict[str, int | None] | None

    def known(self) -> bool:
        """Whether the device has finished it, and its losses have arrived."""
        return self.clock.passed(self.marks[-1]) and all(self.clock.copied(loss.copy) for loss in self.losses)

    def fields(self, watch: LossWatch) -> dict[str, Any]:
        """The fields of its event; returns its marks and losses to their pools."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, start, end in zip(self.names, self.marks, self.marks[1:]):
            seconds[name] += self.clock.seconds(start, end)
        losses = [self.clock.value(loss.copy) for loss in self.losses]
        self.clock.release(self.marks[:-1])  # its end is the start of the next step
        return {
            "t": self.t,
            "step": self.number,
            "loss": watch.value(self.losses, losses),
            "samples": self.samples,
            "seconds": {"step": sum(seconds.values())} | seconds,
            "memory": self.memory,
        }


@dataclass
class OtherLoss:
    """The loss of a step of another optimizer than the pacing one, at the run's step `number`."""

    number: int
    clock: CpuClock | CudaClock
    optimizer: int
    losses: list[Loss]

    def known(self) -> bool:
        return all(self.clock.copied(loss.copy) for loss in self.losses)

    def value(self, watch: LossWatch) -> float | None:
        """The loss; returns its copies to their pool."""
        return watch.value(self.losses, [self.clock.value(loss.copy) for loss in self.losses])


class Pending:
    """Writes events in the order in which they are added; `write` takes a kind and fields, as in `Journal`.

    Losses of other optimizers than the pacing one are batched, at most once per second, because they would double the
    size of a run.
    """

    def __init__(self, write: Callable[..., None], losses: LossWatch):
        self._write, self._losses = write, losses
        self._queue: deque[Step | OtherLoss] = deque()
        self._others: dict[int, list[tuple[int, float | None]]] = {}  # by optimizer: step and loss
        self._due = 0.0

    def add(self, event: Step | OtherLoss) -> None:
        """Queues an event, which a later `drain` writes."""
        self._queue.append(event)

    def drain(self, seconds: float) -> None:
        """Writes known events in order; waits up to `seconds` for the others."""
        end = time.monotonic() + seconds
        while self._queue:
            if self._queue[0].known():
                self._take(self._queue.popleft())
            elif time.monotonic() < end:
                time.sleep(0.001)
            else:
                return

    def _take(self, event: Step | OtherLoss) -> None:
        if isinstance(event, Step):
            self._write("step", **event.fields(self._losses))
            return
        points = self._others.setdefault(event.optimizer, [])
        points.append((event.number, event.value(self._losses)))
        if time.monotonic() >= self._due or len(points) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        for optimizer, points in self._others.items():
            self._write("losses", optimizer=optimizer, points=points)
        self._others = {}
        self._due = time.monotonic() + _OFTEN


# ---- turns the hooks' calls into steps and phases


OTHER = "other"  # the phase of a step outside of all others


class StepWatch:
    """The activity of one rank (training, evaluating, compiling an extension), the phases of its current step, and the
    end of each, reported by hooks in the script's thread; writes `step`, `losses`, `optimizer`, `memory`, `activity`,
    `device`, and calls `after_step` after each step.
    """

    def __init__(self, journal: Journal):
        self._journal = journal
        # the activity, and the marks of the current step
        self.progress = time.monotonic()  # the time of the last report
        self._clock: CpuClock | CudaClock | None = None
        self.activity: str | None = None  # such as training or evaluating; None before either
        self._before_build: tuple[str | None] | None = None
        self._stack: list[str] = []
        self._marks: list[Any] = []
        self._names: list[str] = []
        # finished steps
        self.finished = 0
        self.memory = MemoryWatch(journal)
        self.sampler: StepSampler | None = None
        self.after_step: list[Callable[[], None]] = []
        self.optimizers = Optimizers()
        self._sample, self._look = Guard(journal, "timelines"), Guard(journal, "memory")
        self._pace = Pace()
        self._losses = LossWatch(self.optimizers, journal.write)
        self._pending = Pending(journal.write, self._losses)
        self._samples = SampleCount()
        # what the hooks have seen
        self.evaluations = 0
        self.recorder = FlightRecorder(journal)
        self.groups: GroupWatch | None = None
        self.observations: Observations | None = None
        self.startup: Startup | None = None
        self.looks: Looks | None = None
        self.traffic: TrafficWatch | None = None
        self.idle = False  # whether the rank waits for a cell of a notebook
        self._see, self._share = Guard(journal, "observations"), Guard(journal, "loss shares")
        self._finite = True  # whether all known losses were finite
        # in the order in which they were first called, which is the same on all ranks
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        self.thread = ScriptThread()
        self.backwards = 0
        self.scaler_steps = 0  # calls of a GradScaler's step, which may skip the optimizer's
        self._updates = UpdateWatch(self.optimizers, Guard(journal, "compiled updates"))
        self._loss: Loss | None = None
        self._closure_ran = False
        self._inside = InsideBackward()
        self._stepping: list[torch.optim.Optimizer] = []
        self._creating: torch.optim.Optimizer | None = None
        self._restart()

    @property
    def phase(self) -> str:
        return self._stack[-1] if self._stack else OTHER

    @property
    def between(self) -> bool:
        """Whether the script is in a step but in no phase of it."""
        return bool(self._names) and not self._stack

    @property
    def in_backward(self) -> bool:
        """Whether backward runs in the followed thread."""
        return "backward" in self._stack

    @property
    def builds(self) -> bool:
        """Whether torch is compiling a C++ extension, which can take minutes."""
        return self._before_build is not None

    @property
    def creating_state(self) -> bool:
        """Whether an optimizer is stepping only to create its state."""
        return self._creating is not None

    @property
    def by_hand(self) -> bool:
        """Whether the script may update its parameters itself."""
        return self._updates.by_hand

    @property
    def models(self) -> list[torch.nn.Module]:
        return list(self._models)

    @property
    def memory_is_profiled(self) -> bool:
        """Whether every allocation of the current step is recorded."""
        return self.sampler is not None and self.sampler.profiles_memory

    # ---- phases and activity

    def enter(self, phase: str) -> int:
        """A phase begins; returns the depth to pass to `leave`."""
        self._stack.append(phase)
        self._mark(phase)
        return len(self._stack) - 1

    def leave(self, depth: int | None) -> None:
        """Ends the phase that began at this depth, and all phases inside it; None does nothing."""
        if depth is None or depth >= len(self._stack):
            return
        del self._stack[depth:]
        self._mark(self.phase)

    def build_begins(self, extension: str) -> None:
        """torch starts compiling a C++ extension, or waiting for another process that compiles it."""
        self._before_build = self._before_build or (self.activity,)
        self._do(f"building the C++ extension {extension} (first use only)")

    def build_ends(self) -> None:
        """The extension is compiled; restores the previous activity."""
        if self._before_build is not None:
            (before,), self._before_build = self._before_build, None
            self._do(before)

    def _do(self, activity: str | None) -> None:
        if activity != self.activity:
            self.activity = activity
            self._journal.write("activity", name=activity)

    def cell_begins(self) -> None:
        """A rank that stays runs a cell of a notebook."""
        self.progress, self.idle = time.monotonic(), False
        self._do("running a cell")

    def cell_ends(self) -> None:
        """It waits for the next one, which belongs to no step unless a step is under way."""
        self.progress, self.idle = time.monotonic(), True
        self._stack = []
        if not self._trained:
            self._restart()
        self._do("waiting for a cell")

    def _mark(self, phase: str) -> None:
        self.progress = time.monotonic()
        if not self._names and phase == OTHER:
            return  # no step has started
        if self._names and self._names[-1] == phase:
            return
        if self._clock is None:
            self.use(clock_for(likely_device()))
        mark = self._clock.mark()
        if mark is not None:
            self._marks.append(mark)
            self._names.append(phase)

    def use(self, clock: CpuClock | CudaClock) -> None:
        self._clock = clock
        self._marks, self._names = [], []  # marks of the previous clock cannot be compared
        self._journal.write("device", device=str(clock.device), device_name=clock.device_name)
        self._losses.forget()

    # ---- beginning again

    def _restart(self, mark: Any = None) -> None:
        """Discards the current marks; the next step begins at `mark`, or with the next phase if that is None."""
        if self._clock is not None:
            self._clock.release(self._marks[1:] if mark is None else ())
        self._marks, self._names = ([], []) if mark is None else ([mark], [self.phase])
        self._samples.restart()
        self._trained = self._unsure = self._learned = False

    def resumes(self, step: int) -> None:
        """The script resumes from a checkpoint of this step; skipped batches belong to no step."""
        self.finished = step
        self._samples.forget()
        self._restart()

    def _evaluates(self) -> None:
        self.evaluations += 1
        if self.sampler:
            self._sample(self.sampler.give_up)
        self._do("evaluating")
        self._samples.forget()
        self._restart()

    # ---- calls of the hooks

    def moves(self, forwards: list[tuple[torch.nn.Module, list[Shape]]]) -> None:
        """Another thread is followed from now on; `forwards` are its model calls since its step began."""
        self._stack, self._stepping = [], []
        self._samples.forget()
        self._restart()
        for model, shapes in forwards:
            if model not in self._models:
                self._add_model(model)
            self._samples.called(id(model), shapes)

    def data_begins(self) -> int:
        """The script requests a batch, or an iterator of a loader."""
        self._look_for_update("optimizer")
        if self._unsure:
            self._evaluates()
        if self.looks:
            self.looks.samples_are_there()
        return self.enter("data")

    def data_ends(self, depth: int | None, batch: Any) -> None:
        """The request has returned; `batch` is None if there was none. A step does not begin with the end of an
        evaluation's batches.
        """
        self.leave(depth)
        if batch is None and not self._samples.has_batch and self._names[:1] == ["data"]:
            self._restart()
        if self.looks and batch == ():
            self.looks.order_begins()
        if "data" not in self._stack:
            self._samples.fetched(batch)
            self.memory.fetched(batch)
            if self.looks and batch is not None and batch != ():
                self.looks.batch_is_there()
            if self.observations and batch is not None:
                self._see(self.observations.batch, batch)

    def forward_begins(self, model: torch.nn.Module) -> int | None:
        """An outermost module is called."""
        self.progress = time.monotonic()
        if "backward" in self._stack:
            return None
        self._look_for_update("optimizer")
        if not torch.is_grad_enabled():
            if not model.training and self._knows(model):
                self._evaluates()
                return None
            self._unsure = not self._trained
            return self.enter("forward")
        self._do("training")
        if self.startup:
            self.startup.reached("batch")
        self._unsure, self._trained = False, True
        if model not in self._models:
            self._add_model(model)
        if self.looks:
            self.looks.forward_begins()
        return self.enter("forward")

    def forward_ends(
        self, depth: int | None, model: torch.nn.Module, inputs: Any, output: Any, raised: bool = False
    ) -> None:
        """The outermost module has returned or raised."""
        self.leave(depth)
        if depth is None or not torch.is_grad_enabled():
            return
        if raised:
            self._samples.raised(shapes_in(inputs))
        elif not self._closure_ran:
            counts = self._samples.called(id(model), shapes_in(inputs), packed(inputs, output))
            if counts and self.observations:
                self._see(self.observations.input, inputs)

    def backward_begins(self, root: torch.Tensor | None, made_by: Edge | None = None) -> int:
        """Backward is called; `root` is the scalar that it starts from, if it is one, and `made_by` the operation that
        computed it.
        """
        if "backward" in self._stack:
            return self.enter("backward")
        self._look_for_update()
        if not self._stack and (owner := self._updates.backward_begins(root)) is not None:
            self._ends_unreported(owner)
        self._do("training")
        self._learned = True
        self.backwards += 1
        depth = self.enter("backward")
        self._loss = None
        if root is not None and not self._closure_ran:
            copy = self._clock.copy(local(root.detach()))
            self._loss = None if copy is None else Loss(copy, self._share(share_of, made_by) or Share())
        self._losses.backward_begins()
        if self.looks:
            self.looks.backward_begins(made_by)
        return depth

    def backward_ends(self, depth: int | None) -> None:
        """Backward has returned or raised."""
        self.leave(depth)
        if depth is None or "backward" in self._stack:
            return
        self._losses.backward_ends(self._loss)
        if self.looks:
            self.looks.backward_ends()
        if self._loss and ("optimizer" in self._stack or self.by_hand):
            self._look_for_divergence([self._loss])  # no optimizer step begins between this loss and the update
        if "optimizer" in self._stack:
            self._closure_ran = True
            return
        if self._inside.stepped:
            self._inside.stepped = False
            self._stepped(self._inside)
        self._updates.backward_ends()

    def _look_for_divergence(self, losses: list[Loss]) -> None:
        """Counts the non-finite parameters at the first non-finite loss, before a step uses it."""
        if self._finite and any(self._clock.not_finite(loss.copy) for loss in losses):
            self._finite = False
            if self.observations:
                self._see(self.observations.not_finite, self.finished + 1, list(self._models))

    def steps_inside_backward(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether an optimizer step begins while backward runs, in any thread, and records it."""
        if "backward" not in self._stack or "optimizer" in self._stack[: self._stack.index("backward")]:
            return False
        self._look(self.memory.add_optimizer, optimizer)
        self._updates.reported()
        self._inside.stepped = True
        self._inside.optimizers.add(optimizer)
        return True

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps; if it is already stepping, its previous step has raised."""
        if self._creating not in (None, optimizer):
            return  # an optimizer wrapped by the one that creates its state
        self._creating = optimizer if not self._stepping and self._creates_state(optimizer) else None
        if self._creating is not None:
            return
        self.steps_inside_backward(optimizer)
        if optimizer in self._stepping:
            self._stepping.clear()
            self.leave(self._stack.index("optimizer") if "optimizer" in self._stack else None)
        self._look(self.memory.add_optimizer, optimizer)
        self._look_for_divergence(self._losses.newest)
        if self.looks:
            self.looks.optimizer_begins(optimizer)
        self._stepping.append(optimizer)
        if len(self._stepping) == 1:
            self._closure_ran = False
            self.enter("optimizer")

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped; the outermost one ends the phase, the pacing one the step."""
        if self._creating is not None:
            if self._creating is optimizer:
                self._creating = None
            return
        while self._stepping and self._stepping.pop() is not optimizer:
            pass
        if self.looks:
            self.looks.optimizer_ends(optimizer)
        if self._stepping:
            return
        self._closure_ran = False
        self.leave(self._stack.index("optimizer") if "optimizer" in self._stack else None)
        if self._inside.stepped:
            return
        self._updates.reported()
        self._stepped(optimizer)

    def script_ends(self, seconds: float) -> None:
        """The script has ended: reports its last step and waits up to `seconds` for steps that are not known yet."""
        self._look_for_update("optimizer", script_ends=True)
        if self.looks:
            self.looks.ends()
        self.drain(seconds)
        self._pending.flush()

    # ---- updates that no hook reports

    def _look_for_update(self, phase: str = OTHER, script_ends: bool = False) -> None:
        """Ends the step if parameters were updated since the last backward; the time since then counts for `phase`."""
        if not self._stack and (owner := self._updates.found(script_ends)) is not None:
            if self._names[-1:] == [OTHER]:
                self._names[-1] = phase
            self._ends_unreported(owner)

    def _ends_unreported(self, owner: Any) -> None:
        if isinstance(owner, torch.optim.Optimizer):
            self._look(self.memory.add_optimizer, owner)
        self._stepped(owner)

    def _creates_state(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._learned and all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)

    def _knows(self, module: torch.nn.Module) -> bool:
        return any(module is part for model in self._models for part in model.modules())

    def _add_model(self, model: torch.nn.Module) -> None:
        self._models[model] = None
        if self.observations:
            self._see(self.observations.model, model)
        parameter = next(model.parameters(), None)
        if parameter is None:
            return
        device = computes_on(parameter)
        if self._clock is None or self._clock.device.type != ("cuda" if device.type == "cuda" else "cpu"):
            self.use(clock_for(device))
        self._look(self.memory.add_model, model, device)

    # ---- the end of a step

    def _stepped(self, optimizer: Any) -> None:
        """An optimizer, or an object that represents one, has stepped."""
        paces = self._pace.is_set_by(optimizer)
        losses = self._losses.of(optimizer, paces)
        if paces:
            self._finish(losses)
        elif losses:
            number = self._losses.number(optimizer, False)
            self._losses.number(self._pace.maker(), True)
            self._pending.add(OtherLoss(max(1, self.finished), self._clock, number, losses))
            self.drain()

    def _finish(self, losses: list[Loss]) -> None:
        mark = self._clock.mark() if self._names else None
        if mark is None:
            return
        self.finished += 1
        samples = self._samples.take()
        memory = self._look(self.memory.at_step, self.finished)
        marks = [*self._marks, mark]
        self._pending.add(Step(self.finished, clock.now(), self._clock, marks, self._names, losses, samples, memory))
        sampled = self.sampler and self._sample(
            self.sampler.step_ends, self.finished, list(zip(self._names, marks, marks[1:])), self._clock
        )
        if sampled or self.memory.walked:
            mark = self._clock.mark()  # the time of profiling and the walk is not part of the next step
        self._restart(mark)
        for call in self.after_step:
            call()
        self.drain()

    def drain(self, seconds: float = 0.0) -> None:
        """Writes known steps in order; waits up to `seconds` for the others."""
        self._pending.drain(seconds)
