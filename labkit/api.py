"""The Python handle: `run("ddp", nproc=2)` starts a run and gives a `Run`, which knows everything that is in its folder.

What a call needs to draw is loaded by that call: plotly for a figure, and for `show` the face that fits the place.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.diagnose import findings
from labkit.launch.capture import ask
from labkit.launch.folder import STREAMS, RunFolder
from labkit.launch.follow import Follower
from labkit.launch.job import Job
from labkit.ledger import ledger
from labkit.machine import Machine
from labkit.spec import Spec, SpecError
from labkit.state import OVER, RunState
from labkit.summary import summarise
from labkit.tables import Findings, Ledger
from labkit.trace import write_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from labkit.comparison import Comparing

_LOOK = 0.5  # seconds between two looks at what was found


def run(what: str | os.PathLike[str] | Spec, *, detached: bool = False, **fields: Any) -> Run:
    """Starts a run on this machine and returns at once.

    `what` is a strategy's name, the path of a script (it ends in `.py`), or a `Spec`; `fields` are the Spec's other fields, such as
    `nproc=2`, `steps=100`, or `args=(...)` for a script of one's own. The run ends with this process, unless it is `detached`.
    Raises `SpecError` before anything is made, and `LaunchError` where it cannot be started.
    """
    return Run(Job.start(settle(what, **fields), detached=detached))


def settle(what: str | os.PathLike[str] | Spec, **fields: Any) -> Spec:
    """The Spec that `run` would start with the same arguments, with all that this machine decides; `SpecError` where it could not run."""
    if isinstance(what, Spec):
        spec = replace(what, **fields)
    elif str(what).endswith(".py"):
        spec = Spec(script=os.fspath(what), **fields)
    else:
        spec = Spec(strategy=os.fspath(what), **fields)
    if spec.resume is not None and not Path(spec.resume).is_dir():
        spec = replace(spec, resume=str(_checkpoints(spec.resume)))
    if spec.script is not None and not Path(spec.script).is_file():
        raise SpecError("script", f"there is no script {spec.script!r} in {Path.cwd()}; give the path of a Python file")
    return spec.on(Machine.here())


def place(nproc: int) -> dict[str, Any]:
    """Where so many ranks run on this machine, as fields of a Spec: on GPUs where there are enough of them, else as CPU ranks."""
    return {"nproc": nproc, "device": "cuda" if len(Machine.here().gpus) >= nproc else "cpu"}


def _checkpoints(name: str) -> Path:
    """The checkpoints of the run that `name` names; `SpecError` where there is no such run."""
    try:
        return RunFolder.find(name).checkpoints.absolute()
    except LookupError as error:
        raise SpecError("resume", str(error)) from None


def show(run: str | os.PathLike[str] | Run | Comparing = "last") -> Run | Comparing:
    """Shows a run live and gives it back: a `Run`, its name or an end of it, its path, or `last`; or what `compare` started.

    In a notebook it returns at once; where nobody watches (nbclient, a batch run) it waits for the run's end and leaves plain figures;
    outside of a notebook it shows the run in the terminal until it is over. Raises `LookupError` for a run that there is not.
    """
    if isinstance(run, (str, os.PathLike)):
        run = Run.attach(run)
    if not isinstance(run, Run):
        return _show_comparison(run)
    if in_notebook():
        from labkit.panel import show_in_notebook

        show_in_notebook(run)
    else:
        from rich.console import Console

        from labkit.terminal import watch

        watch(Follower(run.folder), run.folder, Console())
    return run


def _show_comparison(comparing: Comparing) -> Comparing:
    if in_notebook():
        from labkit.panel import show_comparison_in_notebook

        show_comparison_in_notebook(comparing)
    else:
        from rich.console import Console

        from labkit.terminal import watch_comparison

        watch_comparison(comparing, Console(highlight=False))
    return comparing


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: then IPython is there already."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def headless() -> bool:
    """Whether nobody watches this kernel: a cell must then not return before its run has ended.

    A front end with a person says in each request that it could ask for input; nbclient, papermill and Kaggle's batch runs do not.
    """
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch":
        return True
    request = sys.modules["IPython"].get_ipython().get_parent() or {}
    return request.get("content", {}).get("allow_stdin") is False


class Run:
    """One run: its state as of now, its figures and logs, and the ways to wait for it and to stop it."""

    def __init__(self, job: Job):
        self._job = job
        self._follower = Follower(job.folder)

    def __repr__(self) -> str:
        state = self.state
        steps = f", step {state.step}" + (f"/{state.total_steps}" if state.total_steps else "") if state.step else ""
        return f"<Run {self.name}: {state.words}{steps}>"

    @classmethod
    def attach(cls, name: str | os.PathLike[str] = "last") -> Run:
        """A run that was started before, running or over: its name or an end of it, its path, or `last`. Raises `LookupError`."""
        return cls(Job.attach(RunFolder.find(os.fspath(name))))

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self._job.folder

    @property
    def name(self) -> str:
        """The run's name, which is its folder's."""
        return self.folder.name

    @property
    def state(self) -> RunState:
        """Everything that is known of the run up to now."""
        self._follower.poll()
        return self._follower.state

    @property
    def words(self) -> str:
        """The state in words: starting ranks, training, finished, failed (rank 1: ValueError …), …"""
        return self.state.words

    def wait(self, timeout: float | None = None, until: str | None = None) -> Run:
        """Waits until the run is over, `timeout` seconds at most, or until a finding of the name `until` is there.

        A run that hangs is never over by itself: `wait(until="hang")` comes back. An interrupt stops the run and is raised again.
        """
        try:
            if until is None:
                self._job.wait(timeout)
            else:
                self._wait_for(until, timeout)
        except KeyboardInterrupt:
            self._job.stop()
            raise
        return self

    def _wait_for(self, finding: str, timeout: float | None) -> None:
        last = None if timeout is None else time.monotonic() + timeout
        while not any(one.name == finding for one in self.findings()) and self._job.state not in OVER:
            if last is not None and time.monotonic() > last:
                return
            time.sleep(_LOOK)

    def stop(self) -> Run:
        """Ends the run; returns when no process of it is left. A run that is over is left as it is."""
        self._job.stop()
        return self

    def summary(self) -> dict[str, Any]:
        """The figures of the run so far, in the shape of `labkit run --json`."""
        return summarise(self.state, self.name)

    def findings(self) -> Findings:
        """What is wrong, slow or large by what is known up to now, the gravest first, each with evidence, cause and way out."""
        return Findings(findings(self.state))

    def ledger(self) -> Ledger:
        """What the ranks sent in a step, by operation, beside what theory says; empty until a step was looked at."""
        return Ledger(ledger(self.state))

    def figure(self, name: str = "loss") -> go.Figure:
        """One of the run's figures as it is now: loss, throughput, memory, phases, timeline, memory_by_owner or memory_of_step."""
        from labkit.figures import figure

        return figure(name, self.state)

    def capture(self, snapshot: bool = False) -> int:
        """Has all ranks look closely at a step that is to come, and gives its number; with `snapshot` CUDA's allocator is recorded too.

        Raises `LookupError` for a run that is over.
        """
        state = self.state
        if state.over:
            raise LookupError(f"run {self.name} is over; only one that trains can be looked at")
        return ask(self.folder, state, snapshot)

    def trace(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes the sampled steps for Perfetto (ui.perfetto.dev) to `path`, in the run folder where none is given; gives the path."""
        path = Path(path) if path is not None else self.folder.trace
        write_trace(self.state, path)
        return path

    def logs(self, rank: int = 0, stream: str = "stdout") -> str:
        """All that one rank wrote to `stdout` or `stderr`; empty where it has written nothing yet."""
        if stream not in STREAMS:
            raise ValueError(f"stream {stream!r} is not known; there is {' and '.join(STREAMS)}")
        path = self.folder.log_of(rank, stream)
        return path.read_bytes().decode(errors="replace") if path else ""
