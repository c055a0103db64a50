"""From what the hooks saw to steps and their phases.

A step ends where the pacemaker, the first optimizer that was seen, has stepped; so a script with two optimizers counts one step an
iteration. Its phases are a stack: the innermost has the time, so that a closure inside an optimizer, or a backward inside a pipeline
schedule, adds up, and the phases' sum is the step. What autograd computes again inside backward is backward.

A forward without gradients may be an evaluation or a part of training (a teacher's). It is an evaluation when a model that trains
runs in eval mode, or when another batch is fetched before anything was trained on. An evaluation belongs to no step: the step's clock
starts anew with the first phase after it.

The loss is what backward was called on in the step, as it was called. Of several, as gradient accumulation has them, it is the mean;
where a script divided each by their number, or gave each a weight, that is undone; sums that were divided by the number of all samples
are added up. In an optimizer's closure the first call counts.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch

from labkit.events import PHASES
from labkit.probe.clocks import CpuClock, CudaClock, clock_for, likely_device
from labkit.probe.journal import Guard, Journal
from labkit.probe.memory import MemoryWatch, local, tensors_in
from labkit.probe.observations import Observations
from labkit.probe.sampler import StepSampler

_PATIENCE = 20  # so many steps of another optimizer, and the pacemaker has none: it is replaced
_OTHER = "other"
_SUM = 2  # how a loss that is summed up, and not averaged, saves its reduction


@dataclass
class Step:
    """A step whose work was handed out; `marks` are the moments where its phases changed to `names`, and its end."""

    number: int
    t: float
    clock: CpuClock | CudaClock
    marks: list[Any]
    names: list[str]
    losses: list[Any]
    weight: float  # of all losses together
    samples: int
    memory: dict[str, int | None] | None

    def known(self) -> bool:
        """Whether the device has come by its end, and its losses have arrived."""
        return self.clock.passed(self.marks[-1]) and all(map(self.clock.copied, self.losses))

    def fields(self) -> dict[str, Any]:
        """The fields of its event; its marks and losses go back to their pools."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, start, end in zip(self.names, self.marks, self.marks[1:]):
            seconds[name] += self.clock.seconds(start, end)
        losses = [self.clock.value(copy) for copy in self.losses]
        self.clock.release(self.marks[:-1])  # its end is the beginning of the next
        total = sum(seconds.values())
        return {
            "t": self.t,
            "step": self.number,
            "loss": sum(losses) / self.weight if losses else None,
            "samples": self.samples,
            "seconds": {"step": round(total, 7)} | {name: round(value, 7) for name, value in seconds.items()},
            "memory": self.memory,
        }


class StepWatch:
    """What one rank does, told by hooks in the thread that runs the script; it writes `step`, `memory`, `activity`, `device`."""

    def __init__(self, journal: Journal):
        self.finished = self.evaluations = 0
        self.progress = time.monotonic()  # when anything was told last
        self.memory = MemoryWatch(journal.write)
        self.sampler: StepSampler | None = None
        self.observations: Observations | None = None
        self._sample, self._see = Guard(journal, "sampler"), Guard(journal, "observations")
        self._journal = journal
        self._look = Guard(journal, "memory")
        self._clock: CpuClock | CudaClock | None = None
        self._activity: str | None = None
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._pacemaker: Any = lambda: None
        self._strangers: Counter[int] = Counter()
        self._pending: deque[Step] = deque()
        self._stack: list[str] = []
        self._stepping: list[torch.optim.Optimizer] = []
        self._marks: list[Any] = []
        self._names: list[str] = []
        self._restart()

    @property
    def activity(self) -> str | None:
        """training or evaluating; None before either."""
        return self._activity

    @property
    def phase(self) -> str:
        """The innermost phase of this moment."""
        return self._now

    @property
    def between(self) -> bool:
        """Whether the script is in a step, and in no phase of it."""
        return bool(self._names) and not self._stack

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models that trained and are still alive."""
        return list(self._models)

    # ---- phases

    def enter(self, phase: str) -> int:
        """A phase begins; gives the depth to `leave` to."""
        self._stack.append(phase)
        self._mark(phase)
        return len(self._stack) - 1

    def leave(self, depth: int | None) -> None:
        """The phase that began at this depth ends, with whatever was left open inside it; None began nothing."""
        if depth is None or depth >= len(self._stack):
            return
        del self._stack[depth:]
        self._mark(self._now)

    @property
    def _now(self) -> str:
        return self._stack[-1] if self._stack else _OTHER

    def _mark(self, phase: str) -> None:
        self.progress = time.monotonic()
        if not self._names and phase == _OTHER:
            return  # no step has begun
        if self._names and self._names[-1] == phase:
            return
        if self._clock is None:
            self._use(clock_for(likely_device()))
        mark = self._clock.mark()
        if mark is not None:
            self._marks.append(mark)
            self._names.append(phase)

    def _use(self, clock: CpuClock | CudaClock) -> None:
        self._clock = clock
        self._marks, self._names, self._losses, self._weights = [], [], [], []  # what the other clock has marked cannot be compared
        self._journal.write("device", device=str(clock.device), device_name=clock.device_name)

    def _restart(self, mark: Any = None) -> None:
        """Forgets what no step will claim; the next step begins at `mark`, or else with the first phase to come."""
        if self._clock is not None:
            self._clock.release(self._marks[1:] if mark is None else ())
        self._marks, self._names = ([], []) if mark is None else ([mark], [self._now])
        self._losses: list[Any] = []
        self._weights: list[float] = []
        self._fetched = self._fed = 0
        self._feeder: int | None = None
        self._trained = self._unsure = False

    def _do(self, activity: str) -> None:
        if activity != self._activity:
            self._activity = activity
            self._journal.write("activity", name=activity)

    def _evaluates(self) -> None:
        self.evaluations += 1
        if self.sampler:
            self._sample(self.sampler.give_up)
        self._do("evaluating")
        self._restart()

    # ---- what the hooks tell

    def data_begins(self) -> int:
        """A batch, or a loader's first iteration, is asked for."""
        if self._unsure:
            self._evaluates()
        return self.enter("data")

    def data_ends(self, depth: int | None, batch: Any) -> None:
        """It has come; None where none came. A step does not begin with the end of an evaluation's batches."""
        self.leave(depth)
        if batch is None and not self._fetched and self._names[:1] == ["data"]:
            self._restart()
        if "data" not in self._stack:
            self._fetched += _first_dimension(batch)
            if self.observations and batch is not None:
                self._see(self.observations.batch, batch)

    def forward_begins(self, model: torch.nn.Module) -> int | None:
        """An outermost module is called."""
        self.progress = time.monotonic()
        if "backward" in self._stack:
            return None
        if not torch.is_grad_enabled():
            if not model.training and self._knows(model):
                self._evaluates()
                return None
            self._unsure = not self._trained
            return self.enter("forward")
        self._do("training")
        self._unsure, self._trained = False, True
        if model not in self._models:
            self._meet(model)
        return self.enter("forward")

    def forward_ends(self, depth: int | None, model: torch.nn.Module, inputs: Any) -> None:
        """It has returned, or raised."""
        self.leave(depth)
        if depth is None or not torch.is_grad_enabled():
            return
        self._feeder = self._feeder or id(model)  # of several models in a step, the first one's samples count
        if self._feeder == id(model) and not ("optimizer" in self._stack and self._fed):
            self._fed += _first_dimension(inputs)

    def backward_begins(self, root: torch.Tensor | None, made_by: torch.autograd.graph.Node | None = None) -> int:
        """Backward is called; `root` is the scalar that it starts from, where it is one, and `made_by` what computed that."""
        self._do("training")
        depth = self.enter("backward")
        outer = self._stack[:-1]
        if root is not None and "backward" not in outer and not ("optimizer" in outer and self._losses):
            copy = self._clock.copy(local(root.detach()))
            if copy is not None:
                self._losses.append(copy)
                self._weights.append(_weight(made_by))
        return depth

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps; one that steps already when it begins again had raised."""
        if optimizer in self._stepping:
            self._stepping.clear()
            self.leave(self._stack.index("optimizer") if "optimizer" in self._stack else None)
        self._look(self.memory.add_optimizer, optimizer)
        self._stepping.append(optimizer)
        if len(self._stepping) == 1:
            self.enter("optimizer")

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped; the outermost one ends the phase, the pacemaker the step."""
        while self._stepping and self._stepping.pop() is not optimizer:
            pass
        if self._stepping:
            return
        self.leave(self._stack.index("optimizer") if "optimizer" in self._stack else None)
        if self._sets_the_pace(optimizer):
            self._finish()

    # ---- the end of a step

    def _finish(self) -> None:
        mark = self._clock.mark() if self._names else None
        if mark is None:
            return
        self.finished += 1
        samples = self._fetched or self._fed
        memory = self._look(self.memory.at_step, self.finished)
        marks = [*self._marks, mark]
        weight = sum(self._weights) if len(self._weights) > 1 and any(self._weights) else 1.0
        self._pending.append(Step(self.finished, time.time(), self._clock, marks, self._names, self._losses, weight, samples, memory))
        if self.sampler and self._sample(self.sampler.step_ends, self.finished, list(zip(self._names, marks, marks[1:])), self._clock):
            mark = self._clock.mark()  # what the sampler took is no part of the next step
        self._restart(mark)
        self.drain()

    def drain(self, seconds: float = 0.0) -> None:
        """Writes the steps that are known, in order; waits at most so many seconds for the rest."""
        end = time.monotonic() + seconds
        while self._pending:
            if self._pending[0].known():
                self._journal.write("step", **self._pending.popleft().fields())
            elif time.monotonic() < end:
                time.sleep(0.001)
            else:
                return

    def _sets_the_pace(self, optimizer: torch.optim.Optimizer) -> bool:
        self._strangers[id(optimizer)] += 1
        if self._pacemaker() is None or self._strangers[id(optimizer)] > _PATIENCE:
            self._pacemaker = weakref.ref(optimizer)
        if self._pacemaker() is not optimizer:
            return False
        self._strangers.clear()
        return True

    def _knows(self, module: torch.nn.Module) -> bool:
        return any(module is part for model in self._models for part in model.modules())

    def _meet(self, model: torch.nn.Module) -> None:
        self._models.add(model)
        if self.observations:
            self._see(self.observations.model, model)
        parameter = next(model.parameters(), None)
        if parameter is None:
            return
        device = parameter.device
        if self._clock is None or self._clock.device.type != ("cuda" if device.type == "cuda" else "cpu"):
            self._use(clock_for(device))
        self._look(self.memory.add_model, model, device)


def _first_dimension(values: Any) -> int:
    """The first dimension of the first tensor that has one; 0 where there is none."""
    return next((tensor.shape[0] for tensor in tensors_in(values) if tensor.dim()), 0)


def _weight(made_by: torch.autograd.graph.Node | None) -> float:
    """The share of the step's loss that this operation made of one: 0.25 for `loss / 4` and `loss * 0.25`, 1 for any other.

    It is 0 for a sum over samples that was divided by how many there are in the whole step: such losses add up to its mean.
    """
    name = made_by.name() if made_by is not None else ""
    if name not in ("DivBackward0", "MulBackward0"):
        return 1.0
    number = made_by._saved_other
    if number is None or number.requires_grad or number.numel() != 1 or number.device.type != "cpu":  # a GPU would be waited for
        return 1.0
    if getattr(made_by.next_functions[0][0], "_saved_reduction", None) == _SUM:
        return 0.0
    share = number.item()
    if name == "DivBackward0":
        share = 1 / share if share else 1.0
    return share if 0 < share < 1 else 1.0
