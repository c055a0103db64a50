"""Measures what one rank computes in a step: the script runs for some steps as it is, with real tensors and real data,
in a process group without communication (`silent`).

What is measured is the CPU time of the thread that computes, which does not pass while other processes use the machine.
A script that other threads or processes work for (emulated data parallel, workers of a data loader) waits for them, and
is measured in real time instead.

As many ranks as there are cores are measured at the same time, so that they share caches and memory as in a run. If
something else uses the machine, they are kept waiting, which tells how much of it is in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit.prediction.tracing import world
from labkit.prediction.tracing.rank import Phases
from labkit.prediction.tracing.torch_private import WORLD
from labkit.prediction.tracing.world import load
from labkit.probe.memory import keep_memory
from labkit.probe.torch_private import NEXT_BATCH

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


_FIRST = 4  # steps before the first measured one: optimizer state exists, buckets are final, caches are warm
_LEAST, _MOST = 9, 60  # measured steps
_SAMPLES = 15  # of them, that are returned
_MESSAGES = ("send", "recv")

Item = list[Any]  # of a program


# ---- what a rank computes, between its collectives


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
