"""The thread whose steps are counted, and processes that the script starts."""

from __future__ import annotations

import multiprocessing
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.probe.torch_private import COMPILER
from labkit.record.stacks import frame_of

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
        found, self._found = self._found, {}
        replicas = [{"replica": number} | found[name] for number, name in enumerate(sorted(found))]
        gradients = [p.grad.nbytes for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
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
