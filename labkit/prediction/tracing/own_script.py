"""Traces one rank of a script of the user's own: runs it from its first line, without data in its tensors, until its
third step, and reports the newest complete step. For another second it looks for steps that send something else.

Steps, phases and owners are those of the probe, whose hooks run here with the tape as their clock. What the script must
not do is refused (`guard.py`), GPUs are replaced (`gpu.py`), and data loaders work without processes.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

import torch

from labkit.common.text import visible_line
from labkit.common.units import size
from labkit.prediction.tracing import world
from labkit.prediction.tracing.alone import works_alone
from labkit.prediction.tracing.decisions import Decisions, compiled
from labkit.prediction.tracing.gpu import OnTracedDevice, without_gpus
from labkit.prediction.tracing.guard import Refusals, Refused
from labkit.prediction.tracing.rank import reported
from labkit.prediction.tracing.replicas import Replica
from labkit.prediction.tracing.tape import Tape, TapeCensus, scoped
from labkit.prediction.tracing.torch_private import FAKE_MODE, NO_KERNEL, NO_SHAPE, NO_VALUES
from labkit.probe.clocks import CpuClock
from labkit.probe.hooks import watch_steps
from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.probe.runner import code_of
from labkit.probe.steps import StepWatch

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
    which later step sends other bytes, in words."""

    profiles_memory = True

    def __init__(self, tape: Tape, watch: StepWatch, on_gpu: bool):
        self.done = 0
        self._tape, self._watch, self._on_gpu = tape, watch, on_gpu
        self._before: dict[int, tuple[str, int]] | None = {}
        self._newest: tuple[Any, ...] = ()
        self.note = ""
        self._later = 0
        self._began = self._last = time.process_time()  # of the step, and the last one for later steps
        watch.use(TapeClock(tape))

    def step_ends(self, step: int, phases: list[tuple[str, int, int]], clock: Any) -> bool:
        """A step has ended; the next one begins."""
        owned, owners, left = self._owned()
        tape = self._tape
        if self.done >= STEPS:
            self._compare(step)
        elif self._before is not None:
            record = tape.allocations, tape.kernels, tape.calls, tape.flops, tape.work
            self._newest = record, phases, self._before, owned, owners
            self.done = step
            if self.done >= STEPS:
                tape.keeps_kernels = tape.keeps_history = False
                self._last = time.process_time() + _MORE
                if time.process_time() - self._began > _MORE:
                    raise Ended
        self._before, self._began = left, time.process_time()
        self._tape.restart()
        return True

    def _compare(self, step: int) -> None:
        """Step `step`, after those that may be reported, has ended."""
        self._later += 1
        (_, _, calls, *_), *_ = self._newest
        reported, now = (sum(call.bytes for call in each) for each in (calls, self._tape.calls))
        if self._before is not None and abs(now - reported) > _ALIKE * max(now, reported):
            payload = f"collectives of {size(now)}, the one predicted of {size(reported)}"
            self.note = f"its steps differ: step {step} has {payload}"
        if self.note or self._later == _LATER or time.process_time() > self._last:
            raise Ended

    def give_up(self) -> None:
        """An evaluation begins in this step, which does not count."""
        if self.done >= STEPS:
            raise Ended
        self._before = None

    def newest(self) -> dict[str, Any]:
        """The trace of the newest step."""
        tape = self._tape
        (tape.allocations, tape.kernels, tape.calls, tape.flops, tape.work), *rest = self._newest
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
    own = [each for each in frames if not each.filename.startswith((*_LIBRARIES, "<"))]
    return f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}" if own else _UNPLACED
