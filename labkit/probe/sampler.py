"""Profiles a few steps with torch's profiler: an early one, every 50th (by default), and those requested during the
run."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.journal import Guard, Journal
from labkit.probe.memory import MemoryWatch, Snapshots, give_back_memory
from labkit.probe.patches import Patches
from labkit.probe.timeline import OF_PROBE, Allocation, Row, collectives, curve, timeline
from labkit.probe.torch_private import (
    EVENT_TYPE,
    KINETO_EVENTS,
    KINETO_RESULTS,
    KINETO_TREE,
    LOG_LEVEL,
    PROFILER_ENABLED,
    MissingName,
)
from labkit.probe.traffic import TrafficWatch
from labkit.record import clock as run_clock
from labkit.record.stacks import wait_for_other_threads

# ---- torch's profiler for one step


_BRIEF = 3_000  # ns; shorter events are ignored
_ERRORS_ONLY = 2
_APART = 50_000  # maximum ns between two readings of one moment; more means an interruption
_TRIES = 20


def moment(clock: CpuClock | CudaClock) -> tuple[run_clock.SystemMoment, Any]:
    """One moment by the system clock and as a mark; repeated if the process was interrupted in between.

    The profile has system times and the phases have marks; the time between the two readings shifts one against the
    other.
    """
    now, mark = run_clock.SystemMoment.now(), clock.mark()
    for _ in range(_TRIES):
        if run_clock.SystemMoment.now().monotonic_ns - now.monotonic_ns <= _APART:
            break
        clock.release([mark])
        now, mark = run_clock.SystemMoment.now(), clock.mark()
    return now, mark


def taken(profiler: Any) -> Any:
    """The results of a profiler that was stopped; the profiler no longer refers to them."""
    inner = profiler.profiler
    results = KINETO_RESULTS.of(inner)
    setattr(inner, KINETO_RESULTS.attribute, None)
    return results


def rows_of(results: Any) -> Iterator[Row]:
    """The profiler's events without very short ones, which are the majority; each access to an event costs
    microseconds.
    """
    cuda = torch.autograd.DeviceType.CUDA
    for event in KINETO_EVENTS.of(results)():
        duration = event.duration_ns()
        if duration >= _BRIEF:
            start = event.start_ns()
            yield Row(event.name(), start, start + duration, event.start_thread_id(), event.device_type() == cuda)


_RECEIVING = "enumerate(DataLoader)#_MultiProcessing"  # torch's name of a request to a loader with workers


def allocations_of(results: Any, device: torch.device) -> list[Allocation]:
    """The profiler's allocations on a device, in no order, without the batches that a loader receives from its workers:
    those that it returns are known (`WorkersBatches`), and the others are its own."""
    kinds, found = EVENT_TYPE.get(), []
    rest = list(KINETO_TREE.of(results)())
    while rest:
        event = rest.pop()
        rest.extend(event.children)
        if event.tag == kinds.Allocation and _is_same(event.extra_fields.device, device):
            inside, around = [], event.parent
            while around is not None:
                if around.tag == kinds.TorchOp:  # else a span of the GPU, in which this was called by chance
                    inside.append(around.name)
                around = around.parent
            is_received = event.extra_fields.alloc_size > 0 and any(name.startswith(_RECEIVING) for name in inside)
            if OF_PROBE not in inside and not is_received:
                fields = event.extra_fields
                found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, tuple(inside)))
    return found


def _is_same(one: torch.device, device: torch.device) -> bool:
    return one.type == device.type and (device.type == "cpu" or one.index == device.index)


class LogLevel:
    """The log level of torch's C++ code. During memory profiling its CPU allocator would warn about every older
    block."""

    def __init__(self) -> None:
        library = Path(torch.__file__).with_name("lib") / "libc10.so"
        try:
            self._level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), LOG_LEVEL.attribute)
        except (OSError, ValueError):
            raise MissingName(LOG_LEVEL.name, LOG_LEVEL.part) from None
        self._usual: int | None = None

    def errors_only(self) -> None:
        if self._level.value < _ERRORS_ONLY:
            self._usual, self._level.value = self._level.value, _ERRORS_ONLY

    def restore(self) -> None:
        if self._usual is not None:
            self._level.value, self._usual = self._usual, None


# ---- profiles a few steps


_EARLY = 8  # a typical step that is profiled even in a short run
_LOOK = 0.2  # seconds between two polls for a request
_ON_LINUX = sys.platform == "linux"
_ZERO_GRAD = "Optimizer.zero_grad#"
# torch takes a span of the GPU, such as that of a collective, for an operation of the main thread, and backward's
# operations for parts of it. If it is in no operation of the CPU, torch's tree of events has neither it nor them.
_AROUND = "profiled step"


class StepSampler:
    """Receives the end of each step and profiles every `every`th one; 0: only an early step and requested ones."""

    def __init__(
        self,
        journal: Journal,
        patches: Patches,
        run: str | os.PathLike[str],
        memory: MemoryWatch,
        traffic: TrafficWatch | None,
        every: int,
    ):
        self._journal, self._memory, self._traffic = journal, memory, traffic
        self._every = every
        self._request, self._snapshots = Path(run) / "capture.json", Snapshots(journal, run)
        self._script_profiles: Callable[[], bool] = PROFILER_ENABLED.get()
        self._curves = Guard(journal, "memory curves")
        self._profiler: Any = None
        self._around: Any = None  # the operation in which a profiled step is, see _AROUND
        self._off = self._starting = self._with_memory = False
        self._asks_snapshot = self._with_snapshot = False  # the second: in the step that is about to be profiled
        self._seen, self._next_look, self._asked = 0, 0.0, 0
        self._begun: tuple[run_clock.SystemMoment, Any] = run_clock.SystemMoment.now(), None  # and its mark
        self._held: tuple[dict[int, tuple[str, int]], dict[str, int]] = {}, {}
        self._released: dict[int, float] = {}
        self._log_level: LogLevel | None = Guard(journal, "allocator warnings")(LogLevel) if _ON_LINUX else None
        self._ended = 0  # number of finished profiles
        self._unended: list[Any] = []
        self._off = not all(
            (
                patches.wrap("open records", "torch.autograd.profiler.record_function.__enter__", self._entering),
                patches.wrap("open records", "torch.autograd.profiler.record_function.__exit__", self._leaving),
                patches.wrap("timelines", "torch.autograd.profiler.profile.__init__", self._creating),
            )
        )

    @property
    def profiles_memory(self) -> bool:
        """Whether a profile with allocations is active."""
        return self._profiler is not None and self._with_memory

    def step_ends(self, step: int, phases: Sequence[tuple[str, Any, Any]], clock: CpuClock | CudaClock) -> bool:
        """Step `step` has ended; its phases lie between marks of the clock. Returns whether profiling took time outside
        of any step.
        """
        spent = self._profiler is not None
        if spent:
            self._finish(step, phases, clock)
            give_back_memory()
        if self._is_due(step + 1):
            self._start(clock)
            spent = True
        return spent

    def give_up(self) -> None:
        """Discards the current profile, because its step is not a typical one or the script ends."""
        if self._profiler is not None:
            self._stop()
            self._memory.batches.changes()  # they are not noted any longer
            self._snapshots.end()

    def _creating(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stops and disables profiling when the script creates a profiler itself."""

        def init(profiler: Any, *args: Any, **kwargs: Any) -> None:
            if not self._starting:
                self._off = True
                self.give_up()
            original(profiler, *args, **kwargs)

        return init

    # A `record_function` that is open when a profile ends must not exit, because torch would write to the freed
    # profile. The end of a step is reported from within the optimizer's record. Such records are stored, because
    # freeing one also ends it.

    def _entering(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def begin(record: Any) -> Any:
            record.labkit_began = self._ended if self._profiler is not None else None
            return enter(record)

        return begin

    def _leaving(self, leave: Callable[..., None]) -> Callable[..., None]:
        def end(record: Any, *error: Any) -> None:
            began = getattr(record, "labkit_began", None)
            if began is None or began == self._ended:
                leave(record, *error)
            else:
                self._unended.append(record)

        return end

    # ---- selection of steps

    def _is_due(self, step: int) -> bool:
        if self._off or self._script_profiles() or threading.current_thread() is not threading.main_thread():
            return False  # kineto works only in the main thread, and prints warnings elsewhere
        captured = self._was_requested(step)
        self._with_memory = (captured or self._memory.is_due) and not self._curves.off
        usual = self._every and (step == _EARLY or step % self._journal.spaced(self._every) == 0)
        return bool(captured or self._with_memory or usual)

    def _was_requested(self, step: int) -> bool:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            try:
                changed = self._request.stat().st_mtime_ns
                if changed != self._seen:
                    self._seen = changed
                    asked = json.loads(self._request.read_text())
                    self._asked, self._asks_snapshot = int(asked["step"]), bool(asked.get("snapshot"))
            except (OSError, ValueError, KeyError, TypeError):
                pass  # no request
        if not self._asked or step < self._asked:
            return False
        self._asked, self._with_snapshot = 0, self._asks_snapshot
        return True

    # ---- profiling

    def _start(self, clock: CpuClock | CudaClock) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        on_gpu = clock.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if on_gpu:
            torch.cuda.synchronize(clock.device)
            if self._with_snapshot:
                self._snapshots.begin()
                self._with_snapshot = False
        if self._with_memory:
            self._released = {}
            self._held = self._memory.held(self._released)
            if self._log_level:
                self._log_level.errors_only()
        self._starting = True
        try:
            self._profiler = profile(activities=activities, profile_memory=self._with_memory)
            self._profiler.start()
            if self._with_memory:
                self._around = record_function(_AROUND)
                self._around.__enter__()
        finally:
            self._starting = False
        self._begun = moment(clock)
        if self._traffic:
            self._traffic.keep_sends()

    def _finish(self, step: int, phases: Sequence[tuple[str, Any, Any]], clock: CpuClock | CudaClock) -> None:
        on_gpu = clock.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(clock.device)
        results = self._stop()
        self._snapshots.end(step)
        begun, first = self._begun
        if begun.clock_was_set():
            clock.release([first])
            self._held = {}, {}
            return  # profiler and phases cannot be put on one time axis

        def nanoseconds(mark: Any) -> int:
            return begun.ns + round(clock.seconds(first, mark) * 1e9)

        spans = [(name, nanoseconds(start), nanoseconds(end)) for name, start, end in phases]
        clock.release([first])
        rows = list(rows_of(results))
        allocations, after = None, dict[int, str]()
        if self._with_memory:
            after = {address: owner for address, (owner, _) in self._memory.held()[0].items()}
            allocations = self._curves(allocations_of, results, clock.device)
            batches = self._memory.batches.changes()
            allocations = None if allocations is None else allocations + batches
        del results  # now: kineto crashes if the garbage collector frees an old result during a new profile
        recorded = self._traffic.operations_since(spans[0][1]) if self._traffic else []
        t0 = {"t0": begun.seconds(spans[0][1])}
        self._journal.write("timeline", step=step, **timeline(rows, spans, recorded, clock.device.type) | t0)
        if allocations is not None:
            freed = max((row.end for row in rows if row.name.startswith(_ZERO_GRAD)), default=0)
            before, apart = self._held
            seen = collectives(rows, recorded), self._memory.alive(), self._released
            self._memory.sampled(step, curve(allocations, spans, before, after, apart, freed, *seen) | t0)
        self._held = {}, {}

    def _stop(self) -> Any:
        """Ends the profile and returns kineto's results."""
        profiler, self._profiler = self._profiler, None
        if self._around is not None:
            self._around.__exit__(None, None, None)
            self._around = None
        # A gloo thread notes the end of an operation for the profiler after it has woken the thread that waits for it.
        # If the profile was stopped by then, torch writes to freed memory (observed: SIGSEGV, corrupted heap).
        wait_for_other_threads()
        profiler.stop()
        self._ended += 1
        if self._log_level:
            self._log_level.restore()
        return taken(profiler)
