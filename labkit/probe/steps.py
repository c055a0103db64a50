"""Turns the hooks' calls into steps and phases.

A step ends when the pacing optimizer, the first one seen, has stepped; a script with two optimizers therefore counts
one step per iteration. Phases form a stack, and time counts for the innermost phase, so that a closure inside an
optimizer, or a backward inside a pipeline schedule, adds up, and the sum of the phases is the step. Recomputation
inside backward counts as backward.

A forward without gradients can be an evaluation or a part of training (a teacher model). It is an evaluation if a
trained model runs in eval mode, or if another batch is fetched before any training. An evaluation belongs to no step:
the step's clock restarts with the first phase after it.

An optimizer step with a learning rate of zero and without a backward since the last step only creates the optimizer's
state, as `get_state_dict` of torch.distributed.checkpoint does. Such a step is ignored.

Optimizers that step within backward, one per parameter, end the step together when backward ends. An update that no
optimizer hook reports, because the step is compiled or hand-written, is detected when the script continues with its
next batch, forward or backward (`optimizers.py`); the time between backward and that moment counts for the optimizer.

Losses and samples are counted in `losses.py` and `samples.py`. If an optimizer calls its closure more than once, the
first call counts.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch

from labkit.probe.activity import OTHER
from labkit.probe.clocks import clock_for
from labkit.probe.collectives import FlightRecorder
from labkit.probe.finished import FinishedSteps
from labkit.probe.groups import GroupWatch
from labkit.probe.journal import Guard, Journal
from labkit.probe.losses import Edge, Loss, Share, share_of
from labkit.probe.memory import local
from labkit.probe.observations import Observations
from labkit.probe.optimizers import UpdateWatch
from labkit.probe.pace import InsideBackward
from labkit.probe.samples import Shape, shapes_in
from labkit.probe.startup import Startup
from labkit.probe.threads import ScriptThread


class StepWatch(FinishedSteps):
    """The activity of one rank, reported by hooks in the script's thread; writes `step`, `memory`, `activity`,
    `device`.
    """

    def __init__(self, journal: Journal):
        super().__init__(journal)
        self.evaluations = 0
        self.recorder = FlightRecorder(journal)
        self.groups: GroupWatch | None = None
        self.observations: Observations | None = None
        self.startup: Startup | None = None
        self._see, self._share = Guard(journal, "observations"), Guard(journal, "loss shares")
        self._finite = True  # whether all known losses were finite
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.thread = ScriptThread()
        self.backwards = 0
        self._updates = UpdateWatch(self.optimizers, Guard(journal, "compiled updates"))
        self._loss: Loss | None = None
        self._closure_ran = False
        self._inside = InsideBackward()
        self._stepping: list[torch.optim.Optimizer] = []
        self._creating: torch.optim.Optimizer | None = None
        self._restart()

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
        """The trained models that still exist."""
        return list(self._models)

    # ---- beginning again

    def _restart(self, mark: Any = None) -> None:
        super()._restart(mark)
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
        return self.enter("data")

    def data_ends(self, depth: int | None, batch: Any) -> None:
        """The request has returned; `batch` is None if there was none. A step does not begin with the end of an
        evaluation's batches.
        """
        self.leave(depth)
        if batch is None and not self._samples.has_batch and self._names[:1] == ["data"]:
            self._restart()
        if "data" not in self._stack:
            self._samples.fetched(batch)
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
        return self.enter("forward")

    def forward_ends(self, depth: int | None, model: torch.nn.Module, inputs: Any, raised: bool = False) -> None:
        """The outermost module has returned or raised."""
        self.leave(depth)
        if depth is None or not torch.is_grad_enabled():
            return
        if raised:
            self._samples.raised(shapes_in(inputs))
        elif not self._closure_ran:
            counts = self._samples.called(id(model), shapes_in(inputs))
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
        return depth

    def backward_ends(self, depth: int | None) -> None:
        """Backward has returned or raised."""
        self.leave(depth)
        if depth is None or "backward" in self._stack:
            return
        self._losses.backward_ends(self._loss)
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
        self._models.add(model)
        if self.observations:
            self._see(self.observations.model, model)
        parameter = next(model.parameters(), None)
        if parameter is None:
            return
        device = parameter.device
        if self._clock is None or self._clock.device.type != ("cuda" if device.type == "cuda" else "cpu"):
            self.use(clock_for(device))
        self._look(self.memory.add_model, model, device)
