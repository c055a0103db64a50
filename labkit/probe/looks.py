"""Looks: what a few steps did to the model, as `look` events. Ranks are compared by the analysis, not by a collective.

A look belongs to the end of a step: the first, the second, and ever rarer ones, the same on all ranks. Its `sums` have
two numbers for each tensor that `tracked` names: the sum of some of its elements, weighted by their position, and the
sum of their absolute values. Replicas that were updated alike have equal sums, and a parameter that was updated has
other sums than before. A tensor is represented by at most `_ELEMENTS` elements, so a difference in a few rows of a
large one may be missed.

Where a script sends between steps, such as to average parameters, the sums of its models, if no wrapper synchronises
them, are written once more as a `between` event when the next step begins; where it does so in a few steps only, such
as in those of its optimizer, when such a step ends.

Within the steps of a look, gradients are read before and after what the script does to them, and the states of the
random number generators when the samples are there and when backward begins. On a GPU every number arrives by an
asynchronous copy and is written later, so that nothing waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.probe.clocks import LateCopies, is_captured
from labkit.probe.journal import Guard, Journal, compiling
from labkit.probe.memory import is_fsdp_unit, local, parameters_of
from labkit.probe.optimizers import Edge
from labkit.probe.patches import Patches
from labkit.probe.tensors import outermost
from labkit.probe.timeline import OF_PROBE
from labkit.probe.torch_private import (
    PROFILER_ENABLED,
    SAVED_COUNT,
    SAVED_OTHER,
    SAVED_REDUCTION,
    SAVED_SELF,
    SAVED_TOTAL,
    SEQUENCE_NUMBER,
    TENSOR_VERSION,
    WORLD,
)
from labkit.probe.traffic import FlightRecorder
from labkit.record import clock

if TYPE_CHECKING:
    from labkit.probe.steps import StepWatch

_EARLY = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_EVERY = 64
_RAREST = 1 << 16  # steps
_COST = 0.001  # of the time of training, for looks after the early ones
_TENSORS, _ELEMENTS = 384, 128
_BETWEEN = 12  # events at most
_WRAPPED = 4  # models in DDP whose parameters before DDP's broadcast are written
_GROUPS = 8  # parameter groups of an optimizer whose settings are recorded
_NODES = 12  # operations between backward's root and the mean of the loss
_UNSET = re.compile(r"""(?:environ(?:\.get)?\s*[\[(]|getenv\()\s*["']([A-Z][A-Z0-9_]*)["']""")
_OF_A_LAUNCHER = re.compile(r"RANK|PROCID|LOCALID|WORLD|NTASKS|NPROC|_SIZE")
_OPTIMIZERS = 8  # of a script with more, gradients that stay are not noticed
_version = TENSOR_VERSION.reader(0)


@dataclass
class _Gradient:
    """A gradient that an optimizer has used: where it is and its version, whether anything but backward has written it
    since, and whether backward has added to it. `left` are its sums before backward in a step that is looked at:
    through `grad.data` it can be zeroed without a new version. `unused`: backward has added to it, and no optimizer has
    stepped since; `dropped` counts how often such a gradient was reset."""

    parameter: weakref.ref[torch.Tensor]
    place: tuple[int, int] | None
    reset: bool = False
    grown: bool = False
    left: torch.Tensor | None = None
    unused: bool = False
    dropped: int = 0


class Looks:
    """Receives the calls of the `StepWatch` in its thread."""

    def __init__(
        self, journal: Journal, patches: Patches, recorder: FlightRecorder, watch: StepWatch, sends: Callable[[], int]
    ):
        self._journal, self._recorder, self._watch, self._sends = journal, recorder, watch, sends
        self._guard, self._weigh = Guard(journal, "looks"), Guard(journal, "weights of losses")
        self._profiles = PROFILER_ENABLED.get() if PROFILER_ENABLED.exists() else bool
        self._launched = int(os.environ.get("WORLD_SIZE") or 1)
        self._wrappers: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()  # as made
        self._tracked: tuple[list[bool], list[Any]] | None = None
        self._sharded: set[int] = set()  # the numbers of the models that are sharded
        self._due, self._every = 1, _EVERY
        self._began = self._spent = self._spent_before = 0.0
        self._since, self._over, self._ordered = 0, False, False
        self._calls_before: dict[str, int] = {}  # at the beginning of a step
        self._calls_after: dict[str, int] | None = None  # at the end of a step, until the next one begins
        self._ended = 0  # when that was, in Unix ns
        self._sends_within, self._between = True, _BETWEEN
        self._sent: bool | None = None
        self._unsynchronised = False
        self._rates = 0.0  # the sum of the learning rates that were used until now
        self._used: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Gradient] = weakref.WeakKeyDictionary()
        self._clips: set[int] = set()  # the ids of the parameters whose gradients were clipped since backward began
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # since backward began
        self._backwards = self._fetched = 0  # in this step
        self._wrapped = _WRAPPED  # events that are left
        self._late = LateCopies()
        self._fresh()
        patches.hook("looks", "torch.nn.modules.module.register_module_module_registration_hook", self._registered)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.wrap("looks", f"torch.nn.utils.{name}", self._clipping)

    def _fresh(self) -> None:
        self._held: tuple[int, list[Any]] | None = None  # what is tracked, and of how many models, as step() found it
        self._drawn: dict[str, str] | None = None
        self._new_order = False
        self._step: dict[str, Any] = {}
        self._gradients: Any = None
        # sums of gradients after backward, and before step()
        self._clipped: tuple[torch.Tensor, torch.Tensor] | None = None
        self._norm: torch.Tensor | None = None  # of the gradients that were clipped last, and the limit
        self._weights: list[tuple[float, float, bool] | None] = []
        self._losses: set[tuple[str, ...]] = set()  # the last operations before each backward
        self._left: list[torch.Tensor] = []  # sums of gradients that the step began with

    @property
    def now(self) -> bool:
        """Whether the current step is looked at."""
        return self._watch.finished + 1 >= self._due and not self._guard.off

    def _registered(self, module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        """A module becomes part of another one: how a model in DDP is noticed when it is made, without a line of the
        probe below DDP's own."""
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and part is not None:
            self._wrappers[module] = None
            if self._wrapped:
                self._wrapped -= 1
                self._timed(self._look_before_broadcast, part)

    def _look_before_broadcast(self, model: torch.nn.Module) -> None:
        found = [(name, tensor) for name, role, tensor in _parts(model) if role == "parameter"]
        found = found[:: math.ceil(len(found) / _TENSORS) or 1]
        sums = self._sums([tensor for _, tensor in found])
        if sums is not None:
            names = [name for name, _ in found]
            self._soon([sums], lambda rows: self._journal.write("wrapped", names=names, sums=rows))

    def _timed(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls a part of a look and adds its time to what looks have taken."""
        began = time.perf_counter()
        self._guard(function, *args)
        self._spent += time.perf_counter() - began

    # ---- within a step

    def order_begins(self) -> None:
        """A loader begins to iterate, which may draw an order of the samples."""
        self._new_order = True

    def forward_begins(self) -> None:
        """A model is called to train: its parameters are those that it starts with, and still sharded."""
        self._begins()
        self.samples_are_there()

    def batch_is_there(self) -> None:
        self._fetched += 1

    def samples_are_there(self) -> None:
        """A batch is requested from a loader, or else a model is called with samples: what is drawn from now on is
        drawn for this rank's samples."""
        if self._drawn is None and self.now:
            self._timed(self._remember_random)

    def backward_begins(self, made_by: Edge | None) -> None:
        """Backward begins from a loss that the operation `made_by` computed."""
        self._begins()  # no forward was seen, such as that of a compiled model
        self._backwards += 1
        self._stepped.clear()
        if self._used or self._clips:
            self._guard(self._gradients_before)
        if self.now:
            self._timed(self._look_at_loss, made_by)

    def _begins(self) -> None:
        if not self._since:
            self._timed(self._look_first)
        elif self._calls_after is not None:
            self._timed(self._look_between)

    def backward_ends(self) -> None:
        """Gradients are as backward, and what the wrapper sends in it, made them."""
        if self._used:
            self._guard(self._gradients_after)
        if not self.now:
            return
        # DDP decides when its forward is called whether the backward of it is synchronised
        self._unsynchronised = any(not model.require_forward_param_sync for model in self._wrappers)
        if not self._watch.memory_is_profiled:
            self._timed(self._keep_gradients)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are as the optimizer uses them."""
        for used in self._used.values():
            used.unused = False
        for group in optimizer.param_groups[:_GROUPS]:
            rate = group.get("lr")
            if type(rate) is float:
                self._rates += rate
        if self.now:
            self._timed(self._look_before, optimizer)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has used its gradients, and nothing has been added to them since."""
        self._stepped.add(optimizer)
        if self._watch.finished + 2 >= self._due:  # the next step is looked at, too
            self._guard(self._remember_gradient, optimizer)

    def unscales(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler is about to divide the gradients by its scale."""
        self._guard(self._look_at_scaled, optimizer)

    def _look_at_scaled(self, optimizer: torch.optim.Optimizer) -> None:
        if any(id(parameter) in self._clips for parameter in parameters_of(optimizer)):
            self._step["scaled"] = True

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            parameters, *others = args or (kwargs.pop("parameters", ()),)
            looks = self.now and not compiling()
            if looks:
                parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                self._clips.update(map(id, parameters))
            late = looks and self._guard(self._has_stepped, parameters)
            norm = original(parameters, *others, **kwargs)
            limit = others[0] if others else kwargs.get("max_norm", kwargs.get("clip_value"))
            if late and limit != math.inf:
                self._step["late"] = True
            elif looks and norm is not None:
                self._guard(self._keep_norm, norm, limit)
            return norm

        return clip

    def _has_stepped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether optimizers have used all of these gradients already."""
        done = set(map(id, parameters_of(*self._stepped)))
        clipped = [parameter for parameter in parameters if parameter.grad is not None]
        return bool(clipped) and all(id(parameter) in done for parameter in clipped)

    def _keep_norm(self, norm: torch.Tensor, limit: float) -> None:
        if type(norm) is torch.Tensor and not (self._watch.memory_is_profiled or is_captured()):
            self._norm = torch.stack((norm.detach().double(), torch.full_like(norm, limit).double()))[None]

    def _remember_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._used or len(self._used) < _OPTIMIZERS:
            held = parameters_of(optimizer)
            parameter = next((parameter for parameter in held if parameter.grad is not None), None)
            if parameter is not None:
                self._used[optimizer] = _Gradient(weakref.ref(parameter), _place(parameter))

    def _gradients_before(self) -> None:
        self._clips.clear()
        for used in self._used.values():
            parameter = used.parameter()
            place = _place(parameter)
            reset = used.place is None or place != used.place
            used.reset, used.place = used.reset or reset, place
            used.dropped += reset and used.unused
            if used.reset or used.left is not None or not self.now or self._watch.memory_is_profiled:
                continue
            if parameter is not None and parameter.grad is not None:
                used.left = self._sums([parameter.grad])

    def _gradients_after(self) -> None:
        for used in self._used.values():
            place = _place(used.parameter())
            used.unused = place != used.place
            used.place, used.grown = place, used.grown or used.unused

    def _look_first(self) -> None:
        self._began, self._since = time.perf_counter(), clock.SystemMoment.now().ns
        self._write(0, self._tensors())
        self._calls_before = _calls()

    def _look_between(self) -> None:
        before, self._calls_after = self._calls_after, None
        self._calls_before = _calls()
        if self._calls_before != before:
            self._write_between()

    def _write_between(self) -> None:
        if self._watch.memory_is_profiled or self._profiles():
            return
        tensors = self._tensors()
        self._track(tensors)
        if self._wrappers or (self._sharded and not self._whole(tensors)):
            self._between = 0
            return
        sums = self._sums([tensor for *_, tensor in tensors])
        if sums is not None:
            step, self._between = self._watch.finished, self._between - 1
            sent = sum(call["bytes"] for call in self._recorder.since(self._ended) or ())
            self._soon([sums], lambda rows: self._journal.write("between", step=step, sums=rows, bytes=sent))

    def _remember_random(self) -> None:
        self._drawn = self._random_states()

    def _look_at_loss(self, made_by: Edge | None) -> None:
        if self._drawn is not None and not self._new_order:
            states, found = self._random_states(), self._step.setdefault("random", {})
            for name, before in self._drawn.items():
                if states.get(name) != before:
                    found.setdefault(name, [before, states[name]])
        self._losses.add(_operations(made_by))
        self._weights.append(self._weigh(_weight_of_one, made_by))
        if twice := self._guard(_normalised_twice, made_by):
            self._step["twice"] = twice

    def _random_states(self) -> dict[str, str]:
        with torch.autograd.profiler.record_function(OF_PROBE) if self._profiles() else contextlib.nullcontext():
            return _random_states()

    def _keep_gradients(self) -> None:
        self._gradients = self._sums(
            [parameter.grad for *_, parameter in self._tensors() if parameter.grad is not None]
        )

    def _look_before(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._known_models()
        tensors = self._tensors()
        self._held = known, tensors
        updated = set(map(id, parameters_of(optimizer)))
        with_gradient = [parameter for *_, parameter in tensors if parameter.grad is not None]
        if not with_gradient:
            self._step["gone"] = self._gradients is not None and bool(len(self._gradients))
            return
        used = self._used.get(optimizer)
        kept = used is not None and used.grown and not used.reset
        self._step["kept"] = kept and self._step.get("kept", True)
        if kept and used is not None and used.left is not None:
            self._left.append(used.left)
        alike = self._fetched >= self._backwards and len(self._losses) == 1  # micro-batches
        if used is not None and used.dropped and alike:
            self._step["dropped"] = (used.dropped, self._backwards)
        self._step["evaluating"] = any(map(_trains_as_in_evaluation, self._watch.models))
        self._step["gradients"] = True
        self._step["unsynchronised"] = self._unsynchronised
        if not self._ordered:
            self._ordered, order = True, _order(tensors, optimizer)
            self._step["order"] = order if order != sorted(order) else []
        held = set(map(id, parameters_of(*self._watch.optimizers.few())))
        self._step["unheld"] = [
            number
            for number, (*_, parameter) in enumerate(tensors)
            if held and id(parameter) not in held and parameter.requires_grad and parameter.grad is not None
        ]
        if self._step["unheld"]:
            own = {id(parameter) for model in self._models() for parameter in model.parameters()}
            self._step["strangers"] = bool(held - own)
        self._step["idle"] = self._step.get("idle", []) + [
            number
            for number, (*_, parameter) in enumerate(tensors)
            if id(parameter) in updated and parameter.requires_grad and parameter.grad is None and _is_read(parameter)
        ]
        if self._gradients is not None and self._clipped is None and not self._watch.memory_is_profiled:
            now = self._sums([parameter.grad for parameter in with_gradient])
            if now is not None and len(now) == len(self._gradients):
                self._clipped = self._gradients, now

    # ---- between steps

    def step_ends(self, step: int) -> None:
        """A step is over."""
        if self._late:
            self._timed(self._late.read)
        looked = step >= self._due
        if self._between and (looked or not self._sends_within):
            self._guard(self._count_calls, looked)
        if looked:
            self._timed(self._look, step)
            self._due = self._next(step)
            if step + 1 < self._due:
                self._used.clear()
        elif self._drawn is not None or self._new_order:
            self._fresh()
        self._backwards = self._fetched = 0

    def _count_calls(self, looked: bool) -> None:
        self._calls_after = _calls()
        if not self._calls_after:  # no group of several ranks
            self._between = 0
            return
        sends_within = self._calls_after != self._calls_before
        if looked:
            self._sends_within = sends_within
        elif sends_within:
            self._timed(self._write_between)
        self._ended = clock.SystemMoment.now().ns

    def _look(self, step: int) -> None:
        if not self._profiles():
            known, tensors = self._held or (0, [])
            self._write(step, tensors if known == self._known_models() else self._tensors())
        self._fresh()

    def _next(self, step: int) -> int:
        """The step of the next look, so that later ones stay below `_COST`."""
        spent, self._spent_before = self._spent - self._spent_before, self._spent
        early = next((early for early in _EARLY if early > step), None)
        if early is not None:
            return early
        per_step = (time.perf_counter() - self._began) / step
        while spent > _COST * self._every * per_step and self._every < _RAREST:
            self._every *= 2
        every = max(self._every, self._journal.spaced(_EVERY))
        return (step // every + 1) * every

    def ends(self) -> None:
        """The process groups are about to be destroyed, or the script has ended."""
        if self._since and not self._over:
            self._over = True
            self._timed(self._look_at_end)

    def _look_at_end(self) -> None:
        self._fresh()
        tensors = self._tensors()
        if tensors:
            self._write(self._watch.finished, tensors, end=True)
        self._late.read(wait=True)

    def _write(self, step: int, tensors: list[Any], end: bool = False) -> None:
        self._track(tensors)
        in_step = step and not end
        fields = dict(self._step) if in_step else {}
        clipped = self._clipped if in_step else None
        group = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        if group < 2 and step and self._launched > 1:
            fields["unset"] = _unset()
        if group > 1 and step > 1 and not end:
            fields["silent"] = self._has_sent() is False
        weights = [weight for weight in self._weights if weight is not None]
        if step and weights and len(weights) == len(self._weights):
            for name, values_of_name in zip(("weight", "elements"), zip(*weights)):
                fields[name] = sum(values_of_name) / len(values_of_name)
            if all(labels for *_, labels in weights):
                fields["least"], fields["most"] = min(weights)[:2], max(weights)[:2]
        fields |= {
            "end": end,
            "spent": self._spent,
            "group": group,
            "settings": self._settings(),
            "rates": self._rates,
            "calls": _calls() if group else {},
            "whole": self._whole(tensors),
        }
        sums = self._sums([tensor for *_, tensor in tensors])
        if sums is None:
            return
        norm = [self._norm] if self._norm is not None and in_step and self._norm.device == sums.device else []
        left = [sums_left for sums_left in self._left if in_step and sums_left.device == sums.device]

        def arrived(rows: list[Any], *more: list[Any]) -> None:
            if clipped:
                before, used, *more = more
                fields["clipped"], fields["used"] = _factor(before, used), [sum(column) for column in zip(*used)]
                fields["gone"] = fields["clipped"] == 0
            if norm:
                (fields["norm"],), *more = more
            if not all(absolute for rows_left in more for _, absolute in rows_left):
                fields["kept"] = False
            known = {name: value for name, value in fields.items() if value}
            self._journal.write("look", **known, step=step, sums=rows)

        self._soon([sums, *(clipped or ()), *norm, *left], arrived)

    def _soon(self, values: Sequence[torch.Tensor], arrived: Callable[..., None]) -> None:
        """Calls `arrived` with each of the values as lists, when they are on the host."""
        if any(value.is_cuda for value in values):
            self._late.add(values, lambda copies: arrived(*(copy.tolist() for copy in copies)))
        else:
            arrived(*(value.tolist() for value in values))

    # ---- what is looked at

    def _models(self) -> list[torch.nn.Module]:
        """The models that train, and those in DDP; not a part of one, and none that only shares its parameters, such as
        a slice of a Sequential."""
        wrappers = [wrapper for wrapper in self._wrappers if hasattr(wrapper, "reducer")]  # made without an error
        trained = wrappers + [model for model in self._watch.models if model not in self._wrappers]
        if len(trained) == 1:
            return trained
        found: list[torch.nn.Module] = []
        known: set[int] = set()
        for model in sorted(outermost(trained), key=lambda model: (model not in self._wrappers, _size(model))):
            parameters = {id(parameter) for parameter in model.parameters()}
            if not parameters or not parameters <= known:
                found.append(model)
                known |= parameters
        return found

    def _known_models(self) -> int:
        return len(self._wrappers) + len(self._watch.models)

    def _tensors(self) -> list[tuple[int, str, str, torch.Tensor]]:
        """The model, name, role and tensor of what is tracked. Within backward, FSDP2 may have whole parameters in
        place of shards."""
        found = [
            (number, name, role, tensor)
            for number, model in enumerate(self._models())
            for name, role, tensor in _parts(model)
        ]
        return found[:: math.ceil(len(found) / _TENSORS)] if found else []

    def _track(self, tensors: list[Any]) -> None:
        called = [model not in self._wrappers or model in self._watch.models for model in self._models()]
        which = called, [(number, name, tensor.shape) for number, name, _, tensor in tensors]
        if which == self._tracked:
            return
        self._tracked = which  # a parameter that is unfrozen later is still the same one
        names = [[number, name, role, list(tensor.shape)] for number, name, role, tensor in tensors]
        models = []
        for model, is_called in zip(self._models(), called):
            ddp = model in self._wrappers
            models.append(
                {
                    "name": type(model).__name__,
                    "ranks": sorted(dist.get_process_group_ranks(model.process_group)) if ddp else None,
                    "called": is_called,
                    "buffers": bool(ddp and model.broadcast_buffers),
                    "sharded": _is_sharded(model),
                }
            )
        self._sharded = {number for number, model in enumerate(models) if model["sharded"]}
        self._journal.write("tracked", models=models, tensors=names)

    def _whole(self, tensors: list[Any]) -> list[int]:
        """The numbers of those tensors of sharded models that the rank holds as a whole, as plain ones or on a mesh of
        one rank."""
        return [
            number
            for number, (model, _, _, tensor) in enumerate(tensors)
            if model in self._sharded and (not hasattr(tensor, "placements") or tensor.device_mesh.size() == 1)
        ]

    def _sums(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Two numbers for each tensor, in one tensor on the device of the first one; None if nothing may be read."""
        if is_captured():
            return None
        with torch.no_grad():
            parts = [_elements(tensor) for tensor in tensors]
            if not parts:
                return torch.empty(0, 2, dtype=torch.float64)
            device = next((part.device for part in parts if part.is_cuda), parts[0].device)
            rows = torch.zeros(len(parts), _ELEMENTS, dtype=torch.float64, device=device)
            for row, part in zip(rows.unbind(), parts):
                row[: len(part)].copy_(part, non_blocking=True)
            return torch.stack(((rows * _weights(device)).sum(1), rows.abs().sum(1)), dim=1)

    def _settings(self) -> dict[str, float]:
        """The numbers of the optimizers' parameter groups, by a name in words."""
        found: dict[str, float] = {}
        optimizers = self._watch.optimizers.few()
        for which, optimizer in enumerate(optimizers):
            for number, group in enumerate(optimizer.param_groups[:_GROUPS]):
                place = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
                place += f" of optimizer {which}" if len(optimizers) > 1 else ""
                for name, value in group.items():
                    values = value if isinstance(value, (list, tuple)) and name != "params" else [value]
                    for index, setting in enumerate(values if name != "params" else ()):
                        if isinstance(setting, torch.Tensor) and setting.numel() == 1 and not setting.is_cuda:
                            setting = setting.item()
                        if (
                            isinstance(setting, (int, float))
                            and not isinstance(setting, bool)
                            and math.isfinite(setting)
                        ):
                            found[f"{name}{f'[{index}]' if len(values) > 1 else ''}{place}"] = float(setting)
        return found

    def _has_sent(self) -> bool | None:
        """Whether this rank has started a collective other than a barrier, or a message, since its first step; None if
        that is unknown."""
        if not self._sent:
            entries = self._recorder.entries()
            if entries:
                since = self._recorder.since(self._since, entries)
                self._sent = since is None or any(entry["op"] != "barrier" for entry in since) or self._sends() > 0
        return self._sent


def _size(model: torch.nn.Module) -> tuple[int, str]:
    """The largest first, and in the same order on all ranks."""
    return -sum(1 for _ in model.parameters()), type(model).__name__


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    ignored = getattr(model, "parameters_to_ignore", ())  # of DDP, without its prefix
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "ds_id") and not torch.nn.parameter.is_lazy(parameter):  # DeepSpeed's own sharding
            own = name.removeprefix("module.")
            role = "ignored" if own in ignored else "parameter" if parameter.requires_grad else "frozen"
            yield own, role, parameter
    for name, buffer in model.named_buffers():
        own = name.removeprefix("module.")
        if buffer.is_floating_point() and not torch.nn.parameter.is_lazy(buffer):
            yield own, "ignored" if own in ignored else "buffer", buffer


def _order(tensors: Sequence[Any], optimizer: torch.optim.Optimizer) -> list[int]:
    """The numbers of the tracked tensors, in the order in which an optimizer holds them."""
    number = {id(tensor): which for which, (*_, tensor) in enumerate(tensors)}
    held = (number.get(id(parameter)) for parameter in parameters_of(optimizer))
    return [index for index in held if index is not None]


def _calls() -> dict[str, int]:
    """By id of each group of several ranks how many collectives this rank has called there; without those whose backend
    does not count them."""
    found, number_of = {}, SEQUENCE_NUMBER.get()
    for group, name in WORLD.get().pg_names.items():
        with contextlib.suppress(RuntimeError):
            if group.size() > 1:
                found[name] = number_of(group)
    return found


def _is_sharded(model: torch.nn.Module) -> bool:
    are_dtensors = (hasattr(parameter, "placements") for parameter in model.parameters())
    return any(map(is_fsdp_unit, model.modules())) or any(are_dtensors)


def _place(parameter: torch.Tensor | None) -> tuple[int, int] | None:
    """Where this rank's part of the gradient of a parameter is, and how often it was written; None without one."""
    if parameter is None or parameter.grad is None:
        return None
    gradient = local(parameter.grad)
    plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return (gradient.data_ptr(), _version(gradient)) if plain else None


def _trains_as_in_evaluation(model: torch.nn.Module) -> bool:
    """Whether a model that trains was set to `eval()` as a whole, and has parts that compute otherwise then."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    return not inner.training and any(
        isinstance(part, _NORMS) or (isinstance(part, _DROPOUTS) and part.p > 0) for part in inner.modules()
    )


_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)


def _is_read(tensor: torch.Tensor) -> bool:
    return bool(local(tensor).numel())


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """At most `_ELEMENTS` elements of this rank's part of a tensor."""
    mine = local(tensor.detach())
    if hasattr(mine, "wait") or type(mine) not in (torch.Tensor, torch.nn.Parameter) or mine.is_sparse or mine.is_meta:
        return torch.zeros(0)
    if mine.is_complex():
        mine = torch.view_as_real(mine)
    if not mine.untyped_storage().nbytes():  # freed by its wrapper
        return torch.zeros(0)
    if not mine.is_contiguous() and not _is_dense(mine):
        mine = mine.flatten()[:_ELEMENTS]
    every = max(1, math.ceil(mine.numel() / _ELEMENTS))
    return mine.as_strided((math.ceil(mine.numel() / every),), (every,))


def _is_dense(tensor: torch.Tensor) -> bool:
    order = sorted(zip(tensor.stride(), tensor.shape))
    expected = 1
    for stride, length in order:
        if stride != expected:
            return False
        expected *= length
    return True


def _weights(device: torch.device) -> torch.Tensor:
    """One weight per position. Computed at each look, so that no tensor of the probe outlives a step."""
    places = torch.arange(1, _ELEMENTS + 1, dtype=torch.float64, device=device)
    return 0.5 + (places * 0.6180339887).frac()


def _factor(before: list[list[float]], after: list[list[float]]) -> float | None:
    """By which one factor the gradients were multiplied; None if they were changed in another way."""
    ratios = [new[1] / old[1] for old, new in zip(before, after) if old[1] > 0]
    if (
        not ratios
        or not all(math.isfinite(ratio) for ratio in ratios)
        or max(ratios) - min(ratios) > 1e-3 * max(ratios)
    ):
        return None
    return sum(ratios) / len(ratios)


def _random_states() -> dict[str, str]:
    """A digest of the state of each random number generator."""
    states: dict[str, bytes] = {"torch": torch.default_generator.get_state().numpy().tobytes()}
    states["random"] = str(hash(random.getstate()[1])).encode()
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy.random"] = keys.tobytes() + bytes(str(position), "ascii")
    if torch.cuda.is_initialized() and not is_captured():
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        states["torch.cuda"] = generator.get_state().numpy().tobytes()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def _weight_of_one(edge: Edge | None) -> tuple[float, float, bool] | None:
    """The weight of one element (a token, or a sample) in the loss: 1 / n for the mean of n elements, times what the
    script multiplied it by; and n, and whether the elements are labels. None if it is not found, or only a GPU knows
    it."""
    factor = 1.0
    for _ in range(_NODES):
        if edge is None or edge[0] is None:
            return None
        node = edge[0]
        name = node.name()
        counted = _elements_of(node, name)
        if counted is not None:
            return (factor / counted, counted, name.startswith("Nll")) if counted else None
        inputs = [following for following in node.next_functions if following[0] is not None]
        if name in ("DivBackward0", "MulBackward0"):
            number = (SAVED_OTHER if node.next_functions[0][0] is not None else SAVED_SELF).of(node)
            if len(inputs) != 1 or number is None or number.numel() != 1 or number.is_cuda:
                return None
            value = float(number)
            if name == "DivBackward0" and value > 1 and _is_sum_of_elements(inputs[0][0]):
                return factor / value, value, False
            factor *= value if name == "MulBackward0" else 1 / value if value else math.nan
        elif name not in _PASSED and len(inputs) != 1:
            return None
        edge = inputs[0] if inputs else None
    return None


_MEAN = 1  # the saved reduction of a loss that is a mean
_MEANS = (
    *("NllLossBackward0", "NllLoss2DBackward0", "MseLossBackward0", "SmoothL1LossBackward0"),
    "BinaryCrossEntropyWithLogitsBackward0",
)
_PASSED = ("AddBackward0",)  # a mean and a penalty: the first one is followed


_NORMALISED = {
    "NllLossBackward0": ("LogSoftmaxBackward0", "SoftmaxBackward0", "cross_entropy", "softmax"),
    "NllLoss2DBackward0": ("LogSoftmaxBackward0", "SoftmaxBackward0", "cross_entropy", "softmax"),
    "BinaryCrossEntropyWithLogitsBackward0": ("", "SigmoidBackward0", "binary_cross_entropy_with_logits", "sigmoid"),
}  # by loss: what it does to its input by itself, what the model did before, and both in words
_RESHAPED = re.compile(
    r"(?:View|Reshape\w*|UnsafeView|Squeeze|Unsqueeze|Transpose|Permute|T|Clone|ToCopy)Backward\d|_DDPSink\w*"
)


def _normalised_twice(edge: Edge | None) -> tuple[str, str] | None:
    """The loss function and what the model computed before it, if the loss computes that itself, such as softmax."""
    node = edge[0] if edge is not None else None
    for _ in range(_NODES):
        if node is None or node.name() in _NORMALISED:
            break
        node = _only_input(node)
    if node is None or node.name() not in _NORMALISED:
        return None
    own, before, loss, function = _NORMALISED[node.name()]
    node = _only_input(node)
    while node is not None and (_RESHAPED.fullmatch(node.name()) or node.name() == own):
        node = _only_input(node)
    return (loss, function) if node is not None and node.name() == before else None


def _operations(edge: Edge | None) -> tuple[str, ...]:
    """The names of the last operations of a loss, by the first input of each."""
    node, names = (edge[0] if edge is not None else None), []
    while node is not None and len(names) < _NODES:
        names.append(node.name())
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return tuple(names)


def _only_input(node: Any) -> Any:
    inputs = [following for following, _ in node.next_functions if following is not None]
    return inputs[0] if len(inputs) == 1 else None


def _is_sum_of_elements(node: Any) -> bool:
    return node.name() in ("SumBackward0", "SumBackward1")


def _elements_of(node: Any, name: str) -> float | None:
    if name == "MeanBackward0":
        return float(SAVED_COUNT.of(node))
    if name in _MEANS and SAVED_REDUCTION.of(node) == _MEAN:
        if not name.startswith("Nll"):
            return float(SAVED_SELF.of(node).numel())
        total = SAVED_TOTAL.of(node)
        return None if total.is_cuda else float(total)
    return None


def _unset() -> list[str]:
    """Variables of other launchers that the script reads, and that are not set."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return []
    try:
        with open(file, encoding="utf-8", errors="replace") as script:
            text = script.read(1 << 20)
    except OSError:
        return []
    names = [name for name in _UNSET.findall(text) if _OF_A_LAUNCHER.search(name) and name not in os.environ]
    return sorted(set(names))[:8]
