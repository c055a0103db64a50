"""One trace that torch's profiler wrote, in Chrome's trace event format: its reader, where the time of the rank went
(computation, communication, copies and idle time of each step), the kernels that ran, and the critical path.

The file is read in chunks. In each chunk the brackets outside of strings tell where the events end, so that only these
are decoded, without a tree of the whole file. What stays in memory are a few numbers per event. The format: "Trace
Event Format", Chromium project; the fields that torch adds: kineto, `output_json.cpp`.

The definitions are those of Holistic Trace Analysis (`get_temporal_breakdown`, `get_comm_comp_overlap`): intervals of
one kind are merged first, a kernel belongs to the step that launched it, and the last step is left out, because its
kernels may still have been running when the profiler stopped. Without kernels of a GPU, operators of the CPU count as
computation, and collectives as communication.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from labkit.analysis.foreign import ForeignError
from labkit.analysis.foreign.reading import Content, rank_in_name
from labkit.common.files import open_regular
from labkit.common.units import counted, size

Numbers = NDArray[np.float64]
_T = TypeVar("_T")

# ---- the events of a trace

_LARGEST_EVENT = 16 << 20  # bytes; also of what stands before or after the events


class Event(msgspec.Struct):
    """What is needed of an event. Times are in microseconds; the file may have any type in any field."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


_EVENTS = msgspec.json.Decoder(list[Event])
_EVENT = msgspec.json.Decoder(Event)
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_KINDS = np.zeros(256, np.int8)  # of a byte: a quote, or by how much it changes the depth
_QUOTE = 2
_KINDS[list(b"{[")], _KINDS[list(b"}]")], _KINDS[ord('"')] = 1, -1, _QUOTE
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class Stream:
    """The events of a trace in lists, and what stands before and after them as `metadata`.

    `unreadable` counts events that are no valid JSON; `cut` says why the file ends early.
    """

    def __init__(self, content: Content, path: Path):
        self._content, self._path = content, path
        self.metadata: dict[str, Any] = {}
        self.unreadable, self.cut = 0, ""

    def __iter__(self) -> Iterator[list[Event]]:
        """Raises `ForeignError` for a file that is no trace, and for an event that is too large."""
        buffer, ended = self._beginning(), False
        while not ended:
            data = self._content.read()
            buffer += data
            ends, at_end = _ends(buffer)
            if ends:
                events, unreadable = _decoded(buffer, ends)
                self.unreadable += unreadable
                yield events
                buffer = buffer[ends[-1] :]
            ended = at_end or not data
            if not ended and len(buffer) > _LARGEST_EVENT:
                raise ForeignError(
                    f"{self._path} has an event of more than {size(_LARGEST_EVENT)}, which the profiler does not write;"
                    " the file is damaged: record it again"
                )
        if not at_end:
            self.cut = self._content.cut or "its last event is not complete"
            return
        while data and len(buffer) <= _LARGEST_EVENT:
            data = self._content.read()
            buffer += data
        self.metadata |= _object(b'{"traceEvents":[' + buffer.lstrip(b", \t\r\n")) or {}

    def _beginning(self) -> bytes:
        """Reads up to the first event, and returns what has been read of the events."""
        buffer = b""
        while len(buffer) <= _LARGEST_EVENT and (data := self._content.read()):
            searched = max(0, len(buffer) - len('"traceEvents" : ['))
            buffer += data
            for match in _START.finditer(buffer, searched):
                before = _object(buffer[: match.start()] + b'"traceEvents":0}')
                if before is not None:
                    self.metadata |= before
                    return buffer[match.end() :]
        raise ForeignError(
            f"{self._path} has no list traceEvents, so it is no trace of torch.profiler; export it with"
            " profiler.export_chrome_trace(…)"
        )


def _ends(buffer: bytes) -> tuple[list[int], bool]:
    """The offsets at which the values of a list end, and whether the list itself ends after them."""
    data = np.frombuffer(buffer, np.uint8)
    kinds = _KINDS[data]
    if b"\\" in buffer:
        escaped = [match.end() - 1 for match in re.finditer(rb"\\.", buffer, re.DOTALL)]
        kinds[escaped] = 0
    at = np.flatnonzero(kinds)
    steps = kinds[at]
    quotes = steps == _QUOTE
    outside = ~quotes & (np.cumsum(quotes) % 2 == 0)
    at, steps = at[outside], steps[outside]
    depth = np.cumsum(steps, dtype=np.int64)
    closed = np.flatnonzero(depth < 0)
    if len(closed):
        at, steps, depth = at[: closed[0]], steps[: closed[0]], depth[: closed[0]]
    return (at[(depth == 0) & (steps < 0)] + 1).tolist(), bool(len(closed))


def _decoded(buffer: bytes, ends: list[int]) -> tuple[list[Event], int]:
    """The events that end at these offsets, and how many of them cannot be read."""
    try:
        return _EVENTS.decode(b"[" + buffer[: ends[-1]].lstrip(b", \t\r\n") + b"]"), 0
    except _MALFORMED:
        events, begin = [], 0
        for end in ends:
            with suppress(*_MALFORMED):
                events.append(_EVENT.decode(buffer[begin:end].lstrip(b", \t\r\n")))
            begin = end
        return events, len(ends) - len(events)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except _MALFORMED:
        return None
    return value if isinstance(value, dict) else None


# ---- what is kept of a trace


_ARGS = {
    "collective": "Collective name",
    "elements_in": "In msg nelems",
    "elements_out": "Out msg nelems",
    "group": "Process Group Name",
    "group_ranks": "Process Group Ranks",
    "group_size": "Group size",
    "shapes": "Input Dims",
    "types": "Input type",
    "number": "Ev Idx",
}


class Args(msgspec.Struct, rename=_ARGS):
    """What is needed of the arguments of an event; the file may have any type in any field."""

    correlation: Any = None
    stream: Any = None
    collective: Any = None
    elements_in: Any = None
    elements_out: Any = None
    dtype: Any = None
    group: Any = None
    group_ranks: Any = None
    group_size: Any = None
    shapes: Any = None
    types: Any = None
    number: Any = None


_ARGS_DECODER = msgspec.json.Decoder(Args)


class Call(NamedTuple):
    """One collective on one rank. `op` is its name as the file has it, times are in seconds, `bytes_in` and `bytes_out`
    are those of the rank's tensors, 0 if the file does not have them; so is the size of the group."""

    op: str
    group: str
    ranks: int
    bytes_in: int
    bytes_out: int
    start: float
    end: float
    launched: float


@dataclass
class Spans:
    """Events of one kind: when they start and end, in seconds, their name as an index of `Profile.names`, when the CPU
    launched them (what ran on the CPU: when it started), and their stream or thread."""

    start: Numbers
    end: Numbers
    name: NDArray[np.int64]
    origin: Numbers
    lane: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    def where(self, chosen: NDArray[Any]) -> Spans:
        """Some of them."""
        return Spans(self.start[chosen], self.end[chosen], self.name[chosen], self.origin[chosen], self.lane[chosen])


@dataclass
class Profile:
    """One file. Seconds count from `base`, in nanoseconds since 1970. `rank`, `world_size` and `backend` are None if
    the file has no `distributedInfo`; `device` is the name of the GPU, empty if nothing ran on one. `steps` are the
    numbers of `ProfilerStep#N` with start and end; `waits` is when the CPU began and ended to wait for the GPU.
    `phases` are parts of a step that torch annotates: data and optimizer, with start and end. `notes` are sentences
    about what the file does not have; `sampled` says whether events were left out of it."""

    path: Path
    base: int = 0
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    groups: list[tuple[str, str, int]] = field(default_factory=list)  # name, description, size
    device: str = ""
    host: str = ""
    names: list[str] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    gpu: Spans = field(default_factory=lambda: _spans(array("d")))
    cpu: Spans = field(default_factory=lambda: _spans(array("d")))
    calls: list[Call] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sampled: bool = False


_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "xpu_runtime", "Runtime"}
_NUMBERED = {"cpu_op", "user_annotation", "python_function", "cpu_instant_event"}  # events that have "Ev Idx"
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,15})")
_PHASES = {"Optimizer.step#": "optimizer", "enumerate(DataLoader)#": "data"}  # how annotations of torch begin
_ON_CPU_CALL = re.compile(r"(?:gloo|mpi|ucc):(\w+)")
_COLLECTIVE_KERNEL = re.compile(r"^(?:nccl|rccl|mscclpp).*Kernel", re.IGNORECASE)
_WAIT = re.compile(r"^(?:cuda|hip|cu)\w*Synchronize|^(?:cuda|hip)Memcpy(?:WithStream)?$")
_LAUNCH = -2  # in place of a name
_MOST_NAMES = 200_000
_LONGEST_NAME = 300  # characters
_MICROSECOND = 1e-6
_EVERY = 16  # how many events are read for one whose number is looked at
_SAMPLED = 1.5  # more numbers than events by this factor: events were left out

BYTES = {
    "double": 8,
    "long": 8,
    "longint": 8,
    "complexfloat": 8,
    "float": 4,
    "int": 4,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
}


class _Collector:
    """Collects the numbers of events, in the order of the file."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.gpu, self.cpu = array("d"), array("d")  # start, end, name, correlation, stream or thread, and so on
        self.waits: list[tuple[float, float]] = []
        self.launches = array("d")  # correlation and start
        self.annotated: list[tuple[int, float, float]] = []
        self.phases: list[tuple[str, float, float]] = []
        self.calls: list[Call] = []  # in microseconds, launched by the call with this correlation
        self.threads: dict[Any, int] = {}
        self.wrong = self.numbered = self.highest = 0

    def add(self, events: list[Event]) -> None:
        for event in events:
            category = event.cat
            if event.ph != "X" or not isinstance(category, str):
                continue
            on_gpu, launch = category in _ON_GPU, category in _LAUNCHES
            if not (on_gpu or launch or category in _NUMBERED):
                continue
            start, lasts, name = event.ts, event.dur, event.name
            if not (_is_time(start) and _is_time(lasts) and lasts >= 0 and isinstance(name, str)):
                self.wrong += 1
            elif on_gpu:
                self._on_gpu(name, start, start + lasts, event.tid, _args(event))
            elif launch:
                correlation = _args(event).correlation
                if _is_time(correlation):
                    self.launches.extend((correlation, start))
                self.cpu.extend((start, start + lasts, _LAUNCH, -1, self._thread(event.tid)))
                if _WAIT.match(name):
                    self.waits.append((start, start + lasts))
            else:
                self._on_cpu(category, name, start, start + lasts, event)

    def _on_gpu(self, name: str, start: float, end: float, thread: Any, args: Args) -> None:
        correlation = args.correlation if _is_time(args.correlation) else -1
        stream = self._thread(thread if args.stream is None else args.stream)
        self.gpu.extend((start, end, self._name(name), correlation, stream))
        if _COLLECTIVE_KERNEL.match(name):
            self.calls.append(_call(args, name, start, end, correlation))

    def _on_cpu(self, category: str, name: str, start: float, end: float, event: Event) -> None:
        self.numbered += 1
        if self.numbered % _EVERY == 1:
            number = _args(event).number
            if type(number) is int and number < 1 << 53:
                self.highest = max(self.highest, number + 1)
        if category == "cpu_op":
            self.cpu.extend((start, end, self._name(name), -1, self._thread(event.tid)))
        elif category == "user_annotation":
            step, call = _STEP.match(name), _ON_CPU_CALL.fullmatch(name)
            if step:
                self.annotated.append((int(step[1]), start, end))
            elif call:
                self.calls.append(_call(_args(event), call[1], start, end, start))
            elif phase := next((phase for begin, phase in _PHASES.items() if name.startswith(begin)), ""):
                self.phases.append((phase, start, end))

    def _name(self, name: str) -> int:
        if len(self.names) >= _MOST_NAMES:
            return self.names.setdefault("(other names)", _MOST_NAMES)
        return self.names.setdefault(name[:_LONGEST_NAME], len(self.names))

    def _thread(self, thread: Any) -> int:
        return self.threads.setdefault(thread if isinstance(thread, (int, str)) else None, len(self.threads))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and -1e18 < value < 1e18  # not a bool, not NaN


def _args(event: Event) -> Args:
    try:
        return _ARGS_DECODER.decode(event.args)
    except _MALFORMED:
        return Args()


# ---- a trace as a Profile


def read_profile(path: Path) -> Profile:
    """Reads one file. Raises `ForeignError` if it is no trace, `OSError` as `open_regular`."""
    collected = _Collector()
    with open_regular(path) as file:
        stream = Stream(Content(file, path), path)
        for events in stream:
            collected.add(events)
    if not (collected.gpu or collected.cpu):
        raise ForeignError(
            f"{path} has no events of operators or kernels; profile with"
            " activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    profile = Profile(path, names=list(collected.names))
    _describe(profile, stream.metadata)
    _fill(profile, collected)
    if stream.cut:
        profile.notes.append(f"{path.name} ends early: {stream.cut}. What follows is computed from the events before.")
    if stream.unreadable + collected.wrong:
        left_out = counted(stream.unreadable + collected.wrong, "event")
        profile.notes.append(f"{path.name}: {left_out} cannot be read and are left out.")
    profile.sampled = collected.highest > _SAMPLED * collected.numbered
    if profile.sampled:
        profile.notes.append(
            f"{path.name} has {collected.numbered:,} of about {collected.highest:,} recorded CPU events: events were"
            " left out of the file, so times are lower bounds, idle time is an upper bound, and gaps may not be real."
        )
    return profile


def _describe(profile: Profile, metadata: dict[str, Any]) -> None:
    """Rank, process groups and device, from what stands before and after the events."""
    info = _as(dict, metadata.get("distributedInfo"), {})
    profile.base = _as(int, metadata.get("baseTimeNanoseconds"), 0)
    profile.rank, profile.world_size = _rank(info.get("rank")), _rank(info.get("world_size"))
    if profile.rank is None:  # torch writes it only if the process group existed at the end of the profile
        profile.rank = rank_in_name(profile.path)
    profile.backend = _as(str, info.get("backend"), None)
    profile.host = _as(str, metadata.get("host_name"), "")
    for group in _as(list, info.get("pg_config"), [])[:1000]:
        if isinstance(group, dict):
            ranks = _as(int, group.get("pg_size"), len(_as(list, group.get("ranks"), [])))
            name, description = (_as(str, group.get(key), "")[:_LONGEST_NAME] for key in ("pg_name", "pg_desc"))
            profile.groups.append((name, description, ranks))
    devices = [_as(dict, device, {}).get("name") for device in _as(list, metadata.get("deviceProperties"), [])]
    names = Counter(name for name in devices if isinstance(name, str))
    profile.device = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items())


def _rank(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 9:
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 24 else None


def _as(kind: type[_T], value: Any, default: Any) -> Any:
    return value if type(value) is kind else default


def _fill(profile: Profile, collected: _Collector) -> None:
    """The numbers of events, in seconds since the first one. The launch of what ran on the GPU has its correlation."""
    first = min(events[0] for events in (collected.gpu, collected.cpu) if events)
    profile.base += round(first * 1000)

    def seconds(time: float) -> float:
        return (time - first) * _MICROSECOND

    launches = np.array(collected.launches).reshape(-1, 2)
    _, at = np.unique(launches[:, 0], return_index=True)
    launches = launches[at]
    gpu, cpu = _spans(collected.gpu), _spans(collected.cpu)
    gpu.origin, cpu.origin = _launched(gpu.origin, launches), cpu.start
    for spans in (gpu, cpu):
        spans.start = (spans.start - first) * _MICROSECOND
        spans.end = (spans.end - first) * _MICROSECOND
        spans.origin = (spans.origin - first) * _MICROSECOND
    profile.gpu, profile.cpu = gpu, cpu
    profile.waits = sorted((seconds(begin), seconds(end)) for begin, end in collected.waits)
    profile.steps = sorted((number, seconds(start), seconds(end)) for number, start, end in collected.annotated)
    profile.phases = sorted((name, seconds(start), seconds(end)) for name, start, end in collected.phases)
    launched = [call.launched for call in collected.calls]
    if len(gpu):
        launched = _launched(np.array(launched), launches).tolist()
    for call, moment in zip(collected.calls, launched):
        start, end = seconds(call.start), seconds(call.end)
        profile.calls.append(call._replace(start=start, end=end, launched=seconds(moment)))
    profile.calls.sort(key=lambda call: call.start)


def _spans(values: array[float]) -> Spans:
    columns = np.array(values).reshape(-1, 5)
    order = np.argsort(columns[:, 0], kind="stable")
    start, end, name, origin, lane = columns[order].T
    return Spans(start, end, name.astype(np.int64), origin, lane.astype(np.int64))


def _launched(correlations: Numbers, launches: Numbers) -> Numbers:
    """When each was launched; NaN if the file does not say it."""
    if not len(launches):
        return np.full(len(correlations), math.nan)
    at = np.minimum(np.searchsorted(launches[:, 0], correlations), len(launches) - 1)
    return np.where(launches[at, 0] == correlations, launches[at, 1], math.nan)


def _call(args: Args, name: str, start: float, end: float, launched: float) -> Call:
    group = f"{args.group} {args.group_ranks}" if isinstance(args.group, str) else ""
    ranks = args.group_size if type(args.group_size) is int and 0 < args.group_size < 1 << 24 else 0
    width = BYTES.get(_dtype(args), 1)
    elements_in, elements_out = _count(args.elements_in), _count(args.elements_out)
    if not elements_in and isinstance(args.shapes, list) and len(args.shapes) == 1:
        shape = args.shapes[0]
        known = isinstance(shape, list) and 0 < len(shape) < 10 and all(map(_count, shape))
        elements_in = math.prod(shape) if known else 0
    op = args.collective if isinstance(args.collective, str) else name
    return Call(
        op[:_LONGEST_NAME],
        group[:_LONGEST_NAME],
        ranks,
        width * elements_in,
        width * elements_out,
        start,
        end,
        launched,
    )


def _dtype(args: Args) -> str:
    text = args.types[0] if isinstance(args.types, list) and args.types else args.dtype
    return text.removeprefix("c10::").replace(" ", "").lower() if isinstance(text, str) else ""


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 50 else 0


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
    begun while the CPU ran operators, and `starved` those in which the CPU ran none."""

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
    if _COLLECTIVE_KERNEL.match(name):
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
class CriticalPath:
    """Seconds per step. `by_part` are those of the path: by kind of kernel, of the CPU (`CPU`), and of unexplained
    delays (`DELAY`). `without` is what a step is estimated to take if all of this part took no time; `kernels` the same
    for the kernels of one name, with their seconds on the path."""

    seconds: float
    by_part: dict[int, float]
    without: dict[int, float]
    kernels: list[tuple[int, float, float]]


def critical_path(rank: Analysed) -> CriticalPath | None:
    """The path through the complete steps of a rank; None if its file does not have what it needs, or if the replay
    does not take as long as the steps did."""
    profile, count = rank.profile, rank.count
    if not len(profile.gpu) or profile.sampled or not rank.by_step:
        return None
    begin = min(start for _, start, _ in rank.steps)
    chosen = rank.spans.origin >= begin
    spans, kinds = rank.spans.where(chosen), rank.kinds[chosen]
    if not 0 < len(spans) <= _MOST or not np.isfinite(spans.origin).all():
        return None
    order = np.lexsort((spans.start, spans.origin))
    spans, kinds = spans.where(order), kinds[order]
    kernels = _graph(spans, kinds.tolist(), profile.waits, begin)
    total, ends = _replayed(kernels)
    measured = float(spans.end.max()) - begin
    if abs(total - measured) > _AGREES * measured:
        return None
    by_part, by_name = _walked(kernels, ends)
    parts = {*by_part} - {DELAY}
    without = {part: _replayed(kernels, {part})[0] / count for part in parts}
    largest = sorted(by_name, key=lambda name: -by_name[name])[:_KERNELS]
    return CriticalPath(
        total / count,
        {part: seconds / count for part, seconds in by_part.items()},
        without,
        [(name, by_name[name] / count, _replayed(kernels, names={name})[0] / count) for name in largest],
    )


def _graph(spans: Spans, kinds: list[int], waits: Collection[tuple[float, float]], begin: float) -> list[Launched]:
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
        if kinds[number] == COMMUNICATION:
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
