"""What a snapshot of CUDA memory contains (segments with their blocks, the events of the caching allocator, and the
stacks of both), and the memory of a device over time that follows from it: its peak, the moments at which memory ran
out, and what grows from iteration to iteration.

Segments are memory that the allocator reserved with cudaMalloc and divided into blocks; a device's events are in order,
the oldest first, if the history was recorded. The layout is that of torch 2.1 and later:
`torch/csrc/cuda/memory_snapshot.cpp`, and the docstring of `torch.cuda.memory._snapshot`.

Sizes in the history are the requested bytes. A block counts from `alloc` to `free_completed`, as in torch's own viewer
(https://pytorch.org/memory_viz): until then, its memory cannot be used again.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from labkit.analysis.foreign import ForeignError
from labkit.analysis.foreign.reading import as_dict, as_list, as_number, plain_value, rank_in_name, whole_content
from labkit.analysis.metrics import median

# ---- the file

_LARGEST = 512 << 20  # bytes of a file
_MOST_DEVICES = 256
_MOST_FRAMES = 512
_LONGEST = 300  # characters of a name
_MOST_BYTES = 1 << 60  # of a block or segment
_RECORD_LESS = "; record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000, context='alloc')"


class Event(NamedTuple):
    """An action of the allocator. `size` is in bytes, of an `oom` what was requested; `address` of an `oom` is the
    memory in bytes that the device reports to be free. `time` is in microseconds since 1970, 0 if not recorded."""

    action: str
    address: int
    size: int
    stack: Stack | None
    time: int


class Block(NamedTuple):
    """Memory of a segment in one piece. `size` includes what the allocator added to the `requested` bytes. An active
    block that is not `allocated` has been freed and waits for another stream."""

    address: int
    size: int
    requested: int
    active: bool
    allocated: bool
    stack: Stack


class Segment(NamedTuple):
    """Memory that the allocator reserved with one cudaMalloc, or, if it is expandable, mapped. `pool` is (0, 0) for the
    default pool; others belong to CUDA graphs or `torch.cuda.MemPool`."""

    address: int
    size: int
    small: bool
    pool: tuple[int, int]
    expandable: bool
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Snapshot:
    """What one file says: `rank` if its name has one, the settings of the allocator, and the devices of which it has
    memory or events."""

    path: Path
    rank: int | None
    settings: str
    devices: Sequence[Device]


def read_snapshot(path: Path) -> Snapshot:
    """Reads one file and follows its events; nothing in it is executed. Raises `ForeignError` if it is no snapshot, and
    `OSError` as `open_regular`."""
    content = plain_value(whole_content(path, _LARGEST, _RECORD_LESS), path, "the memory snapshot")
    content = {"segments": content} if isinstance(content, list) else content  # torch.cuda.memory_snapshot()
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise ForeignError(f"{path} has no list segments, so it is no memory snapshot of torch; name such snapshots")
    stacks = _Stacks()
    segments: dict[int, list[Segment]] = defaultdict(list)
    for segment in content["segments"]:
        if isinstance(segment, dict) and 0 <= as_number(segment.get("device")) < _MOST_DEVICES:
            segments[segment["device"]].append(_segment(segment, stacks))
    events = {
        device: [_event(event, stacks) for event in as_list(trace) if isinstance(event, dict)]
        for device, trace in enumerate(as_list(content.get("device_traces"))[:_MOST_DEVICES])
        if trace
    }
    steps = _optimizer_steps(content.get("external_annotations"))
    devices = [
        replayed(device, segments.get(device, ()), events.get(device, ()), steps.get(device, ()))
        for device in sorted({*segments, *events})
    ]
    settings = _text(as_dict(content.get("allocator_settings")).get("PYTORCH_CUDA_ALLOC_CONF"))
    return Snapshot(path, rank_in_name(path), settings, devices)


def _segment(segment: dict[str, Any], stacks: _Stacks) -> Segment:
    address, blocks = _bytes(segment.get("address")), []
    at = address
    for block in as_list(segment.get("blocks")):
        if not isinstance(block, dict):
            continue
        at = _bytes(block["address"]) if "address" in block else at
        length, state = _bytes(block.get("size")), _text(block.get("state"))
        active = state.startswith("active")
        requested = _bytes(block["requested_size"]) if "requested_size" in block else length
        stack = stacks(block.get("frames")) if active else NO_STACK
        blocks.append(Block(at, length, requested, active, state == "active_allocated", stack))
        at += length
    pool = segment.get("segment_pool_id")
    pool = (as_number(pool[0]), as_number(pool[1])) if isinstance(pool, (list, tuple)) and len(pool) == 2 else (0, 0)
    small, expandable = segment.get("segment_type") == "small", segment.get("is_expandable") is True
    return Segment(address, _bytes(segment.get("total_size")), small, pool, expandable, blocks)


def _event(event: dict[str, Any], stacks: _Stacks) -> Event:
    action = _ACTIONS.get(_text(event.get("action")), "")
    stack = stacks(event.get("frames")) if action in _WITH_STACK else None
    address = _bytes(event.get("device_free" if action == "oom" else "addr"))
    return Event(action, address, _bytes(event.get("size")), stack, _bytes(event.get("time_us")))


_ACTIONS = {  # so that equal names are one object
    action: action
    for action in (
        *("alloc", "free_requested", "free_completed", "oom", "snapshot"),
        *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    )
}
_WITH_STACK = {"alloc", "oom"}


def _optimizer_steps(annotations: Any) -> dict[int, list[int]]:
    """By device, the times in microseconds at which `Optimizer.step` began, which torch 2.6 and later record."""
    times: dict[int, list[int]] = defaultdict(list)
    for annotation in map(as_dict, as_list(annotations)):
        if annotation.get("stage") == "START" and _text(annotation.get("name")).startswith("Optimizer.step"):
            times[as_number(annotation.get("device"))].append(_bytes(annotation.get("time_us")))
    return times


def _text(value: Any) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _bytes(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _MOST_BYTES else 0


# ---- stacks


class Frame(NamedTuple):
    """One function of a stack. `file` is empty for functions in C++; `origin` says whose it is: user, library (also
    Python's own), torch or native."""

    file: str
    line: int
    function: str
    origin: str

    @property
    def words(self) -> str:
        """`train.py:88`."""
        return f"{PurePath(self.file).name}:{self.line}"


class Stack(NamedTuple):
    """Where memory was allocated: the user's `line`, followed by that of the library that it called; the `phase` if the
    frames show it; and `driver`, the outermost frames down to the first call of a module, the optimizer or autograd."""

    line: str
    phase: str
    driver: tuple[Frame, ...]


UNKNOWN, EARLIER, AUTOGRAD = "no Python stack", "allocated before the history begins", "autograd engine"
NO_STACK, BEFORE = Stack(UNKNOWN, "", ()), Stack(EARLIER, "", ())

_PYTHON = re.compile(r"\.py$|^<(?:ipython-input|stdin)")
_INTERNAL = re.compile(r"[/\\]lib(?:32|64)?[/\\]python3[^/\\]*[/\\](?!site-packages|dist-packages)|torchinductor_")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_TORCH = re.compile(
    r"[/\\]torch[/\\](?:(?:nn|optim|autograd|utils|distributed|cuda|amp|fx|jit|_\w+|ao|func|compiler)[/\\]"
    r"|(?:_\w+|functional|serialization|storage|random)\.py$)"
)
_MODULES = re.compile(r"[/\\]torch[/\\]nn[/\\]")
_CALLS = re.compile(r"[/\\]torch[/\\](?:nn|optim|autograd|_dynamo|_functorch|_inductor)[/\\]")
_OPTIMIZER = re.compile(r"[/\\]torch[/\\]optim[/\\]")
_BACKWARD = re.compile(r"[/\\]torch[/\\]autograd[/\\](?:__init__|graph)\.py$")
_CHECKPOINT = re.compile(r"[/\\]torch[/\\]utils[/\\]checkpoint\.py$")
_COLLECTIVES = re.compile(r"[/\\]torch[/\\]distributed[/\\](?!tensor|_tensor)")
_BUILDS = {"__init__", "_apply", "convert", "reset_parameters", "to_empty"}
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+)::apply\(")


@lru_cache(maxsize=1 << 16)
def _frame(file: str, line: int, function: str) -> Frame:
    """A frame; equal ones are the same object as long as they are cached."""
    if not _PYTHON.search(file):
        return Frame("", 0, function, "native")
    if _TORCH.search(file):
        return Frame(file, line, function, "torch")
    library = _INTERNAL.search(file) or _INSTALLED.search(file)
    return Frame(file, line, function, "library" if library else "user")


class _Stacks:
    """Converts stacks. Most events of a snapshot share frames, and many have the same frames, which are converted
    once."""

    def __init__(self) -> None:
        self._by_id: dict[int, Frame] = {}  # of a frame's dict, which lives as long as the content of the file
        self._known: dict[tuple[Frame, ...], Stack] = {}

    def __call__(self, frames: Any) -> Stack:
        if not isinstance(frames, list) or not frames:
            return NO_STACK
        by_id = self._by_id
        key = tuple([by_id.get(id(frame)) or self._frame(frame) for frame in frames[:_MOST_FRAMES]])
        stack = self._known.get(key)
        if stack is None:
            stack = self._known[key] = _stack(key)
        return stack

    def _frame(self, frame: Any) -> Frame:
        content = as_dict(frame)
        converted = _frame(_text(content.get("filename")), _bytes(content.get("line")), _text(content.get("name")))
        self._by_id[id(frame)] = converted
        return converted


def _stack(frames: Sequence[Frame]) -> Stack:
    """A stack from its frames, the innermost first."""
    python = [frame for frame in frames if frame.origin != "native"]
    native = [frame.function for frame in frames if frame.origin == "native"]
    return Stack(_line(python, native), _phase(python, native), _driver(python))


def _line(python: Sequence[Frame], native: Sequence[str]) -> str:
    """`train.py:88`, or `train.py:88 (modeling_llama.py:345)` if a library's line allocates."""
    outside = [frame for frame in python if frame.origin != "torch" and not _INTERNAL.search(frame.file)]
    user = next((frame for frame in outside if frame.origin == "user"), None)
    if user is not None:
        return user.words if outside[0] is user else f"{user.words} ({outside[0].words})"
    if python:
        return (outside or python)[0].words
    node = next((match[1] for match in map(_NODE.search, native) if match), "")
    if node:
        return f"{AUTOGRAD}: {node}"
    return AUTOGRAD if any("torch::autograd::Engine" in name for name in native) else UNKNOWN


def _phase(python: Sequence[Frame], native: Sequence[str]) -> str:
    """The phase of training, if the frames show it."""
    torch = [frame for frame in python if frame.origin == "torch"]
    if any("getNewWorkspace" in name or "CUDABlasHandle" in name for name in native):
        return "cuBLAS workspace"
    if any(_OPTIMIZER.search(frame.file) for frame in torch):
        return "optimizer"
    if any("c10d::" in name for name in native) or (torch and _COLLECTIVES.search(torch[0].file)):
        return "communication"
    backward = any("torch::autograd::Engine" in name for name in native)
    if backward or any(_BACKWARD.search(frame.file) for frame in torch):
        again = any(_CHECKPOINT.search(frame.file) for frame in torch)
        return "recomputation" if again else "backward"
    modules = [frame for frame in torch if _MODULES.search(frame.file)]
    if any(frame.function in _BUILDS for frame in modules):
        return "model"
    return "forward" if modules else ""


def _driver(python: Sequence[Frame]) -> tuple[Frame, ...]:
    outermost: list[Frame] = []
    for frame in reversed(python):
        if _CALLS.search(frame.file):
            break
        outermost.append(frame)
    return tuple(outermost)


# ---- the replay

_MOST_OOMS = 16
_MOST_BLOCKS = 8
_LARGEST_SMALL = 2 << 20  # bytes of a segment for requests of at most 1 MiB (kSmallBuffer)
_RESERVES = {"segment_free": 1, "segment_unmap": 1, "segment_alloc": -1, "segment_map": -1}  # of rewinding an event
_ROUNDING = 512  # bytes (kMinBlockSize)


class Held(NamedTuple):
    """Memory that one line holds: requested bytes in a number of blocks."""

    line: str
    phase: str
    bytes: int
    blocks: int


class Free(NamedTuple):
    """Reserved memory in bytes that no block uses: in total and in the largest piece. `blocked` is the part in segments
    that cannot be returned to the device, because they also have active blocks."""

    bytes: int
    largest: int
    blocked: int


@dataclass(frozen=True)
class Moment:
    """The memory at one moment, in bytes: `active` is what the blocks requested, by line in `held`, the largest first;
    `largest` has the largest blocks, those of a line and size together. `free` is None if segments are expandable."""

    active: int
    reserved: int
    held: Sequence[Held]
    largest: Sequence[Held]
    free: Free | None = None

    @property
    def phases(self) -> dict[str, int]:
        """The bytes of each phase, the largest first."""
        totals: Counter[str] = Counter()
        for held in self.held:
            totals[held.phase] += held.bytes
        return dict(totals.most_common())


class OutOfMemory(NamedTuple):
    """A request that failed: its bytes, what the device reported to be free, and the memory at that moment."""

    requested: int
    device_free: int
    line: str
    moment: Moment

    @property
    def fragmented(self) -> bool:
        """Whether enough memory was free, but not in one piece, and much of it in segments."""
        free = self.moment.free
        if free is None or not free.largest < self.requested <= free.bytes + self.device_free:
            return False
        return free.bytes >= max(self.requested / 2, self.moment.reserved / 10)


class Growth(NamedTuple):
    """Memory that every iteration of a loop allocates and none frees: by line, in bytes per iteration. `first` and
    `last` are the active bytes at the start of the first and the last of the `iterations`."""

    loop: str
    iterations: int
    lines: Sequence[Held]
    first: int
    last: int

    @property
    def bytes(self) -> float:
        """Bytes per iteration."""
        return sum(held.bytes for held in self.lines) / self.iterations


class Pool(NamedTuple):
    """The segments of a pool, in bytes. `allocated` is what tensors use, `requested` the part of it that was requested;
    `free` is what no block uses."""

    name: str
    segments: int
    reserved: int
    allocated: int
    requested: int
    free: Free


@dataclass(frozen=True)
class History:
    """What the events cover. `overwritten`: the ring buffer has lost its beginning. `before` are the bytes that were
    active before the first event; `unmatched` counts events that contradict others."""

    events: int
    overwritten: bool = False
    before: int = 0
    unmatched: int = 0
    stacks: bool = True


@dataclass(frozen=True)
class Device:
    """The memory of one device. Without a history, `peak` is `end`, and `reserved` what is reserved at the end."""

    index: int
    history: History | None
    peak: Moment
    end: Moment
    reserved: int
    expandable: bool
    pools: Sequence[Pool]
    ooms: Sequence[OutOfMemory] = ()
    oom_count: int = 0
    split: Moment | None = None
    growth: Growth | None = None


_Live = dict[int, tuple[int, Stack, int]]  # by address: requested bytes, stack, index of the event


def replayed(index: int, segments: Sequence[Segment], events: Sequence[Event], steps: Sequence[int]) -> Device:
    """What the segments and events of one device say; `steps` are times in microseconds at which a step began."""
    live: _Live = {
        block.address: (block.requested, block.stack, -1)
        for segment in segments
        for block in segment.blocks
        if block.active
    }
    reserved = sum(segment.size for segment in segments)
    expandable = any(segment.expandable for segment in segments) or any(
        event.action == "segment_map" for event in events
    )
    end = _moment(live, reserved)
    pools = _pools(segments)
    if sum(event.action in ("alloc", "free_completed", "free_requested") for event in events) < 2:
        return Device(index, None, end, end, reserved, expandable, pools)
    replay = _Replay(segments, live, events, expandable)
    growth = _growth(events, replay, steps)
    ooms = [at for at, event in enumerate(events) if event.action == "oom"]
    moments = replay.moments({replay.peak_at, replay.reserved_at, *ooms[-_MOST_OOMS:]})
    return Device(
        index,
        replay.history,
        moments[replay.peak_at],
        end,
        replay.reserved,
        expandable,
        pools,
        [
            OutOfMemory(events[at].size, events[at].address, _of(events[at]).line, moments[at])
            for at in ooms[-_MOST_OOMS:]
        ],
        len(ooms),
        moments[replay.reserved_at] if replay.reserved_at >= 0 else None,
        growth,
    )


def _of(event: Event) -> Stack:
    return event.stack or NO_STACK


class _State:
    """The blocks and segments of a device, which change with every event."""

    def __init__(self, live: _Live, segments: Mapping[int, int], reserved: int, freed: str):
        self.live, self.segments, self._freed = dict(live), dict(segments), freed
        self.active, self.reserved = sum(requested for requested, _, _ in live.values()), reserved

    def apply(self, at: int, event: Event) -> None:
        """The event of index `at` happens."""
        if event.action == "alloc":
            self.active += event.size - self.live.get(event.address, (0,))[0]
            self.live[event.address] = event.size, _of(event), at
        elif event.action == self._freed:
            self.active -= self.live.pop(event.address, (0,))[0]
        elif event.action in ("segment_alloc", "segment_map"):
            self.segments[event.address] = event.size
            self.reserved += event.size
        elif event.action in ("segment_free", "segment_unmap"):
            self.segments.pop(event.address, None)
            self.reserved -= event.size


class _Replay:
    """The events, backwards from the blocks that are live at the end to those before the first event, and forwards to
    the moments of interest. A moment is the index of the event after which it is, -1 before the first."""

    def __init__(self, segments: Sequence[Segment], end: _Live, events: Sequence[Event], expandable: bool):
        completed = any(event.action == "free_completed" for event in events)
        self._events, self._expandable = events, expandable
        self._freed = "free_completed" if completed else "free_requested"
        self._first, self._segments, unmatched = self._rewound(end, segments)
        self._reserved = sum(segment.size for segment in segments) + sum(
            event.size * _RESERVES.get(event.action, 0) for event in events
        )
        known = [stack for _, stack, _ in end.values() if stack is not NO_STACK]
        lost = [stack for _, stack, _ in self._first.values() if stack is not BEFORE]
        self.history = History(
            events=len(events),
            overwritten=len(lost) >= max(3, len(known) / 20),
            before=sum(requested for requested, _, _ in self._first.values()),
            unmatched=unmatched,
            stacks=any(event.stack not in (None, NO_STACK) for event in events),
        )
        self._forwards()

    def _rewound(self, end: _Live, segments: Sequence[Segment]) -> tuple[_Live, dict[int, int], int]:
        """The blocks and segments before the first event, and how many events contradict others."""
        live, unmatched = dict(end), 0
        lengths = {segment.address: segment.size for segment in segments}
        for event in reversed(self._events):
            if event.action == self._freed:
                unmatched += event.address in live
                live[event.address] = event.size, BEFORE, -1
            elif event.action == "alloc":
                unmatched += live.pop(event.address, None) is None
            elif event.action == "segment_free":
                lengths[event.address] = event.size
            elif event.action == "segment_alloc":
                lengths.pop(event.address, None)
        for address, (requested, stack, _) in live.items():
            live[address] = requested, BEFORE if stack is NO_STACK else stack, -1
        return live, lengths, unmatched

    def _start(self) -> _State:
        return _State(self._first, self._segments, max(0, self._reserved), self._freed)

    def _forwards(self) -> None:
        """Finds the peaks, the active bytes after each event, and the blocks after the last one."""
        state = self._start()
        peak, self.peak_at = state.active, -1
        self.reserved, self.reserved_at = state.reserved, -1
        self.totals = []
        for at, event in enumerate(self._events):
            state.apply(at, event)
            self.totals.append(state.active)
            if state.active > peak:
                peak, self.peak_at = state.active, at
            if state.reserved > self.reserved:
                self.reserved, self.reserved_at = state.reserved, at
        self.live = state.live

    def moments(self, wanted: set[int]) -> dict[int, Moment]:
        """The memory at these moments."""
        state, captured = self._start(), {}
        if -1 in wanted:
            captured[-1] = self._captured(state)
        for at, event in enumerate(self._events):
            state.apply(at, event)
            if at in wanted:
                captured[at] = self._captured(state)
        return captured

    def _captured(self, state: _State) -> Moment:
        free = None if self._expandable else _free_between(state.segments, state.live)
        return _moment(state.live, max(0, state.reserved), free)


def _moment(live: _Live, reserved: int, free: Free | None = None) -> Moment:
    alike = Counter((requested, stack.line, stack.phase) for requested, stack, _ in live.values())
    amounts: dict[tuple[str, str], list[int]] = {}
    for (requested, line, phase), blocks in alike.items():
        bytes_and_blocks = amounts.setdefault((line, phase), [0, 0])
        bytes_and_blocks[0] += requested * blocks
        bytes_and_blocks[1] += blocks
    held = [Held(*key, *bytes_and_blocks) for key, bytes_and_blocks in amounts.items()]
    largest = [
        Held(line, phase, requested, alike[requested, line, phase])
        for requested, line, phase in nlargest(_MOST_BLOCKS, alike)
    ]
    return Moment(
        active=sum(line.bytes for line in held),
        reserved=reserved,
        held=sorted(held, key=lambda line: (-line.bytes, line.line)),
        largest=largest,
        free=free,
    )


def _free_between(segments: Mapping[int, int], live: _Live) -> Free:
    """What is free in the segments for large requests at a moment of the history, in which blocks have their requested
    size."""
    addresses = sorted(live)
    in_total = largest = blocked = end = 0
    for address, length in sorted(segments.items()):
        if length <= _LARGEST_SMALL or address < end:  # no segment of the allocator overlaps another
            continue
        end = address + length
        within = addresses[bisect_left(addresses, address) : bisect_left(addresses, end)]
        at, pieces = address, []
        for begin in within:
            pieces.append(begin - at)
            at = begin + -(-live[begin][0] // _ROUNDING) * _ROUNDING
        pieces.append(end - at)
        free = sum(max(0, piece) for piece in pieces)
        in_total += free
        largest = max(largest, *pieces)
        blocked += free if within else 0
    return Free(in_total, largest, blocked)


def _pools(segments: Sequence[Segment]) -> list[Pool]:
    by_pool: dict[tuple[tuple[int, int], bool], list[Segment]] = defaultdict(list)
    for segment in segments:
        by_pool[segment.pool, segment.small].append(segment)
    pools = []
    for (pool, small), members in sorted(by_pool.items()):
        inactive = [[block.size for block in segment.blocks if not block.active] for segment in members]
        blocked = sum(
            sum(free) for segment, free in zip(members, inactive) if any(block.active for block in segment.blocks)
        )
        largest = max((length for free in inactive for length in free), default=0)
        allocated = [block for segment in members for block in segment.blocks if block.allocated]
        name = "default" if pool == (0, 0) else f"private {pool[0]}, {pool[1]}"
        pools.append(
            Pool(
                f"{name}, {'small' if small else 'large'}",
                len(members),
                sum(segment.size for segment in members),
                sum(block.size for block in allocated),
                sum(block.requested for block in allocated),
                Free(sum(map(sum, inactive)), largest, blocked),
            )
        )
    return pools


# ---- what grows

_FEWEST_ITERATIONS = 5
_LEAST_GROWTH = 1 << 20  # bytes in the whole history


def _growth(events: Sequence[Event], replay: _Replay, steps: Sequence[int]) -> Growth | None:
    """What every iteration keeps. The first iteration is left out, because it also allocates what is kept on purpose
    (optimizer state), and the last two, whose tensors live until the next iteration replaces them."""
    loop, starts = _loop(events)
    if len(starts) < _FEWEST_ITERATIONS + 2 and steps:
        times = [event.time for event in events]
        loop, starts = "optimizer steps", sorted({bisect_right(times, time) for time in steps} - {len(times)})[1:]
    if len(starts) < _FEWEST_ITERATIONS + 2:
        return None
    last = len(starts) - 2  # the iterations 0 to last - 1 are complete, and not the newest
    kept: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # by line and phase: bytes of each iteration
    blocks: Counter[tuple[str, str]] = Counter()
    for requested, stack, at in replay.live.values():
        iteration = bisect_right(starts, at) - 1
        if requested and 0 <= iteration < last:
            kept[stack.line, stack.phase][iteration] += requested
            blocks[stack.line, stack.phase] += 1
    lines = [
        Held(
            *key, len(amounts) * int(median(amounts.values())), blocks[key]
        )  # one iteration that kept more is no growth
        for key, amounts in kept.items()
        if _is_steady(amounts, last)
    ]
    before, after = replay.totals[starts[0]], replay.totals[starts[last]]
    grown = sum(line.bytes for line in lines)
    if grown < max(_LEAST_GROWTH, after / 100) or after - before < grown / 2:
        return None
    return Growth(loop, last, sorted(lines, key=lambda line: (-line.bytes, line.line)), before, after)


def _is_steady(kept: Iterable[int], iterations: int) -> bool:
    """Whether most iterations kept something: at least half of the first, of the second and of the last third."""
    third = max(1, iterations // 3)
    thirds = range(third), range(third, iterations - third), range(iterations - third, iterations)
    return all(2 * sum(iteration in part for iteration in kept) >= len(part) for part in thirds)


def _loop(events: Sequence[Event]) -> tuple[str, list[int]]:
    """The outermost loop of the script that has enough iterations: its lines in words, and the events with which its
    iterations begin.

    A loop is recognised by a function whose line decreases from one allocation to the next while its callers stay
    where they are. Loops within modules do not count: they are layers, not iterations.
    """
    backwards: dict[tuple[tuple[Frame, ...], str, str], dict[int, list[int]]] = {}
    highest: dict[tuple[tuple[Frame, ...], str, str], int] = {}
    previous: tuple[Frame, ...] = ()
    for at, event in enumerate(events):
        driver = event.stack.driver if event.stack and event.action == "alloc" else ()
        if not driver or driver is previous:
            continue
        depth = _depth(driver, previous)
        if depth < min(len(driver), len(previous)):
            ours, theirs = driver[depth], previous[depth]
            if (ours.file, ours.function) == (theirs.file, theirs.function) and ours.line < theirs.line:
                loop = driver[:depth], ours.file, ours.function
                backwards.setdefault(loop, {}).setdefault(ours.line, []).append(at)
                highest[loop] = max(highest.get(loop, 0), theirs.line)
        previous = driver
    found: tuple[str, list[int]] = "", []
    for loop in sorted(backwards, key=lambda loop: len(loop[0])):
        line, starts = max(backwards[loop].items(), key=lambda item: (len(item[1]), -item[0]))
        if len(starts) >= _FEWEST_ITERATIONS + 2:
            return f"the loop at {PurePath(loop[1]).name}:{line}-{highest[loop]}", starts
    return found


def _depth(driver: Sequence[Frame], previous: Sequence[Frame]) -> int:
    """How many of the outermost frames are the same."""
    depth = 0
    for ours, theirs in zip(driver, previous):
        if ours is not theirs and ours != theirs:
            break
        depth += 1
    return depth
