"""The Python handle: `run("ddp", nproc=2)` starts a run and gives a `Run`, which knows everything that is in its folder.

Plotly is loaded by the call that needs it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import check_choice, check_flag, check_path, check_seconds, check_type, shown
from labkit.analysis.diagnose import NAMES, findings
from labkit.launch.capture import ask
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.follow import Follower
from labkit.launch.job import Job
from labkit.record.logs import whole
from labkit.launch.warm.client import prepare
from labkit.analysis.ledger import ledger
from labkit.setup.machine import Machine
from labkit.setup.progress import Reading
from labkit.plan.spec import Spec, SpecError, bounds_of, check_fields
from labkit.record.state import OVER, RunState
from labkit.analysis.summary import summarise
from labkit.figures.tables import Findings, Ledger
from labkit.common.text import visible_line
from labkit.analysis.trace import write_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LOOK = 0.5  # seconds between two looks at what was found


def run(
    what: str | os.PathLike[str] | Spec, *, detached: bool = False, cold: bool = False, stdin: int | None = None, **fields: Any
) -> Run:
    """Starts a run on this machine and returns at once.

    `what` is a strategy's name, the path of a script (it ends in `.py`), or a `Spec`; `fields` are the Spec's other fields, such as
    `nproc=2`, `steps=100`, or `args=[...]` for a script of your own; with `as_module=True`, `what` is the name of a module.
    The run ends with this process, unless it is `detached`. `stdin` is a file descriptor that all ranks inherit as their standard
    input, as under torchrun; without it that is empty. The first run of a session starts cold, and once it is under way a warm server
    is started, from which the next ones are forked; a `cold` run is started by torchrun itself.
    Raises `SpecError` before anything is created, and `LaunchError` if the run cannot be started.
    """
    check_flag("detached", detached)
    check_flag("cold", cold)
    job = Job.start(settle(what, **fields), detached=detached, cold=cold, stdin=_descriptor(stdin))
    if not cold:
        prepare_after(job)
    return Run(job)


def prepare_after(job: Job) -> None:
    """Starts a warm server for later runs once the ranks of this one have started: importing torch would slow them down."""

    def prepare_then() -> None:
        while job.state == "starting":
            time.sleep(_LOOK)
        prepare()

    threading.Thread(target=prepare_then, daemon=True, name="labkit warm server").start()


def settle(what: str | os.PathLike[str] | Spec, **fields: Any) -> Spec:
    """The Spec that `run` would start with the same arguments, with all that this machine decides; `SpecError` if it cannot run."""
    check_fields(fields)
    spec = located(replace(what, **fields) if isinstance(what, Spec) else Spec(**_named(what, fields), **fields))
    if spec.as_module:
        _check_module(spec.script)
    elif spec.script is not None and not os.path.isfile(spec.script):  # noqa: PTH113 as above
        raise SpecError("script", f"there is no script {shown(spec.script)} in {Path.cwd()}; give the path of a Python file")
    return spec.on(Machine.here())


def _named(what: Any, fields: Mapping[str, Any]) -> dict[str, str]:
    """`what` as a field of Spec: a script or a strategy."""
    if not isinstance(what, (str, os.PathLike)):
        raise SpecError("strategy", f"a strategy's name, the path of a script or a Spec can be run, got {shown(what)}")
    field = "script" if fields.get("as_module") or str(what).endswith(".py") else "strategy"
    twice = {"strategy", "script"} & fields.keys()
    if twice:
        raise SpecError(min(twice), f"both {shown(what)} and {min(twice)}={shown(fields[min(twice)])} were given; give one of them")
    return {field: os.fspath(what)}


def _check_module(name: str) -> None:
    """`SpecError` if no module of this name is found, without importing anything."""
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        raise SpecError("script", f"{shown(name)} is not the name of a module; write package.module, or give the path of a script")
    found = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path])
    paths = [Path(place, *rest) for place in (found and found.submodule_search_locations) or ()]
    if rest or paths:
        there = any(path.with_name(f"{path.name}.py").is_file() or (path / "__main__.py").is_file() for path in paths)
    else:
        there = found is not None
    if not there:
        raise SpecError("script", f"there is no module {name} that can run as a script, in {Path.cwd()} or on the path of {sys.executable}")


def _descriptor(stdin: int | None) -> int | None:
    if stdin is None:
        return None
    if isinstance(stdin, bool) or not isinstance(stdin, int):
        raise TypeError(f"stdin must be a file descriptor such as file.fileno(), got {shown(stdin)}")
    try:
        os.fstat(stdin)
    except (OSError, OverflowError):
        raise ValueError(f"stdin must be an open file descriptor, got {shown(stdin)}") from None
    return stdin


def place(nproc: int) -> dict[str, Any]:
    """Where this many ranks run on this machine, as fields of a Spec: on GPUs if there are enough of them, else as CPU ranks.

    Raises `SpecError` for a number of ranks that no machine has.
    """
    try:
        nproc = bounds_of("nproc").check("nproc", nproc)
    except ValueError as error:
        raise SpecError("nproc", str(error)) from None
    return {"nproc": nproc, "device": "cuda" if len(Machine.here().gpus) >= nproc else "cpu"}


def located(spec: Spec) -> Spec:
    """The same Spec with `resume` as a path if it is the name of a run; `SpecError` if there is no such run."""
    if spec.resume is None or os.path.isdir(spec.resume):  # noqa: PTH112 pathlib raises for a name that is too long for a path
        return spec
    try:
        return replace(spec, resume=str(RunFolder.find(spec.resume).path))
    except LookupError as error:
        raise SpecError("resume", str(error)) from None


class Run:
    """One run: its state as of now, its figures and logs, and the ways to wait for it and to stop it."""

    def __init__(self, job: Job):
        check_type("job", job, Job, "a Job; start a run with run(), or open a recorded one with Run.attach()")
        self._job = job
        self._follower = Follower(job.folder, progress=Reading(job.folder.name))

    def __repr__(self) -> str:
        state = self.state
        steps = f", step {state.step}" + (f"/{state.total_steps}" if state.total_steps else "") if state.step else ""
        return f"<Run {visible_line(self.name)}: {visible_line(state.words)}{steps}>"

    @classmethod
    def attach(cls, name: str | os.PathLike[str] = "last") -> Run:
        """A run that was started before, running or over: its name, the start or end of it, its path, or `last`.

        Raises `LookupError` if there is no such run.
        """
        return cls(Job.attach(RunFolder.find(check_path("the name of a run", name))))

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

        A run that hangs is never over by itself: `wait(until="hang")` returns. An interrupt stops the run and is raised again.
        Raises `ValueError` for a finding that does not exist.
        """
        timeout = check_seconds("timeout", timeout)
        if until is not None:
            check_choice("until", until, NAMES)
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
        check_flag("snapshot", snapshot)
        state = self.state
        if state.over:
            raise LookupError(f"run {self.name} is over; only one that trains can be looked at")
        return ask(self.folder, state, snapshot)

    def trace(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes the profiled steps for Perfetto (ui.perfetto.dev) to `path` (default: in the run folder) and returns the path.

        Raises `LookupError` for a run without profiled steps, `ValueError` for a path in a folder that does not exist.
        """
        path = Path(check_path("path", path)) if path is not None else self.folder.trace
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"path must be a file in a folder that exists, got {shown(str(path))}")
        state = self.state
        if not any(rank.timelines for rank in state.ranks.values()):
            raise LookupError(f"{self.name} has no profiled step; run with sample_every=50, or ask a running one with capture()")
        write_trace(state, path)
        return path

    def logs(self, rank: int = 0, stream: str = "stdout") -> str:
        """Everything that one rank wrote to `stdout` or `stderr`, all attempts in order; empty if it has written nothing yet.

        Raises `LookupError` for a rank that the run does not have.
        """
        self.check_rank(rank)
        check_choice("stream", stream, STREAMS)
        return b"".join(whole(lambda: self.log_paths(rank, stream), opened=self.folder.open)).decode(errors="replace")

    def log_paths(self, rank: int, stream: str) -> list[Path]:
        """The files of one rank's output, by attempt."""
        return [path for (_, of), path in self.folder.log_files(stream).items() if of == rank]

    def check_rank(self, rank: int) -> None:
        """Raises `LookupError` for a rank that the run does not have, as far as its number of ranks is known."""
        ranks = self.state.world_size
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank must be an integer from 0 to {max(ranks, 1) - 1}, got {shown(rank)}")
        if rank < 0 or (ranks and rank >= ranks):
            raise LookupError(f"rank must be an integer from 0 to {max(ranks, 1) - 1} in run {self.name}, got {shown(rank)}")
