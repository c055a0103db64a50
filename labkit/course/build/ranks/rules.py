"""What an answer must not do, and how a rank notices it.

An answer runs in a Python process, and Python hides nothing from code in the same process. Three observers together see
the shortcuts that a reader of Python's documentation finds:

- `sys.addaudithook` reports files, sockets, new processes, frames and the garbage collector. A hook cannot be removed.
- `sys.setprofile` reports each call of a Python function, and most calls of functions in C. What counts is the file in
  which a function is defined, so that neither an alias nor the way of importing it makes a difference.
- the classes of torch in C (`dist.Reducer`) are replaced by ones that report who creates them, and `Rules.intact`
  compares the functions that count and compute with those of before the answer.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import labkit
from labkit.course.build.record import Record

# ---- finished implementations


_TORCH = Path(torch.__file__).parent
_PARTS = (
    "nn/parallel/", "distributed/fsdp/", "distributed/_composable/", "distributed/optim/", "distributed/nn/",
    "distributed/tensor/", "distributed/_tensor/", "distributed/pipelining/", "distributed/algorithms/",
    "distributed/_functional_collectives.py", "distributed/_symmetric_memory/", "_inductor/",
)  # fmt: skip
_PACKAGES = ("deepspeed", "accelerate", "fairscale", "megatron")
_PACKAGE_PATHS = tuple(str(_TORCH.parent / package) + "/" for package in _PACKAGES)


def _path(part: str) -> str:
    return str(_TORCH / part) + ("/" if part.endswith("/") else "")


def _module(part: str) -> str:
    return f"torch.{part.removesuffix('.py').strip('/').replace('/', '.')}"


_C10D = torch._C._distributed_c10d
_CLASSES = ("Reducer", "Logger", "ProcessGroupGloo", "_ProcessGroupWrapper", "_StoreCollectives", "_SymmetricMemory")
_FUNCTIONS = ("_broadcast_coalesced", "_compute_bucket_assignment_by_size", "_register_builtin_comm_hook")
_BACKEND = ("allreduce", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "send", "recv")
_BACKEND_MORE = ("broadcast", "reduce", "gather", "scatter", "alltoall", "alltoall_base", "allreduce_coalesced")

# ---- ways around the recorder


_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen")
_PROBE = tuple(str(Path(labkit.__file__).parent / part) + os.sep for part in ("probe", "record"))
_SEES = "looks at the judge, not at its arguments"
BY_ANSWER = {  # events of the interpreter that count if the answer causes them, itself or by the standard library
    "sys._getframe": _SEES,
    "sys._current_frames": _SEES,
    "gc.get_objects": _SEES,
    "gc.get_referrers": _SEES,
    "gc.get_referents": _SEES,
    "sys.setprofile": "replaces the profiler of the judge",
    "sys.settrace": "replaces the tracer of the judge",
    "sys.addaudithook": "adds an audit hook",
    "mmap.__new__": "maps memory that no tensor counts",
    "ctypes.dlopen": "calls C directly",
    "ctypes.dlsym": "calls C directly",
    "ctypes.addressof": "calls C directly",
    "ctypes.cdata": "calls C directly",
}
BELOW_ANSWER = {  # events that count if the answer is anywhere on the stack
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.exec": "starts a process",
    "os.system": "starts a process",
    "subprocess.Popen": "starts a process",
    "os.kill": "sends a signal",
    "socket.connect": "opens a connection",
    "socket.bind": "opens a connection",
    "socket.sendto": "opens a connection",
    "socket.sendmsg": "opens a connection",
    "sqlite3.connect": "opens a database",
}
_ATTRIBUTES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_C_CALLS = {  # functions in C that the answer calls itself, by name
    "getprofile": "looks at the profiler of the judge",
    "memfd_create": "opens a file in memory",
    "pipe": "opens a pipe",
    "shm_open": "opens shared memory",
    "start_new_thread": "starts a thread; operations of other threads are not counted",
    "from_file": "maps a file into memory",
    "_get_dispatch_stack_at": _SEES,
    "_pop_torch_dispatch_stack": "removes the recorder",
    "numpy": "takes a tensor out of torch, where no operation is counted",
    "tolist": "takes a tensor out of torch, where no operation is counted",
    "from_numpy": "brings an array of NumPy into torch, whose operations are not counted",
}
_SMALL = 64  # elements that may leave torch, such as a list of sizes
_PYTHON_CALLS = {  # functions of libraries in Python that the answer calls, by the end of their file and their name
    ("threading.py", "start"): "starts a thread; operations of other threads are not counted",
    ("torch/_tensor.py", "__array__"): "takes a tensor out of torch, where no operation is counted",
    ("torch/_tensor.py", "__dlpack__"): "takes a tensor out of torch, where no operation is counted",
    ("torch/storage.py", "share_memory_"): "opens shared memory",
    ("torch/storage.py", "_share_memory_lock_protected"): "opens shared memory",
    ("torch/utils/_python_dispatch.py", "_get_current_dispatch_mode"): _SEES,
    ("torch/utils/_python_dispatch.py", "_get_current_dispatch_mode_stack"): _SEES,
    ("torch/utils/_python_dispatch.py", "_disable_current_modes"): "removes the recorder",
    ("torch/utils/_python_dispatch.py", "_pop_mode"): "removes the recorder",
    ("torch/serialization.py", "save"): "writes a file",
}
_WATCHED: tuple[Any, ...] = (  # modules and classes whose functions an answer must not replace
    *(torch, dist, dist.distributed_c10d, torch.autograd, nn.functional, torch.utils._python_dispatch),
    *(torch.Tensor, torch._C.TensorBase, nn.Module, nn.Linear, nn.Parameter, torch.optim.Optimizer, torch.optim.Adam),
    *(torch.optim.SGD, torch.autograd.Function, _C10D.ProcessGroup, _C10D.Work, _C10D.Store, torch.UntypedStorage),
    *(sys, os, np),
)
_MUST_NOT_GROW = (torch.Tensor, nn.Linear, nn.Parameter, torch.optim.Adam, torch.optim.SGD)


class Rules:
    """Between `with Rules(record, names):`, notes the first thing that the answer whose globals are `names` must not
    do. `allowed` are parts of torch, of `_PARTS`, that it may call although they are finished implementations."""

    def __init__(self, record: Record, names: dict[str, Any], allowed: Sequence[str] = ()):
        self._record, self._names = record, names
        self.leaves: Callable[[], None] = lambda: None  # is called when the answer takes a few numbers out of torch
        parts = [part for part in _PARTS if part not in allowed]
        self._finished = (*(_path(part) for part in parts), *_PACKAGE_PATHS)
        self._modules = (*(_module(part) for part in parts), *_PACKAGES)
        self._known: dict[CodeType, bool] = {}
        self._active = self._busy = False
        self._originals: list[tuple[Any, list[tuple[str, Any]], int]] = []
        sys.addaudithook(self._audit)

    def __enter__(self) -> Rules:
        self._before = sys.getprofile()
        self._replaced: list[tuple[Any, str, Any]] = []
        for name in _CLASSES:
            if hasattr(_C10D, name):
                self._report(getattr(_C10D, name), "__init__", f"torch.distributed.{name.removeprefix('_')}")
        for name in (*_BACKEND, *_BACKEND_MORE):
            self._report(_C10D.Backend, name, f"torch._C._distributed_c10d.Backend.{name}")
        for name in _FUNCTIONS:
            for module in (_C10D, dist, dist.distributed_c10d):
                if hasattr(module, name):
                    self._report(module, name, f"torch.distributed.{name}")
        self.begin()
        self._active = True
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        if sys.getprofile() != self._profile and not error[0]:
            self._forbid("replaces the profiler of the judge")
        self._active = False
        sys.setprofile(self._before)
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)

    def begin(self) -> None:
        """From here on, `intact` compares with what is there now."""
        for owner in _WATCHED:
            functions = [(name, value) for name, value in vars(owner).items() if _acts(value)]
            self._originals.append((owner, functions, len(vars(owner))))

    def intact(self) -> None:
        """Notes a function of torch that has been replaced."""
        for owner, before, size in self._originals:
            now = vars(owner)
            try:  # indexing is no call, which `_profile` would see thousands of times
                changed = [name for name, value in before if now[name] is not value]
            except KeyError as missing:
                changed = [missing.args[0]]
            if owner in _MUST_NOT_GROW and len(now) > size:
                changed += [name for name in list(now)[size:] if name != "__slotnames__"]  # which pickle adds
            if changed:
                self._forbid(f"replaces {getattr(owner, '__name__', owner)}.{changed[0]}")
                return

    def _forbid(self, words: str) -> None:
        self._record.forbidden = self._record.forbidden or words

    # ---- who called

    def answers(self) -> bool:
        """Whether a line of the answer has called the operator that the recorder sees, and not one of the probe."""
        return self._below(sys._getframe(1), replaced=("item",))

    def _caused(self, frame: FrameType | None) -> bool:
        return is_caused(frame, self._names)

    def _below(self, frame: FrameType | None, replaced: Sequence[str] = ()) -> bool:
        """Whether the answer is anywhere on the stack, and the probe of an ordinary run is not called by it, except for
        functions of torch that it has replaced."""
        while frame is not None and (
            not frame.f_code.co_filename.startswith(_PROBE) or frame.f_code.co_name in replaced
        ):
            if is_answer(frame, self._names):
                return True
            frame = frame.f_back
        return False

    # ---- observers

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active or self._busy:
            return
        self._busy = True
        try:
            if event == "import" and str(args[0]).startswith(self._modules) and self._caused(sys._getframe(1)):
                self._record.finished_api = self._record.finished_api or str(args[0])
            words, caused = self._event(event, args)
            if words and caused(sys._getframe(1)):
                self._forbid(words)
        finally:
            self._busy = False

    def _event(self, event: str, args: tuple[Any, ...]) -> tuple[str, Callable[[FrameType | None], bool]]:
        """What an event says in words, if it can be forbidden, and when it is the answer's."""
        if event in BY_ANSWER:
            return f"{BY_ANSWER[event]} ({event})", self._caused
        if event in BELOW_ANSWER:
            return f"{BELOW_ANSWER[event]} ({event})", self._below
        if event == "object.__getattr__" and args[1] in _ATTRIBUTES:
            return f"{_SEES} ({args[1]})", self._caused
        if event == "import" and str(args[0]).startswith("labkit"):
            return f"imports {args[0]}, which belongs to the judge", self._caused
        if event == "open" and _is_data(*args):
            return f"opens {args[0]}", self._below
        return "", self._caused

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if is_answer(frame, self._names):
                self._c_call(arg)
            return
        if event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            self._known[code] = code.co_filename.startswith(self._finished) and not code.co_name.startswith("<")
        if self._known[code] and not self._record.finished_api and not _is_imported(frame):
            self._record.finished_api = _name(frame)
        if code.co_name in _PYTHON_NAMES:
            for (end, name), words in _PYTHON_CALLS.items():
                if code.co_name == name and code.co_filename.endswith(end) and self._caused(frame.f_back):
                    self._forbid(f"{words} ({name})")

    def _c_call(self, function: Any) -> None:
        name = getattr(function, "__name__", "")
        if name in _C_CALLS:
            tensor = getattr(function, "__self__", None)
            if isinstance(tensor, torch.Tensor) and tensor.numel() <= _SMALL:
                self.leaves()
                return
            if name in ("numpy", "tolist") and not isinstance(tensor, torch.Tensor):
                return
            self._forbid(f"{_C_CALLS[name]} ({name})")

    def _report(self, owner: Any, name: str, words: str) -> None:
        """Replaces a function in C by one that notes when the answer calls it."""
        original = getattr(owner, name, None)
        if original is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._record.finished_api and self._caused(sys._getframe(1)):
                self._record.finished_api = words
            return original(*args, **kwargs)

        setattr(owner, name, call)
        self._replaced.append((owner, name, original))


_PYTHON_NAMES = {name for _, name in _PYTHON_CALLS}


def _acts(value: Any) -> bool:
    """Whether a value is a function, a class or a property."""
    return callable(value) or hasattr(type(value), "__get__")


def is_answer(frame: FrameType, names: dict[str, Any]) -> bool:
    """Whether a frame runs a line of the answer whose globals are `names`, or a text that it executes."""
    if frame.f_globals is names:
        return True
    if not frame.f_code.co_filename.startswith("<") or frame.f_code.co_filename.startswith("<frozen"):
        return False
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    return module is None or vars(module) is not frame.f_globals


def is_caused(frame: FrameType | None, names: dict[str, Any]) -> bool:
    """Whether the answer whose globals are `names` made the call that this frame makes, itself or through the standard
    library."""
    while frame is not None and _in_library(frame):
        frame = frame.f_back
    return frame is not None and is_answer(frame, names)


def _in_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_LIBRARY) and "site-packages" not in name


def _is_imported(frame: FrameType | None) -> bool:
    """Whether a frame belongs to the import of a module, which defines functions and calls some of them."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _is_data(path: Any, mode: Any, flags: Any) -> bool:
    """Whether an opened file is none that Python and its packages read: writing, or reading elsewhere."""
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(flags, int) else False
    if isinstance(path, int):
        return False
    name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
    installed = name.startswith((sys.prefix, sys.base_prefix, *_LIBRARY))
    if writes:
        return not (installed and "__pycache__" in name)
    return not (installed or name.endswith((".py", ".pyc")))


def _name(frame: FrameType) -> str:
    """The function of a frame, as `torch.nn.parallel.distributed.DistributedDataParallel.__init__`."""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has only the name
    return f"{frame.f_globals.get('__name__', code.co_filename)}.{name}"
