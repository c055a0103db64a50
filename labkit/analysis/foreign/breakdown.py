"""Where the time of one profiled rank went: computation, communication, copies and idle time of each step, the
kernels that ran in it, and the critical path through it.

The definitions are those of Holistic Trace Analysis (`get_temporal_breakdown`, `get_comm_comp_overlap`): intervals of
one kind are merged first, a kernel belongs to the step that launched it, and the last step is left out, because its
kernels may still have been running when the profiler stopped. Without kernels of a GPU, operators of the CPU count as
computation, and collectives as communication.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.foreign.chrome import COLLECTIVE_KERNEL, Call, Numbers, Profile, Spans

# ---- intervals


def merge(start: Numbers, end: Numbers) -> tuple[Numbers, Numbers]:
    """The union of intervals that are sorted by their start, as intervals that do not overlap."""
    first = _first_of_union(start, end)
    return start[first], np.maximum.reduceat(end, np.flatnonzero(first)) if len(start) else end


def length(start: Numbers, end: Numbers) -> float:
    """The length of the union of intervals that are sorted by their start."""
    starts, ends = merge(start, end)
    return float((ends - starts).sum())


def common(union: tuple[Numbers, Numbers], other: tuple[Numbers, Numbers]) -> float:
    """How long two unions overlap; each is sorted by its start."""
    start, end = (np.concatenate(both) for both in zip(union, other))
    order = np.argsort(start, kind="stable")
    return length(*union) + length(*other) - length(start[order], end[order])


def _first_of_union(start: Numbers, end: Numbers) -> NDArray[np.bool_]:
    """Which intervals begin after all those before have ended."""
    if not len(start):
        return np.zeros(0, bool)
    return np.concatenate(([True], start[1:] > np.maximum.accumulate(end)[:-1]))


# ---- where the time goes

COMPUTATION, COMMUNICATION, COPY, NEITHER = range(4)
_COPY = re.compile(r"^(?:Memcpy|Memset|dma)")


@dataclass(frozen=True)
class Breakdown:
    """Seconds, from the start of the first to the end of the last kernel: `span`, of it `computation`, `communication`
    with its `exposed` part (no computation at the same time), `copies` (and memsets), and `idle` time, in which nothing
    ran. Of the idle time, `launch_bound` are gaps that ended with a kernel that was launched only after the gap had
    begun while the CPU ran operators, and `starved` those in which the CPU ran none.
    """

    span: float
    computation: float
    communication: float
    exposed: float
    copies: float
    idle: float
    launch_bound: float
    starved: float

    @property
    def overlapped(self) -> float:
        """Seconds of communication with computation at the same time."""
        return self.communication - self.exposed


def breakdown(spans: Spans, kinds: NDArray[np.int64], cpu: tuple[Numbers, Numbers]) -> Breakdown:
    """The breakdown of some kernels of these kinds; `cpu` are merged intervals in which the CPU ran operators."""
    computation, communication, copies = (
        (spans.start[kinds == kind], spans.end[kinds == kind]) for kind in (COMPUTATION, COMMUNICATION, COPY)
    )
    starts, ends = merge(spans.start, spans.end)
    span = float(ends[-1] - starts[0]) if len(starts) else 0.0
    launched = spans.origin[_first_of_union(spans.start, spans.end)]
    late = launched[1:] >= ends[:-1]  # False for NaN
    gaps = ends[:-1][late], starts[1:][late]
    waiting = length(*gaps)
    launch_bound = common(gaps, cpu)
    return Breakdown(
        span=span,
        computation=length(*computation),
        communication=length(*communication),
        exposed=length(*communication) - common(communication, computation),
        copies=length(*copies),
        idle=span - float((ends - starts).sum()),
        launch_bound=launch_bound,
        starved=waiting - launch_bound,
    )


@dataclass
class Analysed:
    """One profile with what was computed from it: its complete steps, what ran in them, and where their time went."""

    profile: Profile
    steps: list[tuple[int, float, float]]
    spans: Spans
    kinds: NDArray[np.int64]
    calls: list[Call]
    total: Breakdown
    by_step: dict[int, Breakdown]

    @property
    def rank(self) -> int:
        """Its rank; -1 if the file does not have it."""
        return -1 if self.profile.rank is None else self.profile.rank

    @property
    def count(self) -> int:
        """The number of steps; 1 if the file has none."""
        return max(1, len(self.steps))


def analyse(profile: Profile) -> Analysed:
    """Where the time of one profile went."""
    spans, kinds = _what_ran(profile)
    last = max((start for _, start, _ in profile.steps), default=math.inf)
    steps = [step for step in profile.steps if step[1] < last]
    calls = profile.calls
    if steps:
        chosen = spans.origin < last
        spans, kinds = spans.where(chosen), kinds[chosen]
        calls = [call for call in calls if call.launched < last]
    else:
        steps = profile.steps
    on_gpu = len(profile.gpu) > 0
    cpu = merge(profile.cpu.start, profile.cpu.end) if on_gpu else (np.zeros(0), np.zeros(0))
    by_step = {}
    for number, start, end in steps:
        chosen = (spans.origin >= start) & (spans.origin < end)
        if chosen.any():
            by_step[number] = breakdown(spans.where(chosen), kinds[chosen], cpu)
    return Analysed(profile, steps, spans, kinds, calls, breakdown(spans, kinds, cpu), by_step)


def _what_ran(profile: Profile) -> tuple[Spans, NDArray[np.int64]]:
    """What ran on the GPU, or without one on the CPU, and of which kind it is."""
    by_name = np.array([*map(kind_of, profile.names), NEITHER, COMMUNICATION])  # the last two: a launch, and a call
    if len(profile.gpu):
        return profile.gpu, by_name[profile.gpu.name]
    cpu, calls = profile.cpu, profile.calls
    start = np.concatenate((cpu.start, [call.start for call in calls]))
    end = np.concatenate((cpu.end, [call.end for call in calls]))
    name = np.concatenate((cpu.name, np.full(len(calls), -1)))  # the last of by_name
    kinds = by_name[name]
    order = np.argsort(start, kind="stable")
    order = order[kinds[order] != NEITHER]
    lane = np.concatenate((cpu.lane, np.full(len(calls), -1)))
    return Spans(start[order], end[order], name[order], start[order], lane[order]), kinds[order]


def kind_of(name: str) -> int:
    if COLLECTIVE_KERNEL.match(name):
        return COMMUNICATION
    if _COPY.match(name):
        return COPY
    return NEITHER if name.startswith("c10d::") else COMPUTATION  # it starts a collective, or waits for it


# ---- kernels and calls

_OPERATIONS = (  # how their names begin or what they contain, in lower case without underscores; the first one counts
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)


def operation(name: str) -> str:
    """The collective of a kernel or of a name in torch: `all_reduce` for `ncclDevKernel_AllReduce_Sum_f32_RING_LL`."""
    plain = name.partition("(")[0].lower().replace("_", "")
    return next((title for text, title in _OPERATIONS if text in plain), "other collective")


@dataclass(frozen=True)
class Kernel:
    """One kernel, or on a CPU one operator without those that it calls: seconds of all `count` launches."""

    name: str
    count: int
    seconds: float


def kernels(analysed: Sequence[Analysed]) -> list[Kernel]:
    """The kernels of all ranks, the one that takes longest first."""
    return kernels_of([(rank.profile, rank.spans) for rank in analysed])


def kernels_of(parts: Iterable[tuple[Profile, Spans]]) -> list[Kernel]:
    """The kernels among some spans of profiles, the one that takes longest first."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for profile, spans in parts:
        chosen = spans.name >= 0
        lasts = spans.end - spans.start if len(profile.gpu) else _own_seconds(spans)
        for number, spent in zip(spans.name[chosen].tolist(), lasts[chosen].tolist()):
            seconds[profile.names[number]] += spent
            counts[profile.names[number]] += 1
    return [Kernel(name, counts[name], spent) for name, spent in seconds.most_common()]


def _own_seconds(spans: Spans) -> Numbers:
    """How long each operator ran without those that it called: those in the same thread during it."""
    own = spans.end - spans.start
    running: dict[int, list[int]] = defaultdict(list)
    for number, (start, end, thread) in enumerate(zip(spans.start, spans.end, spans.lane.tolist())):
        stack = running[thread]
        while stack and spans.end[stack[-1]] <= start:
            stack.pop()
        if stack:
            own[stack[-1]] -= min(end, spans.end[stack[-1]]) - start
        stack.append(number)
    return own


def message_bytes(op: str, call: Call) -> int:
    """The bytes of a call as nccl-tests counts them; 0 if the file does not have them."""
    if op == "all_gather":
        return call.bytes_out or call.bytes_in * call.ranks
    return call.bytes_in or call.bytes_out


_TEMPLATE = re.compile(r"<[^<>]*>")
_DETAIL = re.compile(r"cutlass_\w+|\w*Functor\w*|\w+_kernel_cuda\b")


def short_name(name: str) -> str:
    """The name of a kernel without namespaces and the arguments of its function and templates, but with the argument
    that says what it computes."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    while (without := _TEMPLATE.sub("", plain)) != plain:
        plain = without
    plain = plain.partition("(")[0].partition("<")[0]
    detail = _DETAIL.search(name, len(plain))
    return plain.rpartition("::")[2] + (f" ({detail[0]})" if detail else "")


# ---- the critical path, and what a step would take if a part of it took no time
#
# The steps are replayed as a graph. The CPU launches kernels one after another; a kernel starts when the CPU has
# launched it, the kernel before it in its stream has ended, and what it waits for in another stream has ended; the CPU
# goes on after a synchronization when the kernel that it waits for has ended. A collective waits for the last kernel of
# another stream that was launched before it, as torch's process groups do. A trace does not say for which event a
# stream waits: a kernel that starts later than all this explains, just after one in another stream has ended, waited
# for that one. What remains unexplained stays as it was, so that the replay takes as long as the steps did. With a part
# left out, the result is an estimate: waits that did not matter in the profiled steps are not known, and delays may
# change with the rest.

CPU, DELAY = -1, -2  # parts of the path beside the kinds of kernels
_MOST = 60_000  # kernels that are replayed
_NEAR = 20e-6  # seconds from the end of a kernel to the start of one that waited for it
_UNEXPLAINED = 5e-6  # seconds that a kernel starts later than what it is known to wait for
_AGREES = 0.02  # the replay of what was profiled differs by a smaller share
_KERNELS = 3  # names of kernels that are left out, one at a time


@dataclass
class Launched:
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
) -> list[Launched]:
    """The kernels with what they wait for. `spans` are in the order of launches."""
    start, end, origin = spans.start.tolist(), spans.end.tolist(), spans.origin.tolist()
    lane, name = spans.lane.tolist(), spans.name.tolist()
    latency = max(0.0, min(began - launched for began, launched in zip(start, origin)))
    by_end = sorted(range(len(end)), key=end.__getitem__)
    ends = [end[number] for number in by_end]
    last: dict[int, int] = {}  # by stream
    pending = sorted(waits)
    kernels: list[Launched] = []
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
        kernel = Launched(
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
    kernels: list[Launched], wait: tuple[float, float], at: float, ends: list[float], by_end: list[int]
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
    kernels: list[Launched], parts: Collection[int] = (), names: Collection[int] = ()
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


def _walked(kernels: list[Launched], ends: list[float]) -> tuple[dict[int, float], dict[int, float]]:
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
