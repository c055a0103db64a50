"""The critical path through the profiled steps of a rank, and what a step would take if a part of it took no time.

The steps are replayed as a graph. The CPU launches kernels one after another; a kernel starts when the CPU has launched
it, the kernel before it in its stream has ended, and what it waits for in another stream has ended; the CPU goes on
after a synchronization when the kernel that it waits for has ended. A collective waits for the last kernel of another
stream that was launched before it, as torch's process groups do. A trace does not say for which event a stream waits: a
kernel that starts later than all this explains, just after one in another stream has ended, waited for that one. What
remains unexplained stays as it was, so that the replay takes as long as the steps did. With a part left out, the result
is an estimate: waits that did not matter in the profiled steps are not known, and delays may change with the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.foreign.chrome import Spans

CPU, DELAY = -1, -2  # parts of the path beside the kinds of kernels
_MOST = 60_000  # kernels that are replayed
_NEAR = 20e-6  # seconds from the end of a kernel to the start of one that waited for it
_UNEXPLAINED = 5e-6  # seconds that a kernel starts later than what it is known to wait for
_AGREES = 0.02  # the replay of what was profiled differs by a smaller share
_KERNELS = 3  # names of kernels that are left out, one at a time


@dataclass
class Kernel:
    """A kernel in the order of launches: `cpu` is the time of the CPU since the launch or wait before it, `before` the
    kernel before it in its stream, `other` one that it waits for in another stream (-1: none), `delay` what remains.
    After its launch, the CPU waits for the kernel `awaited`, if that is not -1, and for `after` seconds more."""

    kind: int
    name: int
    lasts: float
    cpu: float
    before: int
    other: int
    delay: float = 0.0
    binding: int = -1  # the kernel that it waited for last, -1: the CPU
    awaited: int = -1
    after: float = 0.0


@dataclass(frozen=True)
class Path:
    """Seconds per step. `by_part` are those of the path: by kind of kernel, of the CPU (`CPU`), and of unexplained
    delays (`DELAY`). `without` is what a step is estimated to take if all of this part took no time; `kernels` the same
    for the kernels of one name, with their seconds on the path."""

    seconds: float
    by_part: dict[int, float]
    without: dict[int, float]
    kernels: list[tuple[int, float, float]]


def critical_path(
    spans: Spans,
    kinds: NDArray[np.int64],
    communication: int,
    waits: Collection[tuple[float, float]],
    steps: Collection[tuple[int, float, float]],
) -> Path | None:
    """The path through some kernels of these kinds; None if the trace does not have what it needs, or if the replay
    does not take as long as the steps did."""
    begin, count = min((start for _, start, _ in steps), default=None), max(1, len(steps))
    known = np.isfinite(spans.origin)
    if begin is None or not len(spans) or len(spans) > _MOST or not known.all():
        return None
    order = np.lexsort((spans.start, spans.origin))
    spans, kinds = spans.where(order), kinds[order]
    kernels = _graph(spans, kinds.tolist(), communication, waits, begin)
    total, ends = _replayed(kernels)
    measured = float(spans.end.max()) - begin
    if abs(total - measured) > _AGREES * measured:
        return None
    by_part, by_name = _walked(kernels, ends)
    parts = {*by_part} - {DELAY}
    without = {part: _replayed(kernels, {part})[0] / count for part in parts}
    largest = sorted(by_name, key=lambda name: -by_name[name])[:_KERNELS]
    return Path(
        total / count,
        {part: seconds / count for part, seconds in by_part.items()},
        without,
        [(name, by_name[name] / count, _replayed(kernels, names={name})[0] / count) for name in largest],
    )


def _graph(
    spans: Spans, kinds: list[int], communication: int, waits: Collection[tuple[float, float]], begin: float
) -> list[Kernel]:
    """The kernels with what they wait for. `spans` are in the order of launches."""
    start, end, origin = spans.start.tolist(), spans.end.tolist(), spans.origin.tolist()
    lane, name = spans.lane.tolist(), spans.name.tolist()
    latency = max(0.0, min(began - launched for began, launched in zip(start, origin)))
    by_end = sorted(range(len(end)), key=end.__getitem__)
    ends = [end[number] for number in by_end]
    last: dict[int, int] = {}  # by stream
    pending = sorted(waits)
    kernels: list[Kernel] = []
    at = begin
    for number in range(len(start)):
        while pending and pending[0][0] <= origin[number]:
            at = _add_wait(kernels, pending.pop(0), at, ends, by_end)
        before = last.get(lane[number], -1)
        other = -1
        if kinds[number] == communication:
            streams = [
                latest for stream, latest in last.items() if stream != lane[number] and end[latest] <= start[number]
            ]
            other = max(streams, default=-1)
        kernel = Kernel(
            kinds[number], name[number], end[number] - start[number], max(0.0, origin[number] - at), before, other
        )
        at = max(at, origin[number])
        ready = [(at + latency, -1), *((end[first], first) for first in (before, other) if first >= 0)]
        if start[number] - max(ready)[0] > _UNEXPLAINED:
            nearest = bisect_right(ends, start[number] + 1e-6) - 1
            candidate = by_end[nearest] if nearest >= 0 else -1
            if 0 <= candidate < number and start[number] - end[candidate] < _NEAR and lane[candidate] != lane[number]:
                kernel.other = candidate
                ready.append((end[candidate], candidate))
        kernel.delay = start[number] - max(ready)[0] + (latency if max(ready)[1] < 0 else 0.0)
        kernel.binding = max(ready)[1]
        kernels.append(kernel)
        last[lane[number]] = number
    return kernels


def _add_wait(
    kernels: list[Kernel], wait: tuple[float, float], at: float, ends: list[float], by_end: list[int]
) -> float:
    """Lets the CPU wait after the last kernel for the one that ended last before the end of the wait; returns when the
    CPU goes on."""
    began, ended = wait
    if not kernels or ended <= at:
        return at
    nearest = bisect_right(ends, ended + 1e-6) - 1
    while nearest >= 0 and by_end[nearest] >= len(kernels):
        nearest -= 1
    kernel = kernels[-1]
    if nearest >= 0 and ends[nearest] > max(began, at):
        kernel.awaited = by_end[nearest]
        kernel.after = max(0.0, ended - ends[nearest])
    else:
        kernel.after += ended - at
    return ended


def _replayed(
    kernels: list[Kernel], parts: Collection[int] = (), names: Collection[int] = ()
) -> tuple[float, list[float]]:
    """When the last kernel ends, and when each does, in seconds after the begin, if some parts and the kernels of some
    names take no time."""
    cpu_takes = 0.0 if CPU in parts else 1.0
    at, ends = 0.0, list[float]()
    for kernel in kernels:
        at += cpu_takes * kernel.cpu
        first = at
        for waited in (kernel.before, kernel.other):
            if waited >= 0 and ends[waited] > first:
                first = ends[waited]
        lasts = 0.0 if kernel.kind in parts or kernel.name in names else kernel.lasts
        ends.append(first + kernel.delay + lasts)
        if kernel.awaited >= 0:
            at = max(at, ends[kernel.awaited])
        at += cpu_takes * kernel.after
    return max(ends), ends


def _walked(kernels: list[Kernel], ends: list[float]) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of the path by part, and by the name of the kernel, backwards from the kernel that ends last."""
    by_part, by_name = defaultdict[int, float](float), defaultdict[int, float](float)
    number = max(range(len(ends)), key=ends.__getitem__)
    while number >= 0:
        kernel = kernels[number]
        by_part[kernel.kind] += kernel.lasts
        by_name[kernel.name] += kernel.lasts
        by_part[DELAY] += kernel.delay
        if kernel.binding >= 0:
            number = kernel.binding
            continue
        by_part[CPU] += kernel.cpu  # back along the CPU, up to where it waited for a kernel
        number -= 1
        while number >= 0:
            by_part[CPU] += kernels[number].after
            if kernels[number].awaited >= 0:
                number = kernels[number].awaited
                break
            by_part[CPU] += kernels[number].cpu
            number -= 1
    return by_part, by_name
