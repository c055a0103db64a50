"""Traces one rank: builds the script's model and optimizer, runs some steps, and reports the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from labkit.prediction.devices import BEFORE_HOPPER, FROM_HOPPER
from labkit.prediction.tracing import world
from labkit.prediction.tracing.kernels import peaks, temporaries
from labkit.prediction.tracing.tape import Tape, TapeCensus, of_a_sample, scoped
from labkit.prediction.tracing.torch_private import FAKE_MODE, WITHOUT_MODES
from labkit.prediction.tracing.world import Replica, batch, load
from labkit.probe.memory import states_of
from labkit.probe.timeline import curve

# ---- the phases of a traced step, as the probe has them in a run: data, forward, backward, optimizer, other


OTHER = "other"


class Phases:
    """Marks the phases with the times that `mark` returns, from the calls of modules, `backward` and optimizers;
    `models` and `optimizers` are those that were used."""

    def __init__(self, mark: Callable[[], int]):
        self.models: dict[torch.nn.Module, None] = {}
        self.optimizers: dict[torch.optim.Optimizer, None] = {}
        self._mark = mark
        self._stack: list[str] = []
        self._marks: list[tuple[str, int]] = []
        self._depth = 0

    def follow(self) -> None:
        """Installs the hooks, for the rest of the process."""
        register_module_forward_pre_hook(self._forward_begins)
        register_module_forward_hook(self._forward_ends, always_call=True)
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(lambda *_: self._leave())
        for name in ("backward", "grad"):  # pipelines compute a backward in halves with `grad`
            setattr(torch.autograd, name, self._as_backward(getattr(torch.autograd, name)))

    def _as_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            with self.phase("backward"):
                return original(*args, **kwargs)

        return backward

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase, inside of which others may begin."""
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    @property
    def inside(self) -> bool:
        """Whether a phase has begun and not ended."""
        return bool(self._stack)

    def restart(self) -> None:
        """A step begins."""
        self._marks, self._stack = [(OTHER, self._mark())], []

    def spans(self) -> list[tuple[str, int, int]]:
        """The step ends now: its phases in order, as (name, first, last time on the tape)."""
        marks = [*self._marks, ("", self._mark())]
        return [(name, first, last) for (name, first), (_, last) in pairwise(marks)]

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._marks.append((name, self._mark()))

    def _leave(self) -> None:
        self._stack.pop()
        self._marks.append((self._stack[-1] if self._stack else OTHER, self._mark()))

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and "backward" not in self._stack:
            self.models[module] = None
            self._enter("forward")

    def _forward_ends(self, *_: Any) -> None:
        if self._depth == 1 and self._stack and self._stack[-1] == "forward":
            self._leave()
        self._depth -= 1

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizers[optimizer] = None
        self._enter("optimizer")


# ---- the trace of one rank


def trace(request: dict[str, Any], rank: int) -> dict[str, Any]:
    """The memory curve and the collectives of a step of one rank.

    `request` has `source` and `path` of the script, `ranks`, their number, `grouped`, whether they form a process
    group, `sample`, the shape of one input, `split`, how tensor-parallel ranks split the output of each block, `gpus`,
    whether the script runs on GPUs, `steps`, the number of the first typical step, and `model`, the source of the
    script that trains the same model on one device. Of the ranks in `of`, the first one also counts the FLOPs of a
    sample of it.
    """
    tape = Tape(request["gpus"])
    world.join(rank, request["ranks"])
    if request["gpus"]:
        world.updates_together()
    for owner, name, function in scoped(tape):
        setattr(owner, name, function)
    script = load(request["path"], request["source"])
    world.ranks_agree(request["source"])
    device = torch.device("cpu")
    if request["grouped"]:
        dist.init_process_group()
    with FAKE_MODE.get()(allow_non_fake_inputs=True):
        ranks = 1 if request["grouped"] else getattr(script, "RANKS", 1)  # that one process drives
        data = batch(script, request["sample"], script.BATCH_PER_RANK * ranks)
        if hasattr(script, "STAGES"):
            world.stages_know_shapes(script, request["sample"], request["split"])
            data = script.stage_data(data)
        with tape:
            found = _traced(script, device, data, tape, request["steps"])
        if rank == request["of"][0]:
            found["flops_of_a_sample"] = of_a_sample(request["path"], request["model"], request["sample"])
    return found


def _traced(script: Any, device: torch.device, data: TensorDataset, tape: Tape, steps: int) -> dict[str, Any]:
    phases = Phases(tape.mark)
    phases.follow()
    model = script.parallelize(script.build_blocks(), device)
    optimizer = script.build_optimizer(model)
    model.train()
    before: dict[int, tuple[str, int]] = {}
    for step in range(1, steps + 1):
        tape.keeps_kernels = step == steps
        if tape.keeps_kernels:
            owned, _ = _owned(tape, phases)
            before = {address: ("other", size) for address, size in tape.allocated.items()} | owned
        tape.restart()
        phases.restart()
        with phases.phase("data"):
            inputs, targets = (tensor.contiguous().clone() for tensor in data.tensors)
        script.train_step(model, optimizer, inputs, targets)
        spans = phases.spans()
        del inputs, targets
    tape.keeps_kernels = False
    owned, owners = _owned(tape, phases)
    return reported(tape, spans, before, owned, owners)


def reported(
    tape: Tape,
    spans: list[tuple[str, int, int]],
    before: dict[int, tuple[str, int]],
    owned: dict[int, tuple[str, int]],
    owners: dict[str, int],
) -> dict[str, Any]:
    """The trace of the step on the tape: `spans` are its phases, `before` has owner and bytes by address of what was
    allocated at its beginning, `owned` the same of what outlives it, and `owners` the bytes of each owner."""
    with WITHOUT_MODES.get()():
        sizes = {} if tape.work.on_gpu else temporaries(kernel for _, kernel in tape.kernels)
    for time, kernel in tape.kernels:
        if sizes.get(kernel.key):
            tape.needs(time, sizes[kernel.key])
    after = {address: "other" for address in tape.allocated if address in before}  # what the script keeps
    after |= {address: owner for address, (owner, _) in owned.items()}
    fields = curve(tape.allocations, spans, before, after, {}, 0)
    return {
        "step": {name: fields[name] for name in ("times", "seconds", "phases", "owners", "peak", "at_peak")},
        "phase_at_peak": _phase_at_peak(fields),
        "owners": owners,
        "flops": tape.flops.executed,
        "recomputed_flops": tape.flops.recomputed,
        "calls": [[call.op, call.bytes, call.ranks, call.parts] for call in tape.calls],
        "program": tape.work.program(spans),
        "temporaries": sizes,
        "allocator": [peaks(tape.history, workspace) for workspace in (BEFORE_HOPPER, FROM_HOPPER)]
        if tape.work.on_gpu
        else [],
    }


def _phase_at_peak(fields: dict[str, Any]) -> str:
    sums = [sum(sizes) for sizes in zip(*fields["owners"].values())]
    time = fields["times"][sums.index(max(sums))]
    return next((name for name, start, end in reversed(fields["phases"]) if start <= time <= end), "")


def _owned(tape: Tape, phases: Phases) -> tuple[dict[int, tuple[str, int]], dict[str, int]]:
    """Owner and bytes by address of everything that outlives a step, and the bytes of each owner."""
    census = TapeCensus(tape)
    owned = states_of([*phases.models], [*phases.optimizers])
    owned["communication"] = (
        buffer
        for model in phases.models
        for part in model.modules()
        if isinstance(part, Replica)
        for buffer in part.buckets
    )
    owned["other"] = (buffer for model in phases.models for buffer in model.buffers())
    owners = {owner: census.add(tensors, owner) for owner, tensors in owned.items()}
    return {address: (owner, size) for address, (owner, size) in census.counted.items() if size}, owners
