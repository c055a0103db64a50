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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit.prediction.tracing import silent, world
from labkit.prediction.tracing.phases import Phases
from labkit.prediction.tracing.script import load
from labkit.probe.memory import keep_memory
from labkit.probe.torch_private import NEXT_BATCH

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
    silent.join(rank, request["ranks"], steps)
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
    numbers = {item[1]: index for index, item in enumerate(one for one in items if one[0] == "start")}
    return [
        item if item[0] == "compute" else [item[0], numbers[item[1]], *item[2:]]
        for item in items
        if item[0] == "compute" or item[1] in numbers
    ]


def _samples(programs: list[list[Item]]) -> list[Item]:
    """The form of the last step, with the seconds of each computation in several steps of that form."""
    alike = [one for one in programs if _form(one) == _form(programs[-1])]
    chosen = alike[:: -(-len(alike) // _SAMPLES)]
    return [
        [*items[0][:2], [item[2] for item in items]] if items[0][0] == "compute" else items[0] for items in zip(*chosen)
    ]


def _form(program: list[Item]) -> list[Item]:
    return [item[:2] if item[0] == "compute" else item for item in program]
