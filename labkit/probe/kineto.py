"""Torch's profiler for one step: when it may stop, what it recorded, and which moment it began at."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.parts import MissingName
from labkit.probe.timeline import Allocation, Row
from labkit.probe.torch_private import EVENT_TYPE, KINETO_EVENTS, KINETO_RESULTS, KINETO_TREE, LOG_LEVEL
from labkit.record import clock as run_clock

_BRIEF = 3_000  # ns; shorter events are ignored
_ERRORS_ONLY = 2
_UNREST = 0.5  # maximum seconds to wait for other threads
_LOOKS = 5  # consecutive checks, 1 ms apart, in which all threads sleep: a thread that was just woken shows up late
_MOMENT = 0.02  # seconds to wait if the state of threads is unknown
_APART = 50_000  # maximum ns between two readings of one moment; more means an interruption
_TRIES = 20
_BLOCK = 512  # bytes to which torch's allocator rounds up


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


def wait_for_other_threads() -> None:
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


def allocations_of(
    results: Any, device: torch.device, before: Collection[int], after: Mapping[int, int]
) -> list[Allocation]:
    """The profiler's allocations on a device, in no order. `before` are known addresses that were allocated when it
    began, `after` has the bytes by address of those at its end."""
    allocation, found = EVENT_TYPE.get().Allocation, []
    rest = list(KINETO_TREE.of(results)())
    while rest:
        event = rest.pop()
        rest.extend(event.children)
        if event.tag == allocation and _is_same(event.extra_fields.device, device):
            inside, around = [], event.parent
            while around is not None:
                inside.append(around.name)
                around = around.parent
            found.append(
                Allocation(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, tuple(inside))
            )
    if device.type == "cuda":
        found += outside(found, _changes(results, device.index), before, after)
    return found


def _is_same(one: torch.device, device: torch.device) -> bool:
    return one.type == device.type and (device.type == "cpu" or one.index == device.index)


def _changes(results: Any, gpu: int) -> Iterator[tuple[int, int]]:
    """Time and bytes of every allocation (negative: release) of the memory of a GPU, without addresses."""
    cuda = torch.autograd.DeviceType.CUDA
    for event in KINETO_EVENTS.of(results)():
        if event.name() == "[memory]" and event.device_type() == cuda and event.device_index() == gpu:
            yield event.start_ns(), event.nbytes()


def outside(
    found: Sequence[Allocation],
    changes: Iterable[tuple[int, int]],
    before: Collection[int],
    after: Mapping[int, int],
) -> list[Allocation]:
    """What happened outside of any operation: torch leaves allocations and releases of GPU memory there out of its tree
    of events, and otherwise reports no addresses.

    What is allocated there has an address of `after` whose allocation is not known, if its size fits, and else a
    negative one. What is released is the newest block of its size of which no release is known, and which is not in
    `after`.
    """
    ordered = sorted(found, key=lambda one: one.time)
    missing = Counter(changes) - Counter((one.time, one.size) for one in ordered)
    later: dict[int, Allocation] = {}  # by address, what happens next
    unknown: list[tuple[int, int, int, float]] = []  # time, address and bytes of blocks, and when it is used again
    for one in reversed(ordered):
        following = later.get(one.address)
        if one.size > 0 and (following.size > 0 if following else one.address not in after):
            unknown.append((one.time, one.address, one.size, following.time if following else math.inf))
        later[one.address] = one
    newest = {one.address: one.size for one in ordered}  # negative: the address is free, as far as it is known
    made = [address for address in after if newest.get(address, 0 if address in before else -1) < 0]
    added: list[Allocation] = []
    for moment, size in sorted(missing.elements()):
        fitting = [one for one in unknown if one[2] == -size and one[0] < moment <= one[3]]
        if size > 0 and (address := next((one for one in made if 0 <= size - after[one] < _BLOCK), None)) is not None:
            made.remove(address)
            added.append(Allocation(moment, address, size))
        elif size > 0:
            added.append(Allocation(moment, -1 - len(added), size))
            unknown.append((moment, added[-1].address, size, math.inf))
        elif fitting:  # else the block is from before the profile
            unknown.remove(max(fitting))
            added.append(Allocation(moment, max(fitting)[1], size))
    return added


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
        """Suppresses warnings until `restore`."""
        if self._level.value < _ERRORS_ONLY:
            self._usual, self._level.value = self._level.value, _ERRORS_ONLY

    def restore(self) -> None:
        """Restores the previous level."""
        if self._usual is not None:
            self._level.value, self._usual = self._usual, None
