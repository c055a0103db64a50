"""Profiles a few steps: an early one, every 50th (by default), and those requested during the run.

Torch's profiler runs only during such a step. Its result becomes a `timeline` event and, for the early step and
requested ones, a `memory_step` event. A profile is discarded if an evaluation begins in its step, and profiling is
disabled when the script uses a profiler itself. A training loop in a thread other than the main thread is not profiled.

The file `capture.json` in the run folder requests a step: {"step": N, "snapshot": true or false}; a rank that is past
that step profiles its next one. A snapshot is torch's record of the CUDA allocator, `snapshots/rank<r>-step<n>.pickle`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.journal import Journal
from labkit.probe.memory import MemoryWatch
from labkit.probe.timeline import Allocation, Row, curve, timeline
from labkit.probe.traffic import TrafficWatch
from labkit.record import clock as run_clock

_EARLY = 8  # a typical step that is profiled even in a short run
_LOOK = 0.2  # seconds between two polls for a request
_BRIEF = 3_000  # ns; shorter events are ignored
_ERRORS_ONLY = 2
_UNREST = 0.5  # maximum seconds to wait for other threads
_LOOKS = 5  # consecutive checks, 1 ms apart, in which all threads sleep: a thread that was just woken shows up late
_MOMENT = 0.02  # seconds to wait if the state of threads is unknown
_APART = 50_000  # maximum ns between two readings of one moment; more means an interruption
_TRIES = 20
_ZERO_GRAD = "Optimizer.zero_grad#"


class StepSampler:
    """Receives the end of each step and profiles every `every`th one; 0: only an early step and requested ones."""

    def __init__(
        self,
        journal: Journal,
        run: str | os.PathLike[str],
        memory: MemoryWatch,
        traffic: TrafficWatch | None,
        every: int,
    ):
        self._journal, self._memory, self._traffic = journal, memory, traffic
        self._every = every
        self._request, self._snapshots = Path(run) / "capture.json", Path(run) / "snapshots"
        self._profiler: Any = None
        self._off = self._starting = self._with_memory = self._with_snapshot = False
        self._seen, self._next_look, self._asked = 0, 0.0, 0
        self._begun: tuple[run_clock.SystemMoment, Any] = run_clock.SystemMoment.now(), None  # and its mark
        self._held: tuple[dict[int, tuple[str, int]], dict[str, int]] = {}, {}
        self._log_level = _LogLevel()
        self._ended = 0  # number of finished profiles
        self._unended: list[Any] = []
        self._protect_open_records()
        self._yield_to_script()

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
        if self._is_due(step + 1):
            self._start(clock)
            spent = True
        return spent

    def give_up(self) -> None:
        """Discards the current profile, because its step is not a typical one or the script ends."""
        if self._profiler is not None:
            self._stop()
            self._stop_snapshot()

    def _yield_to_script(self) -> None:
        """Stops and disables profiling when the script creates a profiler itself."""
        kind = torch.autograd.profiler.profile
        original = kind.__init__

        @functools.wraps(original)
        def init(profiler: Any, *args: Any, **kwargs: Any) -> None:
            if not self._starting:
                self._off = True
                self.give_up()
            original(profiler, *args, **kwargs)

        kind.__init__ = init

    def _protect_open_records(self) -> None:
        """Prevents a `record_function` that is open when a profile ends from exiting, because torch would write to the
        freed profile.

        The end of a step is reported from within the optimizer's record. Such records are stored, because freeing one
        also ends it.
        """
        kind = torch.autograd.profiler.record_function
        enter, leave = kind.__enter__, kind.__exit__

        def begin(record: Any) -> Any:
            record.labkit_began = self._ended if self._profiler is not None else None
            return enter(record)

        def end(record: Any, *error: Any) -> None:
            began = getattr(record, "labkit_began", None)
            if began is None or began == self._ended:
                leave(record, *error)
            else:
                self._unended.append(record)

        kind.__enter__, kind.__exit__ = begin, end

    # ---- selection of steps

    def _is_due(self, step: int) -> bool:
        if self._off or torch.autograd._profiler_enabled() or threading.current_thread() is not threading.main_thread():
            return False  # kineto works only in the main thread, and prints warnings elsewhere
        captured = self._was_requested(step)
        self._with_memory = captured or self._memory.is_due
        usual = self._every and (step == _EARLY or step % self._journal.spaced(self._every) == 0)
        return bool(self._with_memory or usual)

    def _was_requested(self, step: int) -> bool:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            try:
                changed = self._request.stat().st_mtime_ns
                if changed != self._seen:
                    self._seen = changed
                    asked = json.loads(self._request.read_text())
                    self._asked, self._with_snapshot = int(asked["step"]), bool(asked.get("snapshot"))
            except (OSError, ValueError, KeyError, TypeError):
                pass  # no request
        if not self._asked or step < self._asked:
            return False
        self._asked = 0
        return True

    # ---- profiling

    def _start(self, clock: CpuClock | CudaClock) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = clock.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if on_gpu:
            torch.cuda.synchronize(clock.device)
            if self._with_snapshot:
                torch.cuda.memory._record_memory_history(max_entries=200_000)
        if self._with_memory:
            self._held = self._memory.held()
            self._log_level.errors_only()
        self._starting = True
        try:
            self._profiler = profile(activities=activities, profile_memory=self._with_memory)
            self._profiler.start()
        finally:
            self._starting = False
        self._begun = _moment(clock)
        if self._traffic:
            self._traffic.keep_sends()

    def _finish(self, step: int, phases: Sequence[tuple[str, Any, Any]], clock: CpuClock | CudaClock) -> None:
        on_gpu = clock.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(clock.device)
        results = self._stop()
        self._stop_snapshot(step)
        begun, first = self._begun
        if begun.clock_was_set():
            clock.release([first])
            self._held = {}, {}
            return  # profiler and phases cannot be put on one time axis

        def nanoseconds(mark: Any) -> int:
            return begun.ns + round(clock.seconds(first, mark) * 1e9)

        spans = [(name, nanoseconds(start), nanoseconds(end)) for name, start, end in phases]
        clock.release([first])
        rows, allocations = (
            list(_rows(results)),
            (list(_allocations(results, clock.device.type)) if self._with_memory else []),
        )
        del results  # now: kineto crashes if the garbage collector frees an old result during a new profile
        recorded = self._traffic.operations_since(spans[0][1]) if self._traffic else []
        t0 = {"t0": begun.seconds(spans[0][1])}
        self._journal.write("timeline", step=step, **timeline(rows, spans, recorded, clock.device.type) | t0)
        if self._with_memory:
            freed = max((row.end for row in rows if row.name.startswith(_ZERO_GRAD)), default=0)
            before, apart = self._held
            after = {address: owner for address, (owner, _) in self._memory.held()[0].items()}
            self._memory.sampled(step, curve(allocations, spans, before, after, apart, freed) | t0)
        self._held = {}, {}

    def _stop(self) -> Any:
        """Ends the profile and returns kineto's results."""
        profiler, self._profiler = self._profiler, None
        _wait_for_other_threads()
        profiler.stop()
        self._ended += 1
        self._log_level.restore()
        results, profiler.profiler.kineto_results = profiler.profiler.kineto_results, None
        return results

    def _stop_snapshot(self, step: int | None = None) -> None:
        if not self._with_snapshot or self._memory.device.type != "cuda":
            return
        self._with_snapshot = False
        if step is not None:
            self._snapshots.mkdir(mode=0o700, exist_ok=True)
            rank = os.environ.get("RANK", "0")
            torch.cuda.memory._dump_snapshot(str(self._snapshots / f"rank{rank}-step{step}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


def _moment(clock: CpuClock | CudaClock) -> tuple[run_clock.SystemMoment, Any]:
    """One moment by the system clock and as a mark; repeated if the process was interrupted in between.

    The profile has system times and the phases have marks; the time between the two readings shifts one against the
    other.
    """
    moment, mark = run_clock.SystemMoment.now(), clock.mark()
    for _ in range(_TRIES):
        if run_clock.SystemMoment.now().monotonic_ns - moment.monotonic_ns <= _APART:
            break
        clock.release([mark])
        moment, mark = run_clock.SystemMoment.now(), clock.mark()
    return moment, mark


def _wait_for_other_threads() -> None:
    """Waits up to `_UNREST` seconds until no other thread of this process runs.

    A gloo thread first wakes the thread that waits for its operation, and then records the operation's end for the
    profiler. On a busy machine this can happen after the profile was stopped, so that torch writes to freed memory
    (observed: SIGSEGV, corrupted heap). If the system does not report the state of threads, it sleeps for `_MOMENT`
    seconds.
    """
    tasks, own, last = Path("/proc/self/task"), str(threading.get_native_id()), time.monotonic() + _UNREST
    if not tasks.is_dir():
        time.sleep(_MOMENT)
        return
    at_rest = 0
    while at_rest < _LOOKS and time.monotonic() < last:
        at_rest = at_rest + 1 if not any(_runs(task) for task in tasks.iterdir() if task.name != own) else 0
        time.sleep(0.001)


def _runs(task: Path) -> bool:
    """Whether a thread is running or runnable."""
    try:
        return (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].startswith("R")
    except OSError:
        return False  # it has just ended


def _rows(results: Any) -> Iterator[Row]:
    """The profiler's events without very short ones, which are the majority; each access to an event costs
    microseconds.
    """
    cuda = torch.autograd.DeviceType.CUDA
    for event in results.events():
        duration = event.duration_ns()
        if duration >= _BRIEF:
            start = event.start_ns()
            yield Row(event.name(), start, start + duration, event.start_thread_id(), event.device_type() == cuda)


def _allocations(results: Any, device: str) -> Iterator[Allocation]:
    from torch._C._profiler import _EventType

    rest = list(results.experimental_event_tree())
    while rest:
        event = rest.pop()
        rest.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == device:
            inside, around = [], event.parent
            while around is not None:
                inside.append(around.name)
                around = around.parent
            yield Allocation(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, tuple(inside))


class _LogLevel:
    """The log level of torch's C++ code. During memory profiling its CPU allocator would warn about every older
    block."""

    def __init__(self) -> None:
        library = Path(torch.__file__).with_name("lib") / "libc10.so"
        self._level = (
            ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level") if library.is_file() else None
        )
        self._usual: int | None = None

    def errors_only(self) -> None:
        """Suppresses warnings until `restore`."""
        if self._level is not None and self._level.value < _ERRORS_ONLY:
            self._usual, self._level.value = self._level.value, _ERRORS_ONLY

    def restore(self) -> None:
        """Restores the previous level."""
        if self._usual is not None:
            self._level.value, self._usual = self._usual, None
