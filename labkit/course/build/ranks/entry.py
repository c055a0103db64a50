"""The program of a rank: `run_answer(__file__, "precision", "step", "MixedPrecision", folder)` in the first line
of a graded script runs the rest of it, the answer, and then the trial.

The answer is executed after this rank has read what only this rank may know, and after its file is deleted. The
modules of the judge are no longer in `sys.modules` then, so that an answer which imports them gets copies, and is seen.
What a rank records is signed with a key that was in the same file: a record that is written by anyone else is noticed.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import hashlib
import hmac
import importlib
import io
import json
import linecache
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType

import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds and is no part of the answer
import torch.distributed as dist

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.ranks.rules import Rules
from labkit.course.build.record import END, START, Event, Record
from labkit.record.stacks import frame_of

MARK = "# ---- the answer"  # the line of a script after which the answer begins
_DRAWN = 120.0  # seconds in which the examiner draws the inputs
_POLL = 0.02  # seconds
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)

# ---- a rank that makes no progress


STUCK = 3  # exit code of a rank that made no progress


class Watchdog(threading.Thread):
    """Calls `report` after `patience` seconds without a call of torch, until `stop`, and then exits the process: after
    two more looks, in which the other ranks can say where they wait."""

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
        every = self._patience / 10
        while not self._over.wait(every):
            if self._recorder.calls != seen:
                seen, since = self._recorder.calls, time.monotonic()
            elif time.monotonic() - since > self._patience:
                self._recorder.record.stuck = self._position()
                self._report()
                self._over.wait(2 * every)
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


def raised_line(traceback: TracebackType | None, source: str) -> str:
    """As `line_of`, for the innermost frame of a traceback."""
    line = ""
    while traceback is not None:
        line = line_of(traceback.tb_frame, source) if traceback.tb_frame.f_code.co_filename == source else line
        traceback = traceback.tb_next
    return line


# ---- what a rank is given, and what it hands back


def given_path(folder: Path, rank: int) -> Path:
    """The file with the inputs of one rank, as the examiner draws it: {"key": hex, "given": tensors by name}."""
    return folder / f"given{rank}.pt"


def record_path(folder: Path, rank: int) -> Path:
    """The signed record of one rank: {"record": JSON, "signature": hex}."""
    return folder / f"rank{rank}.json"


def results_path(folder: Path, rank: int) -> Path:
    """The final tensors of one rank by name; their signature is in the record."""
    return folder / f"results{rank}.pt"


def signature(key: str, content: bytes) -> str:
    """The signature of a record or of its results."""
    return hmac.new(bytes.fromhex(key), content, hashlib.sha256).hexdigest()


def _given(path: Path) -> tuple[str, dict]:
    """The key and the inputs of this rank; the file is deleted."""
    end = time.monotonic() + _DRAWN
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"the examiner drew no inputs within {_DRAWN:.0f} s")
        time.sleep(_POLL)
    content = torch.load(path, weights_only=True)
    path.unlink()
    return content["key"], content["given"]


def _write(folder: Path, record: Record, results: dict[str, torch.Tensor], key: str) -> None:
    """Writes results and record, each whole or not at all."""
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().clone() for name, tensor in results.items()}, buffer)
    record.figures["results"] = signature(key, buffer.getvalue())
    text = json.dumps(record.to_json())
    signed = json.dumps({"record": text, "signature": signature(key, text.encode())})
    for path, content in (
        (results_path(folder, record.rank), buffer.getvalue()),
        (record_path(folder, record.rank), signed.encode()),
    ):
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").replace(path)


# ---- the program of a rank


FAILED = 1  # exit code of a rank whose answer raised


def run_answer(source: str, module: str, trial: str, answer: str, folder: str, patience: float = 20.0) -> None:
    """Executes the answer of the script `source`, runs the function `trial` of a `module` of `build/trials/` with
    the object of this name, and writes this rank's record to `folder`.

    The process group is that of torchrun's environment. A rank without a call of torch for `patience` seconds says
    where it waits and exits; an answer that raises ends its rank with exit code 1.
    """
    began = time.process_time()
    tempfile.tempdir = folder  # its files are removed with it, also if this rank is killed
    torch.set_num_threads(1)  # the ranks share the cores
    _return_freed_memory()
    dist.init_process_group("gloo")
    key, given = _given(given_path(Path(folder), dist.get_rank()))
    record = Record(dist.get_rank())
    namespace = ModuleType("answer")
    trials = importlib.import_module(f"labkit.course.build.trials.{module}")
    allowed = vars(trials).get("ALLOWED", ())
    rules = Rules(record, vars(namespace), allowed)
    recorder = Recorder(record, rules.intact, rules.answers, counts_functional=bool(allowed))
    rules.leaves = recorder.synchronizes
    _warm_up()
    code = code_of(source)
    _hide(sys._getframe(1))
    dist.barrier()  # no file with inputs exists any more

    def report() -> None:
        record.at = time.time()
        record.seconds = time.process_time() - began
        _write(Path(folder), record, recorder.results, key)

    watchdog = Watchdog(recorder, patience, source, report)
    watchdog.start()
    sys.modules[namespace.__name__] = namespace
    try:
        with recorder, rules:
            exec(code, vars(namespace))
            getattr(trials, trial)(vars(namespace)[answer], recorder, given)
            with recorder.during(END):
                dist.barrier()  # no rank leaves while another still needs it
    except (Exception, SystemExit) as error:
        record.error = f"{type(error).__name__}: {error}{where(recorder)}{raised_line(error.__traceback__, source)}"
    finally:
        watchdog.stop()
    report()
    if record.error:
        print(record.error, file=sys.stderr)
        sys.exit(FAILED)
    dist.destroy_process_group()


def _return_freed_memory() -> None:
    """Makes the C library return each large block to the system when it is freed, so that the resident set shows what a
    process has allocated. Only glibc has this setting."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 17)


def _warm_up() -> None:
    """Makes the first steps of both optimizers, which replaces their `step` and loads modules. The probe, which
    profiles the 8th step of a run, then profiles the answer's fourth."""
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        made = optimizer([parameter], lr=0.1)
        for _ in range(2):
            made.step()


def code_of(source: str) -> CodeType:
    """The code of an answer: a script from its mark on, with the numbers of its lines."""
    before, _, text = Path(source).read_text(encoding="utf-8").partition(f"{MARK}\n")
    return compile("\n" * before.count("\n") + "\n" + text, source, "exec", dont_inherit=True)


def _hide(script: FrameType) -> None:
    """Removes the modules of the judge from where an answer would look for them."""
    for name in [name for name in sys.modules if name == "labkit.course" or name.startswith("labkit.course.")]:
        del sys.modules[name]
    if hasattr(sys.modules.get("labkit"), "course"):
        delattr(sys.modules["labkit"], "course")
    script.f_globals.pop(run_answer.__name__, None)
    vars(builtins).pop(run_answer.__name__, None)
