"""Profiles a few steps: an early one, every 50th (by default), and those requested during the run.

Torch's profiler runs only during such a step. Its result becomes a `timeline` event and, for the early step and
requested ones, a `memory_step` event. A profile is discarded if an evaluation begins in its step, and profiling is
disabled when the script uses a profiler itself. A training loop in a thread other than the main thread is not profiled.

The file `capture.json` in the run folder requests a step: {"step": N, "snapshot": true or false}; a rank that is past
that step profiles its next one. A snapshot is torch's record of the CUDA allocator, `snapshots/rank<r>-step<n>.pickle`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.heap import give_back_memory
from labkit.probe.journal import Guard, Journal
from labkit.probe.kineto import LogLevel, allocations_of, moment, rows_of, taken, wait_for_other_threads
from labkit.probe.memory import MemoryWatch
from labkit.probe.patches import Patches
from labkit.probe.snapshots import Snapshots
from labkit.probe.timeline import collectives, curve, timeline
from labkit.probe.torch_private import PROFILER_ENABLED
from labkit.probe.traffic import TrafficWatch
from labkit.record import clock as run_clock

_EARLY = 8  # a typical step that is profiled even in a short run
_LOOK = 0.2  # seconds between two polls for a request
_ON_LINUX = sys.platform == "linux"
_ZERO_GRAD = "Optimizer.zero_grad#"


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
        self._off = self._starting = self._with_memory = self._with_snapshot = False
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
            held = self._memory.held()[0]
            after = {address: owner for address, (owner, _) in held.items()}
            sizes = {address: size for address, (_, size) in held.items()}
            allocations = self._curves(allocations_of, results, clock.device, self._held[0], sizes)
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
        wait_for_other_threads()
        profiler.stop()
        self._ended += 1
        if self._log_level:
            self._log_level.restore()
        return taken(profiler)
