"""Runs the script as __main__ exactly as python does, and reports its errors."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.probe import lifetime
from labkit.probe.hosts import place_stores
from labkit.probe.journal import Guard, Journal
from labkit.probe.lifetime import exit_process, leave
from labkit.probe.memory import keep_memory
from labkit.probe.patches import Patches
from labkit.probe.threads import Position
from labkit.record import clock
from labkit.record.stacks import MESSAGE_LIMIT, clipped, of_script

if TYPE_CHECKING:
    from labkit.probe.steps import StepWatch


# ---- the code of a script or module, and the exceptions that it raises


_HERE = str(Path(__file__).parent) + os.sep


class NoScript(SystemExit):
    """The script cannot be read; the cause is the reason."""


def code_of(main: types.ModuleType, arguments: list[str]) -> types.CodeType:
    """The code of a script, or of `-m MODULE`, after setting everything in `main` and `sys` that python sets. Raises
    `NoScript`.
    """
    return _module_code(main, arguments[1:]) if arguments[0] == "-m" else _script_code(main, arguments)


def _module_code(main: types.ModuleType, arguments: list[str]) -> types.CodeType:
    """A module's code, after setting everything that `python -m` sets; sys.path[0] is already the working folder."""
    name = arguments[0]
    sys.argv[:] = ["-m", *arguments[1:]]  # as its parent packages see it
    try:
        spec = importlib.util.find_spec(name)  # imports its parent packages
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None
    except (ModuleNotFoundError, ValueError) as error:  # a parent package is missing, or is a module
        if isinstance(error, ModuleNotFoundError) and error.name and not f"{name}.".startswith(f"{error.name}."):
            raise  # the package exists, but one of its imports does not
        code = None
    if code is None:
        sys.stderr.write(f"{sys.executable}: No module named {name}\n")
        raise NoScript(1) from ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.argv[0] = spec.origin
    main.__file__, main.__cached__, main.__loader__ = spec.origin, spec.cached, spec.loader
    main.__package__, main.__spec__ = spec.parent, spec
    return code


def _script_code(main: types.ModuleType, arguments: list[str]) -> types.CodeType:
    """A script's code, after setting everything that `python SCRIPT` sets."""
    path = os.path.join(os.getcwd(), arguments[0])  # noqa: PTH109, PTH118 - as python joins them: `./` stays
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(path).resolve().parent)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise NoScript(2) from error
    return compile(source, path, "exec", dont_inherit=True)


def exit_code(stop: SystemExit) -> int:
    """The exit code that python would use; prints the message that the script exits with, if it is one."""
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def clean(error: BaseException) -> Any:
    """Removes the probe's frames from an exception's traceback, and from those of its causes; returns the exception."""
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
    kept = [
        (t.tb_frame, t.tb_lasti, t.tb_lineno)
        for t in _chain(trace)
        if not t.tb_frame.f_code.co_filename.startswith(_HERE)
    ]
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


# ---- running it


_LAST_STEPS = 5.0  # seconds to wait for steps that are still on the GPU after the script has ended
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the variable in which torchrun names the file
_USAGE = "usage: python -m labkit.probe (SCRIPT | -m MODULE) [ARGS…]"


def main(arguments: list[str]) -> None:
    """Runs the script (or `-m MODULE`) with its arguments, and exits with the same code as python would."""
    if not arguments or arguments == ["-m"]:
        sys.exit(_USAGE)
    run = os.environ.get("LABKIT_RUN_DIR")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # flush whole lines, also under `python -u`
            stream.reconfigure(line_buffering=True, write_through=False)
    if not run:
        sys.exit(execute(arguments, None))
    keep_memory()
    watched = Watched(run)
    _current.append(watched)
    code = execute(arguments, watched)
    watched.end(code)
    leave(code)


_current: list[Watched] = []  # of this process


def steps_of_this_rank() -> StepWatch | None:
    """What the hooks of this process have seen; None if no probe runs here, or if its hooks could not be installed."""
    return _current[0].steps if _current else None


class Watched:
    """Reports this rank to the run: its start, the events of the hooks, its error and its end."""

    def __init__(self, run: str):
        import torch

        self.journal = Journal(run, _number("RANK"))
        self._ended, self._left_at = False, ""  # the stack of the call that ended the script, if one did
        self.journal.write(
            "start",
            pid=os.getpid(),
            host=socket.gethostname(),
            local_rank=_number("LOCAL_RANK"),
            world_size=_number("WORLD_SIZE", 1),
            device="cpu",
            device_name="",
            torch=torch.__version__,
            attempt=_number("LABKIT_ATTEMPT", _number("TORCHELASTIC_RESTART_COUNT")),
            began=lifetime.began(os.getpid()),
        )
        self._guard = Guard(self.journal, "end")
        patches = Patches(self.journal)
        self._watch = Guard(self.journal, "hooks")(_install, self.journal, patches, run)
        self._waiting = self._tensors = None
        position = Guard(self.journal, "position")(Position, run, _number("RANK"))
        if self._watch:
            from labkit.probe.hooks import keep_tensors
            from labkit.probe.threads import WaitWatch

            patience = _number("LABKIT_HANG_AFTER", 30)
            self._waiting = Guard(self.journal, "waiting")(WaitWatch, self.journal, self._watch, patience, position)
            if self._waiting:
                self._waiting.start()
            if os.environ.get("LABKIT_TENSORS") == "1":
                self._tensors = Guard(self.journal, "tensors")(
                    keep_tensors, self._watch, self.journal, patches, run, _number("RANK")
                )
        Guard(self.journal, "stores")(place_stores, patches, run)
        self._watch_exit()

    @property
    def steps(self) -> StepWatch | None:
        """What the hooks have seen; None if they could not be installed."""
        return self._watch

    def _watch_exit(self) -> None:
        """`os._exit` bypasses all exit handlers of Python, so pending events are written before it is called."""

        @functools.wraps(exit_process)
        def _exit(status: int) -> None:
            self._guard(self._exits, status)
            exit_process(status)

        os._exit = _exit

    def _exits(self, status: int) -> None:
        code = status & 0xFF
        self._left_at = clipped("".join(traceback.format_list(of_script())).rstrip())
        if code:
            said = {"type": f"exit code {code}", "message": f"os._exit({status})", "traceback": self._left_at}
            self.journal.write("error", **said, ops=[], owners={})
        if self._watch and threading.current_thread() is threading.main_thread():
            self._guard(self._watch.drain)
        self._say_end(code)

    def leaves(self, stop: SystemExit) -> None:
        """The script called `sys.exit` without an error; its position is recorded with the end."""
        self._left_at = clipped("".join(traceback.format_tb(stop.__traceback__)).rstrip())

    def error(self, error: BaseException) -> None:
        """Records an uncaught exception of the script immediately, also in torchrun's error file."""
        self.journal.write(
            "error",
            type=type(error).__name__,
            message=clipped(text_of(error), MESSAGE_LIMIT),
            traceback=clipped("".join(traceback.format_exception(error)).rstrip()),
            ops=(self._watch and self._guard(self._watch.recorder.newest)) or [],
            owners=(self._watch and self._guard(self._watch.memory.owners)) or {},
        )
        file = os.environ.get(_ERROR_FILE)
        if file and isinstance(error, Exception) and not Path(file).exists():
            self._guard(write_error_file, file, error)

    def end(self, code: int) -> None:
        """Writes the remaining steps and the `end` event."""
        if self._waiting:
            self._waiting.stop()
        if self._tensors and code == 0:
            self._tensors.script_ends()
        if self._watch:
            if self._watch.sampler:
                self._guard(self._watch.sampler.give_up)
            self._guard(self._watch.script_ends, _LAST_STEPS if code == 0 else 0.0)
        self._say_end(code)

    def _say_end(self, code: int) -> None:
        if self._ended:
            return  # an exit handler may call os._exit
        self._ended = True
        steps = self._watch.finished if self._watch else 0
        if self._watch and self._watch.backwards and not steps:
            counts = {"backwards": self._watch.backwards, "scaler_steps": self._watch.scaler_steps}
            self.journal.write("saw", what="gradients", **counts)
        seconds = round(clock.now() - self.journal.started, 6)
        stack = {"stack": self._left_at} if self._left_at else {}
        self.journal.write("end", exit_code=code, steps=steps, seconds=seconds, **stack)


def write_error_file(file: str, error: Exception) -> None:
    """Writes torchrun's error file as torch does, but atomically: torchrun may terminate this rank at this moment,
    because another one has failed, and would fail itself if it read half a file."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    os.environ[_ERROR_FILE] = unfinished = f"{file}.unfinished"
    try:
        get_error_handler().record_exception(error)
        Path(unfinished).replace(file)
    finally:
        os.environ[_ERROR_FILE] = file


def _install(journal: Journal, patches: Patches, run: str) -> StepWatch:
    from labkit.probe import hooks  # here, so that a name that torch lacks does not end the script

    return hooks.install(journal, patches, run, _number("LABKIT_SAMPLE_EVERY", 50))


def execute(arguments: list[str], watched: Watched | None) -> int:
    """Runs a script as `__main__` and returns its exit code; an exception is recorded, and printed as python prints
    it."""
    try:
        _run(arguments)
        return 0
    except SystemExit as stop:
        code = exit_code(stop)
        clean(stop)
        if watched:
            if isinstance(stop, NoScript):
                watched.error(clean(stop.__cause__))
            else:
                (watched.error if code else watched.leaves)(stop)
        return code
    except BaseException as error:
        clean(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        if watched and not interrupted:
            watched.error(error)
        with suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        return 130 if interrupted else 1


def _run(arguments: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    sys.modules["__main__"] = main
    exec(code_of(main, arguments), main.__dict__)


def text_of(error: BaseException) -> str:
    """The message of an exception; empty if its class cannot say it."""
    try:
        return str(error)
    except Exception:
        return ""


def _number(name: str, missing: int = 0) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else missing
