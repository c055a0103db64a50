"""The script's threads and processes: the thread whose steps are counted, processes that the script starts, replicas in
threads, and a thread that detects when the script makes no progress, and where it is.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import json
import multiprocessing
import os
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from labkit.probe.journal import Guard, Journal
from labkit.probe.memory import parameters_of
from labkit.probe.patches import Patches
from labkit.probe.torch_private import COMPILER
from labkit.record import clock
from labkit.record.stacks import LIBRARIES, RUNNER, frame_of, of_script

if TYPE_CHECKING:
    from labkit.probe.steps import StepWatch


# ---- records processes that the script starts; training in them is invisible, because the probe monitors only ranks


_MOST = 16  # maximum number of recorded processes
_HELPERS = ("torch.utils.data.", f"{COMPILER}.", "multiprocessing.managers", "multiprocessing.resource_")
_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")


def watch_processes(journal: Journal, patches: Patches) -> None:
    """Starts recording the processes that the script starts."""
    guard, left = Guard(journal, "processes"), _MOST

    def record(how: str, target: str) -> None:
        nonlocal left
        if left and not target.startswith(_HELPERS):
            left -= 1
            journal.write("saw", what="process", how=how, target=target)

    def starting(start: Callable[[Any], None]) -> Callable[[Any], None]:
        def start_process(process: Any) -> None:
            target = guard(_target, process)  # `start` deletes it
            start(process)
            guard(record, process._start_method or multiprocessing.get_start_method(), target)

        return start_process

    def opening(popen: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, args: Any, *rest: Any, **named: Any) -> None:
            popen(self, args, *rest, **named)
            guard(lambda: record("subprocess", command) if (command := _command(args)) else None)

        return init

    patches.wrap("processes", "multiprocessing.process.BaseProcess.start", starting)
    patches.wrap("processes", "subprocess.Popen.__init__", opening)


def _target(process: Any) -> str:
    """The function that a process runs, with its module; for `torch.multiprocessing.spawn` the script's function."""
    function, args = process._target, process._args
    if getattr(function, "__module__", "") == "torch.multiprocessing.spawn" and args:
        function = args[0]
    if function is None:
        function = type(process).run  # a subclass of Process
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _command(args: Any) -> str:
    """The first words of a command that starts Python or a training launcher; empty for any other command."""
    words = args.split() if isinstance(args, str) else [str(word) for word in args]
    if not words or not Path(words[0]).name.startswith(_LAUNCHERS):
        return ""
    if any(COMPILER.replace(".", "/") in word or "triton" in word for word in words):
        return ""
    return " ".join([Path(words[0]).name, *words[1:4]])


# ---- selects the thread whose steps are counted


class ScriptThread:
    """The followed thread. Create it in the main thread."""

    def __init__(self) -> None:
        self._follow()
        self.trains = False
        self.others: set[str] = set()
        self.on_other: Callable[[str], None] = lambda name: None

    def here(self) -> bool:
        """Whether the calling thread is the followed one. Thread idents are not compared, because they can be
        reused."""
        return hasattr(self._mark, "follows")

    @property
    def may_move(self) -> bool:
        """Whether another training thread would be followed."""
        return not self.trains or not self._thread.is_alive()

    def takes_over(self) -> bool:
        """Call this when a thread other than the followed one trains; returns whether it is followed from now on."""
        thread = threading.current_thread()
        if not self.may_move:
            if thread.name not in self.others:
                self.others.add(thread.name)
                self.on_other(thread.name)
            return False
        self._follow()
        self.trains = True
        return True

    def _follow(self) -> None:
        self._thread, self._mark = threading.current_thread(), threading.local()
        self._mark.follows = True
        known = hasattr(time, "pthread_getcpuclockid")
        ident = threading.get_ident()  # of the calling thread, because an ended thread has no clock
        self._clock = time.pthread_getcpuclockid(ident) if known else None

    def cpu_seconds(self) -> float | None:
        """CPU seconds of the thread; None if unknown."""
        if self._clock is None or not self._thread.is_alive():
            return None
        return time.clock_gettime(self._clock)

    def frame(self) -> types.FrameType | None:
        """The current frame of the thread; if it has ended, that of the main thread."""
        thread = self._thread if self._thread.is_alive() else threading.main_thread()
        return frame_of(thread)


def is_foreign() -> bool:
    """Whether the calling thread was not started by Python, as those of autograd are not."""
    return isinstance(threading.current_thread(), threading._DummyThread)


# ---- replicas in threads of the script's process, as in `nn.DataParallel`: the time of each forward, and of waiting
# for the GIL
#
# A replica is identified by the device of its inputs, or on the CPU by its thread (in the order of the threads' names).
# Its forward is measured in wall-clock time and CPU time of its thread; on CUDA both end when its kernels are queued,
# which is what the GIL delays. A forward without gradients is evaluation and is ignored, as are autograd's own threads.
# `memory` is the memory allocated on the GPU; on the CPU it is only the bytes of parameters, inputs and outputs. The
# wait for the GIL is measured by a thread that sleeps 5 ms at a time: the delay until Python runs it again, as a
# fraction of the total time. It includes the wait for a core, so it is larger if there are fewer cores than busy
# threads, or other processes use them. It also includes the timer's own delay of about 0.1 ms.


_NAP = 0.005  # seconds that the sampler sleeps


class ReplicaWatch:
    """Receives forwards outside of the script's thread; writes one `replica` event per step with such forwards, fewer
    in a long run.
    """

    def __init__(self, journal: Journal, watch: StepWatch):
        self._journal, self._watch = journal, watch
        self._found: dict[str, dict[str, Any]] = {}
        self._thread = threading.local()
        self._sampler: GilSampler | None = None

    def forward_begins(self) -> None:
        """A module's forward begins in another thread, possibly nested in another module's forward."""
        here = self._thread
        here.depth = getattr(here, "depth", 0) + 1
        if here.depth == 1:
            here.began = time.perf_counter(), time.thread_time()

    def forget(self) -> None:
        """Discards the measurements: the thread is the script's training thread, not a replica."""
        self._found = {}

    def forward_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> bool:
        """A forward has ended; returns whether it was a replica's, which is the outermost one."""
        here, ended = self._thread, (time.perf_counter(), time.thread_time())
        here.depth -= 1
        if here.depth or not torch.is_grad_enabled() or is_foreign():
            return False
        if threading.current_thread().name in self._watch.thread.others:
            return False  # it trains for itself
        tensor = next(value for value in inputs if isinstance(value, torch.Tensor))
        on_gpu = tensor.device.type == "cuda"
        new = {"device": str(tensor.device), "forward": 0.0, "cpu": 0.0, "samples": 0, "outputs": 0}
        replica = self._found.setdefault(
            f"{tensor.device.index:03}" if on_gpu else threading.current_thread().name, new
        )
        replica["forward"] += ended[0] - here.began[0]
        replica["cpu"] += ended[1] - here.began[1]
        replica["samples"] += len(tensor)
        replica["outputs"] += output.nbytes if isinstance(output, torch.Tensor) else 0
        if on_gpu:
            replica["memory"] = torch.cuda.memory_allocated(tensor.device)
        else:
            replica["memory"] = (
                sum(parameter.nbytes for parameter in module.parameters()) + tensor.nbytes + replica["outputs"]
            )
        return True

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is over: writes the figures of its replicas, and the extra work of replica 0."""
        if not self._found:
            return
        by_name, self._found = self._found, {}
        replicas = [{"replica": number} | by_name[name] for number, name in enumerate(sorted(by_name))]
        gradients = [held.grad.nbytes for held in parameters_of(optimizer) if held.grad is not None]
        others = replicas[1:]
        extra = {
            "outputs": sum(replica.pop("outputs") for replica in replicas),
            "gradients": sum(gradients) * len(others),
        }
        waited = self._sampler.share() if self._sampler else None
        if self._watch.finished % self._journal.spaced(1) == 0:
            self._journal.write("replica", step=self._watch.finished, replicas=replicas, extra=extra, gil_wait=waited)
        if self._sampler is None:
            self._sampler = GilSampler()


class GilSampler:
    """A thread that sleeps and measures how late Python runs it again."""

    def __init__(self) -> None:
        self._late = self._all = 0.0
        threading.Thread(target=self._run, name="labkit GIL sampler", daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.perf_counter()
            time.sleep(_NAP)
            spent = time.perf_counter() - began
            self._late += max(0.0, spent - _NAP)
            self._all += spent

    def share(self) -> float | None:
        """The delay as a fraction of the time since the last call; None if the thread has not run since."""
        late, spent = self._late, self._all
        self._late = self._all = 0.0
        return late / spent if spent else None


# ---- reports the script's position while it makes no progress
#
# Progress is the start or end of a phase, or a call of a model. After `seconds` without progress, a `waiting` event
# reports the stack of the script's thread, the fraction of the time in which that thread used the CPU, and the newest
# collectives of each group from torch's flight recorder: the one the rank is in, and thereby those it never reached.
# `going_on` follows when there is progress again. Only while a C++ extension is compiled is the limit larger, at least
# `BUILD`. The thread cannot run while C code holds the GIL; `Position` below covers that case.
#
# Shortly before it reports, a rank touches a file in the run folder, and every rank that sees this writes `called`: all
# its stored collectives in order. So it is known from the first report on where the sequences of the ranks part.


_FRAMES = 25
_AGAIN = 10.0  # seconds between two reports of one wait
BUILD = 900.0  # seconds


class WaitWatch(threading.Thread):
    """Monitors the thread whose steps are counted, four times within `seconds` but at least twice per second."""

    def __init__(self, journal: Journal, watch: StepWatch, seconds: float, position: Position | None = None):
        super().__init__(name="labkit waiting", daemon=True)
        self._journal, self._watch, self._limit = journal, watch, seconds
        self._guard, self._position_guard = Guard(journal, "waiting"), Guard(journal, "position")
        self._position = position
        self._poll = min(0.5, seconds / 4)
        self._asked = journal.run / "stacks" / "asked"
        self._answered = self._when_asked()
        self._over = threading.Event()
        self._reported: float | None = None
        self._has_asked = False
        self._progress, self._computed = watch.progress, watch.thread.cpu_seconds()
        if position:
            # now, because the script may enter an endless C call before this thread runs
            self._position_guard(self._note)

    def stop(self) -> None:
        """The script has ended: stops monitoring."""
        self._over.set()
        if self._position:
            self._position_guard(self._position.end)

    def run(self) -> None:
        while not self._over.wait(self._poll):
            if self._position:
                self._position_guard(self._note)
            self._guard(self._look)

    def _note(self) -> None:
        """Records the script's position, except while it makes progress in a step whose memory is profiled.

        If this thread references the frame of a function that returns, this thread frees the function's tensors. The
        profiler does not see that, and short-lived outputs would count as activations.
        """
        patience = self._patience()
        moves = time.monotonic() - self._watch.progress < patience
        skipped = moves and self._watch.memory_is_profiled
        self._position.note(None if skipped else self._watch.thread.frame(), patience)

    def _patience(self) -> float:
        """Seconds without progress that do not count as waiting yet."""
        return max(self._limit, BUILD) if self._watch.builds else self._limit

    def _look(self) -> None:
        progress, now = self._watch.progress, time.monotonic()
        if progress != self._progress:
            if self._reported is not None:
                self._reported = None
                self._journal.write("going_on", waited=round(progress - self._progress, 3))
            self._has_asked = False
            self._progress, self._computed = progress, self._watch.thread.cpu_seconds()
        if self._watch.idle:
            return
        idle = now - progress
        due = self._patience() if self._reported is None else self._reported + _AGAIN - progress
        if idle >= due - 2 * self._poll and not self._has_asked:
            with suppress(OSError):
                self._asked.touch(mode=0o600)
            self._has_asked = True
        if (asked := self._when_asked()) != self._answered:
            self._answered = asked
            self._write("called", idle, groups=self._watch.recorder.sequences())
        if idle < due:
            return
        self._reported, self._has_asked = now, False
        self._write("waiting", idle)

    def _write(self, kind: str, idle: float, **more: object) -> None:
        spent = self._watch.thread.cpu_seconds()
        computed = (
            None if spent is None or self._computed is None else max(0.0, spent - self._computed) / max(idle, 0.1)
        )
        self._journal.write(
            kind,
            since=clock.now() - idle,
            step=self._watch.finished,
            activity=self._watch.activity,
            phase=self._watch.phase,
            computed=None if computed is None else round(computed, 3),
            stack=self._stack(),
            ops=self._watch.recorder.newest(),
            **more,
        )

    def _when_asked(self) -> int:
        """When a rank asked last, in ns; 0 if none has."""
        try:
            return self._asked.stat().st_mtime_ns
        except OSError:
            return 0

    def _stack(self) -> str:
        return "".join(traceback.format_list(of_script(self._watch.thread.frame())[-_FRAMES:])).rstrip()


# ---- records the script's position for a process that can no longer report it: crashed, killed, stopped, or blocked
# with the GIL held
#
# Each rank has two files in the run folder. `position` contains the script's current line as one short JSON object; the
# waiting thread rewrites it twice per second, so it also shows that Python code still runs. `crash` is written by
# faulthandler, which needs neither the GIL nor a working interpreter: the stacks at a fatal signal, or the stacks if
# the waiting thread has not run for so long that a C call must be holding the GIL. If the script uses faulthandler
# itself, its file, timer and signals are not changed.


_HERE = str(Path(__file__).parent)
_FRAMES_OUTSIDE = 3  # innermost frames outside of libraries that are shown
_SIZE = 1024  # bytes of a position file
_REARM = 1.0  # seconds between two resets of the timer, each of which starts a thread (0.1 to 0.3 ms)


class Position:
    """The position and crash files of one rank. `note` is called by the waiting thread; `end` when the script has
    ended."""

    def __init__(self, run: str | os.PathLike[str], rank: int):
        folder = Path(run) / "stacks"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._position = io.FileIO(folder / f"rank{rank}.position.json", "w")
        self._crash = io.FileIO(folder / f"rank{rank}.crash.txt", "w")
        self._handler_is_ours, self._timer_is_ours = not faulthandler.is_enabled(), True
        self._armed, self._stack = -_REARM, ""
        self._ended, self._lock = False, threading.Lock()
        self._dump_later, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
        if self._handler_is_ours:
            faulthandler.enable(self._crash)
            os.register_at_fork(after_in_child=self._disable_in_child)
        self._yield_to_script()

    def note(self, frame: Any, limit: float) -> None:
        """Records that the script is at `frame`; faulthandler dumps the stacks if this is not called again within
        `limit` seconds.

        Without a frame the script is alive at its last known position.
        """
        lines: list[str] = []
        while frame is not None and len(lines) < _FRAMES_OUTSIDE and frame.f_code.co_filename != RUNNER:
            code = frame.f_code
            if not code.co_filename.startswith((_HERE, "<frozen")) and not any(
                part in code.co_filename for part in LIBRARIES
            ):
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
            frame = frame.f_back
        with self._lock:
            if not self._ended:
                self._stack = "\n".join(reversed(lines)) or self._stack
                self._write(t=clock.now(), stack=self._stack)
                self._set_timer(limit)

    def end(self) -> None:
        """The script has ended: cancels the timer and marks the position as over."""
        with self._lock:
            self._ended = True
            if self._timer_is_ours:
                self._cancel()
            self._write(t=clock.now(), over=True)

    def _write(self, **fields: Any) -> None:
        text = json.dumps(fields, separators=(",", ":"))
        if len(text) >= _SIZE:
            text = json.dumps(fields | {"stack": ""}, separators=(",", ":"))
        self._position.seek(0)
        self._position.write(text.encode().ljust(_SIZE - 1) + b"\n")

    def _set_timer(self, limit: float) -> None:
        now = time.monotonic()
        if not self._timer_is_ours or now - self._armed < min(_REARM, limit / 4):
            return
        if self._crash.tell():  # the timer expired, but Python code runs again
            self._crash.seek(0)
            self._crash.truncate()
        self._armed = now
        self._dump_later(limit, exit=False, file=self._crash)

    def _yield_to_script(self) -> None:
        """A process has one handler and one timer: once the script calls a function of either, the probe no longer uses
        it.
        """

        def released(original: Callable[..., Any], owner: str) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                setattr(self, owner, False)
                return original(*args, **kwargs)

            return call

        for name in ("enable", "disable"):
            setattr(faulthandler, name, released(getattr(faulthandler, name), "_handler_is_ours"))
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            setattr(faulthandler, name, released(getattr(faulthandler, name), "_timer_is_ours"))

    def _disable_in_child(self) -> None:
        """A crash of a forked process must not be attributed to this rank."""
        if self._handler_is_ours:
            faulthandler.disable()
