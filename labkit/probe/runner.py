"""The script as `__main__`, exactly as python would run it; its errors; and the way out."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import socket
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from labkit.probe.journal import Guard, Journal

_HERE = str(Path(__file__).parent) + os.sep
_LAST_STEPS = 5.0  # seconds that the steps still on the GPU are waited for once the script has ended
_USAGE = "usage: python -m labkit.probe SCRIPT [ARGS…]"


def main(arguments: list[str]) -> None:
    """Runs the script named first with the arguments after it, and leaves with the exit code that python would give."""
    if not arguments:
        sys.exit(_USAGE)
    run = os.environ.get("LABKIT_RUN_DIR")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines, at once, also under `python -u`
            stream.reconfigure(line_buffering=True, write_through=False)
    if not run:
        sys.exit(execute(arguments, None))
    watched = Watched(run)
    code = execute(arguments, watched)
    watched.end(code)
    leave(code)


class Watched:
    """What the run is told about this rank: its start, what the hooks see, its error and its end."""

    def __init__(self, run: str):
        import torch

        from labkit.probe import hooks, loopback
        from labkit.probe.waiting import WaitWatch

        self.journal = Journal(run, _number("RANK"))
        self.journal.write(
            "start",
            pid=os.getpid(),
            host=socket.gethostname(),
            local_rank=_number("LOCAL_RANK"),
            world_size=_number("WORLD_SIZE", 1),
            device="cpu",
            device_name="",
            torch=torch.__version__,
            attempt=_number("TORCHELASTIC_RESTART_COUNT"),
        )
        self._guard = Guard(self.journal, "end")
        self._watch = Guard(self.journal, "hooks")(hooks.install, self.journal, run, _number("LABKIT_SAMPLE_EVERY", 50))
        self._waiting = None
        if self._watch:
            self._waiting = Guard(self.journal, "waiting")(WaitWatch, self.journal, self._watch, _number("LABKIT_HANG_AFTER", 30))
            if self._waiting:
                self._waiting.start()
        self._tensors = None
        if self._watch and os.environ.get("LABKIT_TENSORS") == "1":
            self._tensors = Guard(self.journal, "tensors")(hooks.keep_tensors, self._watch, self.journal, run, _number("RANK"))
        Guard(self.journal, "loopback")(loopback.keep_stores_local, run)

    def error(self, error: BaseException) -> None:
        """Tells of an exception that the script did not catch, at once; torchrun's error file is told too."""
        from labkit.probe.traffic import newest

        self.journal.write(
            "error",
            type=type(error).__name__,
            message=_text(error),
            traceback="".join(traceback.format_exception(error)).rstrip(),
            ops=self._guard(newest) or [],
            owners=(self._watch and self._guard(self._watch.memory.owners)) or {},
        )
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and isinstance(error, Exception) and not Path(file).exists():
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            self._guard(get_error_handler().record_exception, error)

    def end(self, code: int) -> None:
        """Writes what is not yet written of the steps, and the last event."""
        if self._waiting:
            self._waiting.stop()
        if self._tensors and code == 0:
            self._tensors.script_ends()
        if self._watch:
            if self._watch.sampler:
                self._guard(self._watch.sampler.give_up)
            self._guard(self._watch.drain, _LAST_STEPS if code == 0 else 0.0)
        steps = self._watch.finished if self._watch else 0
        self.journal.write("end", exit_code=code, steps=steps, seconds=round(time.time() - self.journal.started, 6))


def execute(arguments: list[str], watched: Watched | None) -> int:
    """Runs a script as `__main__` and gives its exit code; an exception is told and printed as python prints it."""
    try:
        _run(arguments)
        return 0
    except SystemExit as stop:
        code = _exit_code(stop)
        if watched and code:
            watched.error(_clean(stop))
        return code
    except BaseException as error:
        _clean(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        if watched and not interrupted:
            watched.error(error)
        with suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        return 130 if interrupted else 1


def _run(arguments: list[str]) -> None:
    script = arguments[0]
    path = Path(script).absolute()
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(path.resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__loader__ = SourceFileLoader("__main__", str(path))
    main.__builtins__ = sys.modules["builtins"]
    sys.modules["__main__"] = main
    try:
        with io.open_code(str(path)) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {str(path)!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    exec(compile(source, str(path), "exec", dont_inherit=True), main.__dict__)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _clean(error: BaseException) -> Any:
    """Takes the probe's own frames out of an exception's traceback, and out of those of its causes."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_probe(one.__traceback__)
        rest += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return error


def _without_probe(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept = [(t.tb_frame, t.tb_lasti, t.tb_lineno) for t in _chain(trace) if not t.tb_frame.f_code.co_filename.startswith(_HERE)]
    clean = None
    for frame, last, line in reversed(kept):
        clean = types.TracebackType(clean, frame, last, line)
    return clean


def _chain(trace: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _number(name: str, missing: int = 0) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else missing


# ---- the way out


def leave(code: int) -> None:
    """Does what python does at exit, as far as a script can notice, and ends the process.

    Interpreter and libraries are not torn down: threads of torch's C++ libraries that are still alive then can abort the
    process after a training that went well ("terminate called without an active exception").
    """
    for last in (threading._shutdown, atexit._run_exitfuncs, _close_files, _flush):
        try:
            last()
        except BaseException:
            with suppress(BaseException):
                traceback.print_exc()
    os._exit(code)


def _close_files() -> None:
    """Closes the files that the script left open to be written to, as their destruction would: text, then what packs, then bytes."""
    standard = {id(stream) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    standard |= {id(getattr(stream, "buffer", None)) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    files = [
        thing for thing in gc.get_objects() if issubclass(type(thing), (io.TextIOBase, io.BufferedIOBase)) and id(thing) not in standard
    ]
    for file in sorted(
        files, key=lambda file: (not isinstance(file, io.TextIOBase), isinstance(file, (io.BufferedWriter, io.BufferedRandom)))
    ):
        with suppress(Exception):
            if not file.closed and file.writable():
                file.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed
