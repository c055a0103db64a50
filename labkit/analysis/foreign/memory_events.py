"""What a snapshot of CUDA memory contains: segments with their blocks, the events of the caching allocator, and the
stacks of both.

Segments are memory that the allocator reserved with cudaMalloc and divided into blocks; a device's events are in order,
the oldest first, if the history was recorded. The layout is that of torch 2.1 and later:
`torch/csrc/cuda/memory_snapshot.cpp`, and the docstring of `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from labkit.analysis.foreign.chrome import Content
from labkit.analysis.foreign.page import ForeignError
from labkit.analysis.foreign.pickles import as_dict, as_list, as_number, plain_value
from labkit.common.files import open_regular
from labkit.common.units import size

# ---- the file

_LARGEST = 512 << 20  # bytes of a file
_MOST_DEVICES = 256
_MOST_FRAMES = 512
_LONGEST = 300  # characters of a name
_MOST_BYTES = 1 << 60  # of a block or segment
_RECORD_LESS = "record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000, context='alloc')"


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
class Contents:
    """What one file says, by the number of the device. `settings` are those of the allocator, and `steps` the times in
    microseconds at which the optimizer began a step."""

    settings: str
    segments: Mapping[int, Sequence[Segment]]
    events: Mapping[int, Sequence[Event]]
    steps: Mapping[int, Sequence[int]]


def read_contents(path: Path) -> Contents:
    """Reads one file; nothing in it is executed. Raises `ForeignError` if it is no snapshot, and `OSError` as
    `open_regular`."""
    with open_regular(path) as file:
        data = Content(file, path).read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ForeignError(f"{path} has more than {size(_LARGEST)}; {_RECORD_LESS}")
    content = plain_value(data, path, "the memory snapshot")
    del data
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
    return Contents(
        settings=_text(as_dict(content.get("allocator_settings")).get("PYTORCH_CUDA_ALLOC_CONF")),
        segments=segments,
        events=events,
        steps=_optimizer_steps(content.get("external_annotations")),
    )


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


_ACTIONS = {
    action: action
    for action in (
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
        "snapshot",
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
    node = next((found[1] for found in map(_NODE.search, native) if found), "")
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
