"""Traces one rank of a script of the user's own: runs it from its first line, without data in its tensors, until its
third step, and reports the newest complete step. For another second it looks for steps that send something else.

Steps, phases and owners are those of the probe, whose hooks run here with the tape as their clock. What the script must
not do is refused, GPUs are replaced, and data loaders work without processes.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import errno
import inspect
import math
import multiprocessing.process
import os
import resource
import signal
import stat
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
import types
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from labkit.common.text import visible_line
from labkit.common.units import size
from labkit.prediction.tracing import world
from labkit.prediction.tracing.rank import reported
from labkit.prediction.tracing.tape import Tape, TapeCensus, scoped
from labkit.prediction.tracing.torch_private import (
    ALL_TRUE,
    DEVICE_CONTEXT,
    FAKE_MODE,
    FAKE_TENSOR,
    GIVEN_SHAPES,
    NEEDS_SHAPES,
    NO_KERNEL,
    NO_SHAPE,
    NO_VALUES,
    STAGES_AGREE,
)
from labkit.prediction.tracing.world import Refused, Replica, replaced
from labkit.probe.clocks import CpuClock
from labkit.probe.hooks import watch_steps
from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.probe.runner import code_of
from labkit.probe.steps import StepWatch
from labkit.probe.torch_private import NEXT_BATCH

# ---- what a script says about devices, on a machine without GPUs: every tensor is on the traced device instead, also
# if the script gives the CPU a number

TRACED = torch.device("cpu")
_SAME = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "init", "ipc_collect"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction"),
)
_ADDRESSED = 40  # bits of an offset in a storage
_ASSUMED = dict.fromkeys((torch.isfinite, torch.Tensor.isfinite, ALL_TRUE.get()), True) | dict.fromkeys(
    (torch.isnan, torch.isinf, torch.Tensor.isnan, torch.Tensor.isinf), False
)
_NUMBERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class OnTracedDevice(TorchFunctionMode):
    """Replaces each GPU, and each numbered CPU, among the arguments of torch's functions. Numbers of tensors without
    data are finite, and parameters of distributions valid. `address` numbers the storages of tensors, which libraries
    tell apart by their addresses.
    """

    def __init__(self, address: Callable[[torch.Tensor], int]):
        super().__init__()
        self._address = address

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME:
            return args[0]
        if func is torch.Tensor.__format__ and not args[0].dim():
            return format(args[0].item(), args[1])
        if func is torch.Tensor.data_ptr and type(args[0]) is FAKE_TENSOR.get():
            return (self._address(args[0]) << _ADDRESSED) + args[0].storage_offset() * args[0].element_size()
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        named = {name: _here(value, name == "device") for name, value in (kwargs or {}).items()}
        result = func(*(_here(value, func is torch.Tensor.to) for value in args), **named)
        if func in _ASSUMED and type(result) is FAKE_TENSOR.get():
            return torch.full(result.shape, _ASSUMED[func], dtype=torch.bool)
        return result


def _here(value: Any, is_device: bool = False) -> Any:
    """`value`, or the traced device if it names a GPU or a CPU; an int does so where only devices are ints."""
    if isinstance(value, torch.device):
        return TRACED if value.type in ("cpu", "cuda") else value
    if isinstance(value, str):
        return str(TRACED) if value == "cuda" or value.startswith(("cpu:", "cuda:")) else value
    return TRACED if is_device and type(value) is int else value


def without_gpus(asked: bool, ranks: int) -> None:
    """Replaces the functions and classes that need a GPU, for the rest of the process. If GPUs are `asked` for, there
    is one per rank."""
    for name in _NOTHING:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in _NUMBERS:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.nn.Module.cuda = lambda module, device=None: module
    _with(DEVICE_CONTEXT.get())
    _with(torch.autocast)
    _with(torch.amp.GradScaler)
    if asked:
        _with(FullyShardedDataParallel, device_id=TRACED)
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: ranks
        torch.cuda.current_device = lambda: int(os.environ["LOCAL_RANK"])
        torch.cuda.is_bf16_supported = lambda *_, **__: True
        torch.cuda.get_device_name = lambda *_: "GPU"


def _with(kind: Any, **fixed: Any) -> None:
    """Each GPU among the constructor's arguments is replaced; others are `fixed`."""
    create: Callable[..., None] = kind.__init__

    @wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *map(_here, args), **{name: _here(value) for name, value in kwargs.items()} | fixed)

    kind.__init__ = init


# ---- what a script does with other processes, in a trace that has none: data loaders without workers, exchanges of
# Python objects, in which every rank has the same one, pipeline stages that must know the shapes of their inputs and
# outputs, and groups of torch's fake backend

_OF_WORKERS = (
    *("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "worker_init_fn"),
    *("pin_memory", "pin_memory_device", "in_order"),
)


def works_alone(tape: Tape) -> None:
    """Replaces these functions, for the rest of the process. What workers of a loader would do counts as theirs."""
    create, iterate, fetch, group = DataLoader.__init__, DataLoader.__iter__, NEXT_BATCH.get(), dist.new_group

    @wraps(create)
    def init(loader: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(create).bind(loader, *args, **kwargs).arguments
        create(**{name: value for name, value in given.items() if name not in _OF_WORKERS})
        loader.labkit_has_workers = bool(given.get("num_workers"))

    @wraps(iterate)
    def iterator(loader: Any) -> Any:
        batches = iterate(loader)
        batches.labkit_has_workers = loader.labkit_has_workers
        return batches

    def fetched(batches: Any) -> Any:
        with tape.in_other_processes() if batches.labkit_has_workers else nullcontext():
            return fetch(batches)

    DataLoader.__init__, DataLoader.__iter__ = init, iterator
    NEXT_BATCH.replace(wraps(fetch)(fetched))
    if STAGES_AGREE.exists() and NEEDS_SHAPES.exists():
        STAGES_AGREE.replace(_stages_know)
    torch.compile = lambda model=None, **_: (lambda function: function) if model is None else model
    replaced(
        (group, wraps(group)(lambda ranks=None, *_, **kwargs: group(ranks, **kwargs | {"backend": None}))),
        (dist.all_gather_object, _gathered),
        (dist.gather_object, _gathered_by_one),
        (dist.broadcast_object_list, lambda objects, *_, **__: None),
        (dist.scatter_object_list, _scattered),
        (dist.send_object_list, _exchanged),
        (dist.recv_object_list, _exchanged),
    )


def _stages_know(stage: Any, received_result: Any = None) -> torch.Tensor:
    """What the stages of a pipeline agree on before their first step: that each was given its shapes."""
    if NEEDS_SHAPES.get()(GIVEN_SHAPES.of(stage), True):
        _exchanged()
    return torch.tensor([1], dtype=torch.int32)


def _gathered(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _gathered_by_one(own: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        _gathered(objects, own)


def _scattered(output: list[Any], inputs: list[Any] | None = None, *_: Any, **__: Any) -> None:
    output[0] = inputs[dist.get_rank()] if inputs else None


def _exchanged(*_: Any, **__: Any) -> NoReturn:
    raise Refused(
        "exchanges Python objects with another rank",
        "a trace has no other ranks, and a PipelineStage does without them if it is given input_args and output_args",
    )


# ---- what a script decides by a number that it reads from data, such as its loss: a trace has no data, and reads 1
#
# The numbers that `item()` and `tolist()` return, and what is computed from them, remember that, and note the first
# line that compares one of them. A second trace, with the contrary result of all comparisons, then tells whether its
# steps depend on them.
#
# `float(x)` returns nothing but a float of Python, so the code of the script, and of the modules beside it, calls
# another function instead, which reads a tensor as `item()` does. What `math`, `statistics` and NumPy compute of such
# numbers is followed; arrays and other libraries are not.

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_EQUALITY = ("__eq__", "__ne__")
_ARITHMETIC = (
    *(f"__{side}{name}__" for name in _OF_TWO for side in ("", "r")),
    *("__neg__", "__pos__", "__abs__", "__round__"),
)
_COMPUTE: dict[Any, tuple[str, ...]] = {
    math: ("exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "sqrt", "pow", "fsum", "tanh"),
    statistics: ("mean", "fmean", "median", "stdev", "pstdev", "variance", "pvariance"),
    np: ("mean", "nanmean", "average", "median", "percentile", "quantile", "sum", "prod", "min", "max", "std", "var"),
}
_FLOAT = "_float_or_item"  # a builtin function


class Decisions:
    """The comparisons of a trace; if `contrary`, each of them has the contrary result. `first` is where the first one
    was, if there was one."""

    def __init__(self, contrary: bool):
        self.contrary = contrary
        self.first: traceback.StackSummary | None = None

    def follow(self, libraries: tuple[str, ...]) -> None:
        """Replaces what reads numbers from tensors, and how modules outside of `libraries` are loaded, for the rest of
        the process. Constants of the script are known."""

        def reading(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
            def read(tensor: torch.Tensor) -> Any:
                is_known = getattr(tensor, "constant", None) is not None
                value = original(tensor)
                return value if is_known else self._unknown(value)

            return read

        torch.Tensor.item = item = reading(torch.Tensor.item)
        torch.Tensor.tolist = reading(torch.Tensor.tolist)

        def number(*values: Any) -> Any:
            is_read = len(values) == 1 and isinstance(values[0], torch.Tensor) and values[0].is_floating_point()
            return item(values[0]) if is_read else values[0] if _are_unknown(values) else float(*values)

        setattr(builtins, _FLOAT, number)
        for module, names in _COMPUTE.items():
            for name in names:
                if hasattr(module, name):  # exp2 is of Python 3.11
                    setattr(module, name, self._followed(getattr(module, name)))
        load = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, name: str) -> Any:
            path = loader.get_filename(name)
            return load(loader, name) if path.startswith(libraries) else compiled(path)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]

    def _unknown(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._unknown(item) for item in value]
        return _Unknown(value, self) if isinstance(value, float) else value

    def _followed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def computed(*values: Any, **options: Any) -> Any:
            result = function(*values, **options)
            return self._unknown(result) if _are_unknown(values) else result

        return computed

    def compared(self, result: bool) -> bool:
        """A number that the data determine has been compared, with this result; returns the result to continue with."""
        if self.first is None:
            self.first = traceback.extract_stack()
        return result != self.contrary


def compiled(path: str) -> CodeType:
    """The code of a file of the user's own, in which decisions are followed."""
    tree = ast.parse(Path(path).read_bytes(), path)
    return compile(_Floats().visit(tree), path, "exec", dont_inherit=True)


class _Floats(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Name) and node.func.id == "float":
            node.func.id = _FLOAT
        self.generic_visit(node)
        return node


def _are_unknown(values: Any) -> bool:
    return any(
        isinstance(value, _Unknown) or (isinstance(value, (list, tuple, deque)) and _are_unknown(value))
        for value in values
    )


class _Unknown(float):
    """A number that the data determine."""

    decisions: Decisions

    def __new__(cls, value: float, decisions: Decisions) -> _Unknown:
        number = super().__new__(cls, value)
        number.decisions = decisions
        return number

    __hash__ = float.__hash__


def _comparison(name: str) -> Callable[[_Unknown, Any], Any]:
    compare = getattr(float, name)

    def compared(number: _Unknown, other: Any) -> Any:
        result = compare(number, other)
        looks_for_nan = name in _EQUALITY and isinstance(other, _Unknown)
        is_decision = result is not NotImplemented and not looks_for_nan
        return number.decisions.compared(result) if is_decision else result

    return compared


def _operation(name: str) -> Callable[..., Any]:
    compute = getattr(float, name)

    def computed(number: _Unknown, *others: Any) -> Any:
        result = compute(number, *others)
        return _Unknown(result, number.decisions) if isinstance(result, float) else result

    return computed


def _is_true(number: _Unknown) -> bool:
    return number.decisions.compared(bool(float(number)))


_Unknown.__bool__ = _is_true  # type: ignore[method-assign]
for _name in _COMPARISONS:
    setattr(_Unknown, _name, _comparison(_name))
for _name in _ARITHMETIC:
    setattr(_Unknown, _name, _operation(_name))


# ---- what a traced script must not do: write, rename or remove files, start processes, open connections. A folder that
# it creates is not created, and nothing is said: many scripts begin with one for their checkpoints
#
# A refusal is a `PermissionError`, as on a disk that cannot be written, so that a library that can do without its cache
# continues. It comes from an audit hook of Python; C++ code that opens files itself is stopped by a limit of 0 bytes
# per file, and `torch.save` is replaced.

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit event: what it does to the path that is its first argument
    "os.rmdir": "removes the folder",
    "os.remove": "removes",
    "os.rename": "renames",
    "os.link": "links",
    "os.symlink": "creates a link to",
    "os.truncate": "truncates",
    "os.chmod": "changes the mode of",
    "os.chown": "changes the owner of",
    "os.utime": "changes the time of",
    "shutil.rmtree": "removes the folder",
    "sqlite3.connect": "opens the database",
}
_PROCESSES = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn")
_CONNECTIONS = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")
_START = "starts a process", "leave it to torchrun to start the ranks"
_LISTED = ("os.listdir", "os.scandir")


class Refusals:
    """Refuses from its creation on, for the rest of the process, while `active`. `read` are the absolute paths of files
    and folders that were read."""

    def __init__(self) -> None:
        tempfile.gettempdir()  # stored: it is found by writing
        self.active = True
        self.read: set[str] = set()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        sys.addaudithook(self._audit)
        multiprocessing.process.BaseProcess.start = _refusing(*_START)
        torch.multiprocessing.spawn = torch.multiprocessing.start_processes = _refusing(*_START)
        torch.save = _refusing("saves a file with torch.save")
        os.mkdir = _does_not_create

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, (str, bytes)):
                self._opens(os.fsdecode(path), flags or 0)
        elif event in _CHANGES:
            raise Refused(f"{_CHANGES[event]} {_named(args[0])}")
        elif event in _LISTED and isinstance(args[0], (str, bytes)):
            self.read.add(os.path.abspath(os.fsdecode(args[0])))  # noqa: PTH100 without links
        elif event == "subprocess.Popen":
            raise Refused(f"starts the program {_named(args[0])}")
        elif event in _PROCESSES:
            raise Refused(*_START)
        elif event in _CONNECTIONS:
            raise Refused("opens a connection")

    def _opens(self, path: str, flags: int) -> None:
        if not flags & _WRITING:
            self.read.add(os.path.abspath(path))  # noqa: PTH100
        elif not _is_device(path):
            raise Refused(f"writes to {_named(path)}")


def _refusing(*reason: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise Refused(*reason)

    return refuse


def _does_not_create(path: Any, *_: Any, **__: Any) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def _named(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return False


STEPS = 3  # the first typical one, whatever wraps the model, and the one of which a run profiles the memory
LEAST = 2  # optimizers have their state in it
_LATER, _MORE = 16, 2.0  # further steps, and seconds of CPU time for them, in which it may send other bytes
_ALIKE = 0.02  # share of the bytes
_UNPLACED = "the script"
_HERE = Path(__file__).parents[2]
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    *(str(_HERE / package) for package in ("prediction", "probe")),
)


# ---- the trace of a script


class Ended(BaseException):
    """Ends the script, like SystemExit: its steps are traced, or it takes too long."""


class Untraceable(Exception):
    """The script cannot be traced: one sentence with the reason, the line and what would make it possible."""


def trace(request: dict[str, Any], rank: int) -> dict[str, Any]:
    """The trace of the newest complete step of one rank, as `rank.trace` returns it, with `ended`, why it is not step
    `STEPS`, and `read`, the files that were read.

    `request` has `arguments` (a script, or `-m` and a module, and its arguments), `folder`, the working folder,
    `environment`, `ranks`, their number, `gpus`, whether each of them has a GPU, `limit` in seconds, and `number`, what
    the script reads from an integer without data, and `contrary`, whether what it compares other numbers with has the
    contrary result. The result also has `number_read` and `decided`, the lines that first read an integer and compared
    another number, or empty texts. Raises `Untraceable`.
    """
    os.environ.clear()
    os.environ.update(request["environment"], CUDA_VISIBLE_DEVICES="")
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.dont_write_bytecode = True
    _without_streams()
    tape = Tape(request["gpus"])
    tape.keeps_kernels = tape.computes_numbers = True
    tape.number = request["number"]
    decisions = Decisions(request["contrary"])
    decisions.follow(_LIBRARIES)
    world.join(rank, request["ranks"])
    works_alone(tape)
    if request["gpus"]:
        world.updates_together()
    without_gpus(request["gpus"], request["ranks"])
    for owner, name, function in scoped(tape):
        setattr(owner, name, function)
    journal = _Unwritten()
    watch = watch_steps(journal, Patches(journal), Guard(journal, "steps"))
    watch.sampler = steps = Steps(tape, watch, request["gpus"])
    refusals = Refusals()
    signal.signal(signal.SIGALRM, _is_late)
    signal.alarm(request["limit"])
    try:
        with FAKE_MODE.get()(allow_non_fake_inputs=True), OnTracedDevice(tape.address), tape:
            _run(request["arguments"])
            watch.script_ends(0.0)
        ended, fix = "the script ended", "a trace needs one"
    except Ended as end:
        ended, fix = str(end), "use a smaller model or fewer samples"
    except SystemExit as end:
        ended, fix = f"{_line(end)} ended the script with exit code {end.code or 0}", "a trace needs one"
    except Exception as error:
        ended, fix = _why(error)
    finally:
        signal.alarm(0)
        refusals.active = False
    if not steps.done:
        raise Untraceable(f"{ended} before the first optimizer step; {fix}")
    if steps.done < LEAST:
        raise Untraceable(f"{ended} in the step after the first one, which is not a typical one; {fix}")
    tape.keeps_kernels = False
    early = steps.note if steps.done >= STEPS else f"the trace has {steps.done} of {STEPS} steps: {ended.rstrip(',')}"
    read = refusals.read | {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}
    own = sorted(
        path for path in read if path.startswith("/") and not path.startswith((*_LIBRARIES, "/proc/", "/dev/"))
    )
    lines = {"number_read": tape.first_read, "decided": decisions.first}
    places = {name: _place(frames) if frames else "" for name, frames in lines.items()}
    return steps.newest() | {"ended": early, "read": own} | places


class TapeClock(CpuClock):
    """Marks are times on the tape; losses have no values."""

    def __init__(self, tape: Tape):
        self._tape = tape

    def mark(self) -> int:
        """The time on the tape."""
        return self._tape.mark()

    def copy(self, scalar: torch.Tensor) -> None:
        """There is nothing to copy."""


class Steps:
    """Takes the place of the probe's sampler: keeps the record of each complete step up to `STEPS`, or the first one
    after it, and ends the script some time after that. `done` is the number of the newest complete step, `note` tells
    which later step sends other bytes, in words. Memory is that of the step that takes more."""

    profiles_memory = True

    def __init__(self, tape: Tape, watch: StepWatch, on_gpu: bool):
        self.done = 0
        self._tape, self._watch, self._on_gpu = tape, watch, on_gpu
        self._before: dict[int, tuple[str, int]] | None = {}
        self._newest: tuple[Any, ...] = ()
        self._other: tuple[Any, ...] = ()  # the later step that sends other bytes
        self._changes = 0  # of the tape's history, up to the newest step
        self.note = ""
        self._later = 0
        self._began = self._last = time.process_time()  # of the step, and the last one for later steps
        watch.use(TapeClock(tape))

    def step_ends(self, step: int, phases: list[tuple[str, int, int]], clock: Any) -> bool:
        """A step has ended; the next one begins."""
        owned, owners, left = self._owned()
        tape = self._tape
        record = tape.allocations, tape.kernels, tape.calls, tape.flops, tape.work
        if self.done >= STEPS:
            self._compare(step, (record, phases, self._before, owned, owners))
        elif self._before is not None:
            self._newest = record, phases, self._before, owned, owners
            self.done, self._changes = step, len(tape.changes)
            if self.done >= STEPS:
                tape.keeps_kernels = False
                self._last = time.process_time() + _MORE
                if time.process_time() - self._began > _MORE:
                    raise Ended
        self._before, self._began = left, time.process_time()
        self._tape.restart()
        return True

    def _compare(self, step: int, record: tuple[Any, ...]) -> None:
        """Step `step`, after those that may be reported, has ended."""
        self._later += 1
        (_, _, calls, *_), *_ = self._newest
        reported, now = (sum(call.bytes for call in of_step) for of_step in (calls, self._tape.calls))
        if self._before is not None and abs(now - reported) > _ALIKE * max(now, reported):
            payload = f"collectives of {size(now)}, the one predicted of {size(reported)}"
            self.note = f"its steps differ: step {step} has {payload}"
            self._other, self._changes = record, len(self._tape.changes)
        if self.note or self._later == _LATER or time.process_time() > self._last:
            raise Ended

    def give_up(self) -> None:
        """An evaluation begins in this step, which does not count."""
        if self.done >= STEPS:
            raise Ended
        self._before = None

    def newest(self) -> dict[str, Any]:
        """The trace of the newest step."""
        del self._tape.changes[self._changes :]
        typical = self._reported(self._newest)
        other = self._reported(self._other) if self._other else typical
        if other["step"]["peak"] > typical["step"]["peak"]:
            typical |= {name: other[name] for name in ("step", "phase_at_peak", "owners")}
        return typical

    def _reported(self, step: tuple[Any, ...]) -> dict[str, Any]:
        tape = self._tape
        (tape.allocations, tape.kernels, tape.calls, tape.flops, tape.work), *rest = step
        return reported(tape, *rest)

    def _owned(self) -> tuple[dict[int, tuple[str, int]], dict[str, int], dict[int, tuple[str, int]]]:
        """Owner and bytes by address of everything that outlives a step, and the bytes of each owner, as the probe
        counts them; then the first with what the step has left behind, such as its batch. On a GPU everything else that
        is allocated is `other`, as in the probe, except data sets."""
        census = TapeCensus(self._tape)
        replicas = [replica for replica in Replica.live if not replica.gradient_as_bucket_view]
        buckets = census.add((buffer for replica in replicas for buffer in replica.buckets), "communication")
        owners = self._watch.memory.count(census)
        owners["communication"] += buckets
        self._tape.elsewhere |= {address for address, (_, size) in census.counted.items() if not size}
        if self._on_gpu:
            rest = {address: size for address, size in self._tape.allocated.items() if address not in census.counted}
            census.counted |= {address: ("other", size) for address, size in rest.items()}
            owners["other"] += sum(rest.values())
        owned = dict(census.counted)
        self._watch.memory.alive(census)
        return _with_bytes(owned), owners, _with_bytes(census.counted)


def _with_bytes(counted: dict[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    return {address: (owner, size) for address, (owner, size) in counted.items() if size}


class _Unwritten(Journal):
    """Drops the events of the probe. If its steps fail, the trace ends."""

    silent = False

    def __init__(self) -> None:
        self.started = 0.0

    def spaced(self, every: int) -> int:
        """Always the same interval."""
        return every

    def write(self, kind: str, **fields: Any) -> None:
        """Drops an event."""

    def lost(self, part: str, error: Exception) -> None:
        """A part of the probe has failed."""
        if part == "steps":
            raise Ended(f"the probe failed with {type(error).__name__}: {error}")


def _run(arguments: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    sys.modules["__main__"] = main
    code = code_of(main, arguments)
    exec(code if arguments[0] == "-m" else compiled(main.__file__ or ""), main.__dict__)


def _without_streams() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)


def _is_late(_: int, frame: types.FrameType | None) -> NoReturn:
    raise Ended(f"{_place(traceback.extract_stack(frame))} was reached when the time for a trace was over,")


def _why(error: Exception) -> tuple[str, str]:
    """What ended the script, and what would make its trace possible. If a library cleaned up after a refusal, and that
    raised another error, the refusal is what ended it."""
    told = _line(error)
    before = error.__context__
    while isinstance(before, Exception):
        if isinstance(before, (Refused, NO_KERNEL.get(), NO_VALUES.get(), NO_SHAPE.get())):
            error = before
        before = before.__context__
    where = told if _line(error) == _UNPLACED else _line(error)
    if isinstance(error, Refused):
        return f"{where} {error}, which a trace refuses,", error.fix
    if isinstance(error, NO_KERNEL.get()):
        return (
            f"{where} uses {error.func}, of which torch knows no shapes,",
            "register them with torch.library.register_fake",
        )
    if isinstance(error, (NO_VALUES.get(), NO_SHAPE.get())):
        return (
            f"{where} needs the values of a tensor ({error.func}), which has none in a trace,",
            "decide and compute sizes by shapes, integers or numbers of Python",
        )
    message = visible_line(f"{type(error).__name__}: {error}").rstrip(".")
    refused = f", and it has refused a call that {Refused.newest}" if Refused.newest else ""
    return f"{where} raised {message},", f"a trace has no data and no peers{refused}"


def _line(error: BaseException) -> str:
    return _place(traceback.extract_tb(error.__traceback__))


def _place(frames: traceback.StackSummary) -> str:
    """The innermost line outside of libraries."""
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}" if own else _UNPLACED
