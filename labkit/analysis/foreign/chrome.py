"""The reader of a trace that torch's profiler wrote: Chrome's trace event format, plain or compressed with gzip.

The file is read in chunks. In each chunk the brackets outside of strings tell where the events end, so that only these
are decoded, without a tree of the whole file. What stays in memory are a few numbers per event. The format: "Trace
Event Format", Chromium project; the fields that torch adds: kineto, `output_json.cpp`.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator
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
    about what the file does not have; `sampled` says whether events were left out of it.
    """

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
COLLECTIVE_KERNEL = re.compile(r"^(?:nccl|rccl|mscclpp).*Kernel", re.IGNORECASE)
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
        if COLLECTIVE_KERNEL.match(name):
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
        times = {"start": seconds(call.start), "end": seconds(call.end), "launched": seconds(moment)}
        profile.calls.append(call._replace(**times))
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
