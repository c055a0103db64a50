"""The last line of a graded script: `graded("ddp", "hooks", Hooks, folder)` runs the trial on this rank."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds and is no part of the answer
import torch.distributed as dist

from labkit.course.build.ranks.finished_api import FinishedApi
from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.ranks.watchdog import Watchdog, line_of, where
from labkit.course.build.record import END, Record

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
    found = ""
    while traceback is not None:
        found = line_of(traceback.tb_frame, source) if traceback.tb_frame.f_code.co_filename == source else found
        traceback = traceback.tb_next
    return found
