"""The last line of a graded script: `graded("data_parallel", "hooks", Hooks, folder)` runs the trial on this rank."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds and is no part of the answer
import torch.distributed as dist

from labkit.course.build import solutions
from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import END, START, Event, Record
from labkit.record.stacks import frame_of

# ---- calls of a finished implementation
#
# The interpreter reports every call of a Python function (`sys.setprofile`). What counts is the file that the function
# is defined in, so that neither an alias nor the way of importing it makes a difference.


_TORCH = Path(torch.__file__).parent
_PARTS = (
    *("nn/parallel/", "distributed/fsdp/", "distributed/_composable/", "distributed/optim/", "distributed/nn/"),
    *("distributed/tensor/", "distributed/_tensor/", "distributed/pipelining/", "distributed/algorithms/"),
    *("distributed/_functional_collectives.py", "distributed/_symmetric_memory/"),
)
_PACKAGES = ("deepspeed", "accelerate", "fairscale", "megatron")
_FINISHED = (
    *(str(_TORCH / part) + ("/" if part.endswith("/") else "") for part in _PARTS),
    *(str(_TORCH.parent / package) + "/" for package in _PACKAGES),
    str(Path(solutions.__file__).parent),
)


class FinishedApi:
    """Between `with FinishedApi(record):`, notes the first function that an answer must not call."""

    def __init__(self, record: Record):
        self._record = record
        self._known: dict[CodeType, bool] = {}

    def __enter__(self) -> FinishedApi:
        self._before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._before[0])
        threading.setprofile(self._before[1])

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or self._record.finished_api:
            return
        code = frame.f_code
        if code not in self._known:
            self._known[code] = code.co_filename.startswith(_FINISHED) and not code.co_name.startswith("<")
        if self._known[code]:
            self._record.finished_api = _name(frame)


def _name(frame: FrameType) -> str:
    """The function of a frame, as `torch.nn.parallel.distributed.DistributedDataParallel.__init__`."""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has only the name
    return f"{frame.f_globals.get('__name__', code.co_filename)}.{name}"


# ---- a rank that makes no progress


_GRACE = 1.0  # seconds in which the other ranks can say where they wait, before the first one ends
STUCK = 3  # exit code of a rank that made no progress


class Watchdog(threading.Thread):
    """Calls `report` and exits the process after `patience` seconds without a call of torch, until `stop`."""

    def __init__(self, recorder: Recorder, patience: float, source: str, report: Callable[[], None]):
        super().__init__(name="labkit watchdog", daemon=True)
        self._recorder, self._patience, self._source, self._report = recorder, patience, source, report
        self._over = threading.Event()

    def stop(self) -> None:
        """The answer has ended."""
        self._over.set()

    def run(self) -> None:
        """Checks until `stop` is called."""
        seen, since = self._recorder.calls, time.monotonic()
        while not self._over.wait(self._patience / 10):
            if self._recorder.calls != seen:
                seen, since = self._recorder.calls, time.monotonic()
            elif time.monotonic() - since > self._patience:
                self._recorder.record.stuck = self._position()
                self._report()
                self._over.wait(_GRACE)
                os._exit(STUCK)

    def _position(self) -> str:
        """`waits in recv from rank 1 in step 0, at: dist.recv(x, 1)`."""
        if self._recorder.phase == END:
            return "has returned"
        waits_for, events = self._recorder.waits_for, self._recorder.record.events
        call = "is" if waits_for is None else f"waits in {call_in_words(events[waits_for])}"
        return f"{call}{where(self._recorder)}{line_of(frame_of(threading.main_thread()), self._source)}"


def call_in_words(event: Event) -> str:
    """`recv from rank 1`, `send to rank 0`, `all_reduce`."""
    direction = {"send": " to", "recv": " from"}.get(event.op)
    return event.op if direction is None or event.peer is None else f"{event.op}{direction} rank {event.peer}"


def where(recorder: Recorder) -> str:
    """` in backward of step 2`, or ` before the first step`."""
    return " before the first step" if recorder.phase == START else f" in {recorder.phase} of step {recorder.step}"


def line_of(frame: FrameType | None, source: str) -> str:
    """`, at: dist.recv(x, 1)`: the innermost line of the file `source`; empty if there is none."""
    while frame is not None and frame.f_code.co_filename != source:
        frame = frame.f_back
    return "" if frame is None else f", at: {linecache.getline(source, frame.f_lineno).strip()}"


# ---- the program of a rank


FAILED = 1  # exit code of a rank whose answer raised


def graded(module: str, trial: str, answer: Any, folder: str, patience: float = 20.0) -> None:
    """Runs the function `trial` of `ranks/<module>.py` with the answer, and writes this rank's record to `folder`.

    The process group is that of torchrun's environment. A rank without a call of torch for `patience` seconds says
    where it waits and exits; an answer that raises ends its rank with exit code 1.
    """
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    record = Record(dist.get_rank())
    recorder = Recorder(record)

    def report() -> None:
        record.at = time.time()
        record.write(Path(folder))

    source = sys._getframe(1).f_code.co_filename
    watchdog = Watchdog(recorder, patience, source, report)
    watchdog.start()
    try:
        with recorder, FinishedApi(record):
            getattr(importlib.import_module(f"labkit.course.build.ranks.{module}"), trial)(answer, recorder)
            with recorder.during(END):
                dist.barrier()  # no rank leaves while another still needs it
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}{where(recorder)}{_line(error.__traceback__, source)}"
    finally:
        watchdog.stop()
    report()
    if record.error:
        print(record.error, file=sys.stderr)
        sys.exit(FAILED)
    dist.destroy_process_group()


def _line(traceback: TracebackType | None, source: str) -> str:
    """As `line_of`, for the innermost frame of a traceback."""
    line = ""
    while traceback is not None:
        line = line_of(traceback.tb_frame, source) if traceback.tb_frame.f_code.co_filename == source else line
        traceback = traceback.tb_next
    return line
