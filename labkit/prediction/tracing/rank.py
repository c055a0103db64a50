"""One rank of a strategy's script: its step traced without data, or what it computes measured with them.

A trace builds the script's model and optimizer, runs some steps, and reports the last one.

To be measured, the script runs for some steps as it is, with real tensors and real data, in a process group without
communication (`Silent`). What is measured is the CPU time of the thread that computes, which does not pass while other
processes use the machine. A script that other threads or processes work for (emulated data parallel, workers of a data
loader) waits for them, and is measured in real time instead. As many ranks as there are cores are measured at the same
time, so that they share caches and memory as in a run. If something else uses the machine, they are kept waiting, which
tells how much of it is in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise, repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from labkit.prediction.devices import BEFORE_HOPPER, FROM_HOPPER
from labkit.prediction.tracing import world
from labkit.prediction.tracing.kernels import peaks, temporaries
from labkit.prediction.tracing.tape import Tape, TapeCensus, of_a_sample, scoped
from labkit.prediction.tracing.torch_private import FAKE_MODE, WITHOUT_MODES, WORLD
from labkit.prediction.tracing.world import Replica, batch, load
from labkit.probe.memory import keep_memory, states_of
from labkit.probe.timeline import curve
from labkit.probe.torch_private import NEXT_BATCH

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
    for moment, kernel in tape.kernels:
        if sizes.get(kernel.key):
            tape.needs(moment, sizes[kernel.key])
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


# ---- a process group without communication: every collective is over at once, and leaves plausible values behind
#
# Ranks that share it with nobody run a script's real computation, with real tensors. What a rank would receive is made
# of what it has: its own part in place of everyone's, or else small random numbers, so that no computation meets
# uninitialised memory (denormal numbers, for example, are slow).
#
# torch calls the methods of a group by different names in different versions; both are here.

Tensors = Sequence[torch.Tensor]
Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]

_RECEIVED = 0.01  # standard deviation of random numbers


class Listener(Protocol):
    """Receives what a rank does with its process groups."""

    def started(self, op: str, size: int, ranks: list[int]) -> int:
        """An operation starts on `size` bytes, those of a `traffic` event: the whole tensor of an all-gather, a
        reduce-scatter or an all-to-all. `ranks` are those of the group, or the other end of a message. Returns the
        number of the operation."""

    def waited(self, number: int) -> None:
        """The script waits for an operation."""

    def paused(self) -> AbstractContextManager[None]:
        """What happens meanwhile is no part of the script's computation."""


class _Over(Work):
    """An operation that is over. It refers to its result until that is asked for or waited for: with memory that is
    never freed, every step would allocate new pages, which takes time."""

    def __init__(self, number: int, listener: Listener, result: Any):
        super().__init__()
        self._number, self._listener, self._result = number, listener, result

    def wait(self, timeout: Any = None) -> bool:
        self._listener.waited(self._number)
        self.forget()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        self.forget()
        return future

    def forget(self) -> None:
        """The result is not needed any more."""
        self._result = None


def _last(works: Sequence[_Over]) -> Work:
    """The last of some operations of a group: when it is over, so are the others."""
    for work in works[:-1]:
        work.forget()
    return works[-1]


class Silent(dist.ProcessGroup):
    """The group, as torch calls it."""

    def __init__(self, rank: int, size: int, listener: Listener):
        super().__init__(rank, size)
        self._listener = listener
        self._works: list[_Over] = []  # torch refers to some of them from C++ only

    def getBackendName(self) -> str:
        return "silent"

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return WORLD.get().pg_names[self]

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._starts("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._starts("broadcast", tensors, tensors)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._starts("reduce", tensors, tensors)

    def barrier(self, opts: Any = None) -> Work:
        return self._starts("barrier", [], [])

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._starts("all_gather", outputs[0], outputs, zip(outputs[0], repeat(inputs[0])))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Over:
        parts = output.view(-1).chunk(self.size())
        return self._starts("all_gather", [output], [output], zip(parts, repeat(tensor)))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return _last([self.all_gather_single(*pair) for pair in zip(outputs, inputs)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """As gloo does it: a copy of each part is all-reduced, one after the other."""
        parts = [part.clone() for part in inputs[0]]
        own = [(outputs[0], parts[self.rank()])]
        return _last([self._starts("all_reduce", [part], outputs, own) for part in parts])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Over:
        own = tensor.reshape(-1).chunk(self.size())[self.rank()]
        return self._starts("reduce_scatter", [tensor], [output], [(output, own)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return _last([self.reduce_scatter_single(*pair) for pair in zip(outputs, inputs)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._starts("all_to_all", inputs, outputs, zip(outputs, inputs))

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, *sizes: Any) -> Work:
        return self._starts("all_to_all", [tensor], [output], [(output, tensor)])

    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        return self._starts("send", tensors, tensors, peer=peer)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        self._fill(tensors)
        return self._starts("recv", tensors, tensors, peer=peer)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        if not inputs:
            self._fill(outputs)
        own = [(outputs[0], inputs[0][self.rank()])] if inputs else []
        return self._starts("scatter", outputs, outputs, own)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        parts = outputs[0] if outputs else []
        return self._starts("gather", inputs, outputs, zip(parts, repeat(inputs[0])))

    def _fill(self, tensors: Tensors) -> None:
        """Fills what comes from another rank."""
        with self._listener.paused(), torch.no_grad():
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.normal_(0, _RECEIVED)
                else:
                    tensor.fill_(1)  # pipeline stages vote with it, and agree

    def _starts(self, op: str, tensors: Tensors, result: Any, copies: Copies = (), peer: int | None = None) -> _Over:
        """An operation on `tensors`; `copies` are the outputs to fill, each with what it is filled with."""
        with self._listener.paused():
            for output, tensor in copies:
                count = min(output.numel(), tensor.numel())
                output.view(-1)[:count].copy_(tensor.reshape(-1)[:count])
            ranks = dist.get_process_group_ranks(self)
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            number = self._listener.started(op, size, ranks if peer is None else [ranks[peer]])
            self._works.append(_Over(number, self._listener, result))
        return self._works[-1]


def join(rank: int, ranks: int, listener: Listener) -> None:
    """From now on, `dist.init_process_group` creates this group, in which this process is rank `rank` of `ranks`."""

    def create(store: Any, group_rank: int, size: int, timeout: Any) -> Silent:
        return Silent(group_rank, size, listener)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original("silent", rank=rank, world_size=ranks, store=dist.HashStore())

    dist.Backend.register_backend("silent", create, devices=["cpu"])
    original, dist.init_process_group = dist.init_process_group, init_process_group


# ---- what a rank computes, between its collectives

_FIRST = 4  # steps before the first measured one: optimizer state exists, buckets are final, caches are warm
_LEAST, _MOST = 9, 60  # measured steps
_SAMPLES = 15  # of them, that are returned
_MESSAGES = ("send", "recv")

Item = list[Any]  # of a program


class _Enough(BaseException):
    """Ends the script."""


class _Steps:
    """The listener of a rank: what happened in each step, with the time of each event in nanoseconds by `clock`. Steps
    are measured for some seconds, if that gives neither too few nor too many."""

    def __init__(self, seconds: float, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._began = 0, 0
        self.programs: list[list[Item]] = []
        self._phases = Phases(self._now)
        self._events: list[tuple[int, Item]] = []
        self._paused = self._steps = self._number = self._end = 0
        self._nanoseconds = round(seconds * 1e9)

    def follow(self) -> None:
        """Installs the hooks, for the rest of the process."""
        self._phases.follow()
        self._phases.restart()
        register_optimizer_step_post_hook(self._stepped)
        fetch = NEXT_BATCH.get()

        def fetched(loader: Any) -> Any:
            with self._phases.phase("data"):
                return fetch(loader)

        NEXT_BATCH.replace(fetched)

    def started(self, op: str, size: int, ranks: list[int]) -> int:
        self._number += 1
        self._events.append((self._now(), ["start", self._number, op, size, ranks]))
        return self._number

    def waited(self, number: int) -> None:
        self._events.append((self._now(), ["wait", number]))

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - began

    def kept_waiting(self) -> float:
        """The share of the time of the measured steps in which the clock stood still, because the rank did not run."""
        measured, real = self._clock() - self._began[0], time.perf_counter_ns() - self._began[1]
        return max(0.0, 1 - measured / real)

    def _now(self) -> int:
        return self._clock() - self._paused

    def _stepped(self, *_: Any) -> None:
        """An optimizer has stepped; the outermost one ends the step."""
        if self._phases.inside:
            return
        self._steps += 1
        if self._steps > _FIRST:
            self.programs.append(_program(self._phases.spans(), self._events))
            if len(self.programs) >= _MOST or (len(self.programs) >= _LEAST and self._now() > self._end):
                raise _Enough
        elif self._steps == _FIRST:
            self._end = self._now() + self._nanoseconds
            self._began = self._clock(), time.perf_counter_ns()
        self._events = []
        self._phases.restart()


def compute(request: dict[str, Any], rank: int) -> list[Item]:
    """The program of one rank, what it does in a step, in order: ["compute", phase, [seconds of several steps]],
    ["start", number, operation, bytes, ranks], ["wait", number]. The last item is ["busy", share]: for how much of the
    time something else used the machine; 0 if other threads work for the script, which is then not known.

    `request` is that of `rank.trace`, with the `seconds` for which steps are measured, and `one_thread`, whether the
    thread of the script does all the work. Raises `RuntimeError` if the script ends before enough steps.
    """
    keep_memory()  # as in a run
    world.take_place(rank, request["ranks"])
    steps = _Steps(request["seconds"], time.thread_time_ns if request["one_thread"] else time.perf_counter_ns)
    join(rank, request["ranks"], steps)
    script = load(request["path"], request["source"])
    if hasattr(script, "STAGES"):
        world.stages_know_shapes(script, request["sample"], request["split"])
    torch.set_flush_denormal(True)
    steps.follow()
    with suppress(_Enough):
        script.main()
    if len(steps.programs) < _LEAST:
        raise RuntimeError(f"the script has {len(steps.programs) + _FIRST} steps, of {_LEAST + _FIRST} that are needed")
    return [*_samples(steps.programs), ["busy", steps.kept_waiting()]]


def _program(spans: list[tuple[str, int, int]], events: list[tuple[int, Item]]) -> list[Item]:
    """One step: its computation, cut at the events. What the script never waits for itself (the buckets of DDP, for
    which C++ waits) is over when its phase is."""
    items: list[Item] = []
    explicit = {item[1] for _, item in events if item[0] == "wait"}
    waiting = iter([*events, (spans[-1][2] + 1, [])])
    time, item = next(waiting)
    for phase, begin, end in spans:
        implicit = []
        while time <= end and item:
            if time > begin:
                items.append(["compute", phase, (time - begin) / 1e9])
            begin = max(begin, time)
            items.append(item)
            if item[0] == "start" and item[1] not in explicit and item[2] not in _MESSAGES:
                implicit.append(["wait", item[1]])
            time, item = next(waiting)
        items += [["compute", phase, (end - begin) / 1e9], *implicit]
    numbers = {item[1]: index for index, item in enumerate(started for started in items if started[0] == "start")}
    return [
        item if item[0] == "compute" else [item[0], numbers[item[1]], *item[2:]]
        for item in items
        if item[0] == "compute" or item[1] in numbers
    ]


def _samples(programs: list[list[Item]]) -> list[Item]:
    """The form of the last step, with the seconds of each computation in several steps of that form."""
    alike = [program for program in programs if _form(program) == _form(programs[-1])]
    chosen = alike[:: -(-len(alike) // _SAMPLES)]
    return [
        [*items[0][:2], [item[2] for item in items]] if items[0][0] == "compute" else items[0] for items in zip(*chosen)
    ]


def _form(program: list[Item]) -> list[Item]:
    return [item[:2] if item[0] == "compute" else item for item in program]
