"""The Python API of runs: `run("ddp", nproc=2)` starts a run and returns a `Run`, which gives access to everything in
its folder.

Plotly is imported by the calls that need it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose import NAMES, findings
from labkit.analysis.ledger import ledger
from labkit.analysis.summary import summarise
from labkit.analysis.trace import write_trace
from labkit.common.arguments import check_choice, check_flag, check_path, check_seconds, check_type, shown
from labkit.common.text import visible_line
from labkit.figures.tables import Findings, Ledger
from labkit.launch import local
from labkit.launch.capture import ask
from labkit.launch.job import Job
from labkit.launch.local import standing_environment
from labkit.launch.slurm import follow_again
from labkit.launch.warm.client import prepare
from labkit.plan.nodes import Node
from labkit.plan.spec import Spec
from labkit.prediction.predict import cached
from labkit.record.documents import plain
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.follow import Follower
from labkit.record.logs import whole
from labkit.record.state import OVER, RunState
from labkit.runs.guesses import Guess, attach, document, pending
from labkit.setup.progress import Reading

if TYPE_CHECKING:
    import plotly.graph_objects as go

from labkit.runs.settling import check_sizes, descriptor, settle

_POLL_INTERVAL = 0.5  # seconds between two checks of a run's state


def run(
    what: str | os.PathLike[str] | Spec,
    *,
    detached: bool = False,
    cold: bool = False,
    stdin: int | None = None,
    **fields: Any,
) -> Run:
    """Starts a run on this machine and returns at once.

    `what` is a strategy's name, the path of a script (it ends in `.py`), or a `Spec`; `fields` are the Spec's other
    fields, such as `nproc=2`, `steps=100`, or `args=[...]` for your own script; with `as_module=True`, `what` is the
    name of a module. The run ends with this process, unless it is `detached`. `stdin` is a file descriptor that all
    ranks inherit as their standard input, as under torchrun (default: empty input). The first run of a session starts
    cold; then a warm server is started, which forks the ranks of later runs. A `cold` run is always started by
    torchrun. What was predicted with `predict("peak_mb", 40)` is stored with the run. Raises `SpecError` before
    anything is created, and `LaunchError` if the run cannot be started.
    """
    check_flag("detached", detached)
    check_flag("cold", cold)
    return begin(settle(what, **fields), detached=detached, cold=cold, stdin=descriptor(stdin))


def begin(spec: Spec, *, cold: bool = False, **options: Any) -> Run:
    """Starts a resolved Spec as `start` does, and then a warm server, unless `cold`."""
    job = start(spec, cold=cold, **options)
    if not cold:
        prepare_after(job)
    return Run(job)


def start_node(spec: Spec, node: Node, **options: Any) -> Job:
    """Starts the ranks of one node as `start` does, each node in a separate folder."""
    node.share(spec.processes)
    check_sizes(spec, node)
    name = f"{spec.name}-node{node.rank}"
    return start(spec, **options | {"cold": True}, name=name, planned=partial(local.plan, node=node))


def start(spec: Spec, *, guesses: Sequence[Guess] | None = None, **options: Any) -> Job:
    """Starts a resolved Spec as `Job.start` does, with its prediction if there is one in the cache, and with the
    learner's predictions (default: those that are pending)."""
    guesses = pending(spec.processes) if guesses is None else guesses
    job = Job.start(spec, prediction=cached(spec), guess=document(guesses), **options)
    attach(guesses, job.folder)
    return job


def prepare_after(job: Job) -> None:
    """Starts a warm server for later runs after the ranks of this run have started, because importing torch would slow
    them down."""

    environment = standing_environment()  # now: the program may change its environment while the run starts

    def prepare_then() -> None:
        while job.state == "starting":
            time.sleep(_POLL_INTERVAL)
        prepare(environment)

    threading.Thread(target=prepare_then, daemon=True, name="labkit warm server").start()


class Run:
    """One run: its current state, figures and logs; methods wait for it and stop it."""

    def __init__(self, job: Job):
        check_type("job", job, Job, "a Job; start a run with run(), or open a recorded one with Run.attach()")
        self._job = job
        self._of_thread = threading.local()
        self._first = self._of_thread.follower = self._follower()

    def __repr__(self) -> str:
        state = self.state
        steps = f", step {state.step}" + (f"/{state.total_steps}" if state.total_steps else "") if state.step else ""
        return f"<Run {visible_line(self.name)}: {visible_line(state.words)}{steps}>"

    @classmethod
    def attach(cls, name: str | os.PathLike[str] = "last") -> Run:
        """An existing run, in progress or over: by its name, the start or end of its name, its path, or `last`.

        A run that was submitted to Slurm is followed again if its supervisor was killed. Raises `LookupError` if there
        is no such run.
        """
        job = Job.attach(RunFolder.find(check_path("the name of a run", name)))
        follow_again(job.folder)
        return cls(job)

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self._job.folder

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        return self.folder.name

    @property
    def state(self) -> RunState:
        """The current state of the run. Each thread gets its own, so that none changes while another thread reads it.

        A thread that asks first when the run folder no longer exists gets what the thread that made this object has
        read.
        """
        if not hasattr(self._of_thread, "follower"):
            follower = self._follower()
            self._of_thread.follower = follower if follower.found else self._first
        self._of_thread.follower.poll()
        return self._of_thread.follower.state

    def _follower(self) -> Follower:
        return Follower(self.folder, progress=Reading(self.name))

    @property
    def words(self) -> str:
        """The state in words: starting ranks, training, finished, failed (rank 1: ValueError …), …"""
        return self.state.words

    def wait(self, timeout: float | None = None, until: str | None = None) -> Run:
        """Waits until the run is over, until it has a finding named `until`, or for at most `timeout` seconds.

        A run that hangs is never over; `wait(until="hang")` returns. `KeyboardInterrupt` stops the run and is raised
        again. Raises `ValueError` for an unknown finding.
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
        deadline = None if timeout is None else time.monotonic() + timeout
        while not any(one.name == finding for one in self.findings()) and self._job.state not in OVER:
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(_POLL_INTERVAL)

    def stop(self) -> Run:
        """Stops the run and returns when all of its processes have ended. A run that is over is not changed."""
        self._job.stop()
        return self

    def summary(self) -> dict[str, Any]:
        """The current figures of the run, in the format of `labkit run --json`."""
        return plain(summarise(self.state, self.name))

    def findings(self) -> Findings:
        """The current findings (errors, slow steps, high memory use), most severe first, each with evidence, cause and
        fix."""
        return Findings(findings(self.state))

    def ledger(self) -> Ledger:
        """The traffic of a step by operation, measured and expected (analytical); empty until a step was profiled."""
        return Ledger(ledger(self.state))

    def figure(self, name: str = "loss") -> go.Figure:
        """One current figure of the run: loss, throughput, memory, phases, timeline, memory_by_owner or
        memory_of_step."""
        from labkit.figures import figure

        return figure(name, self.state)

    def capture(self, snapshot: bool = False) -> int:
        """Asks all ranks to profile a later step and returns its number; `snapshot` also records the CUDA allocator.

        Raises `LookupError` for a run that is over.
        """
        check_flag("snapshot", snapshot)
        state = self.state
        if state.over:
            raise LookupError(f"run {self.name} is over; only a run in progress can be profiled")
        return ask(self.folder, state, snapshot)

    def trace(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes the profiled steps for Perfetto (ui.perfetto.dev) to `path` (default: in the run folder) and returns
        the path.

        Raises `LookupError` for a run without profiled steps, `ValueError` for a path in a folder that does not exist.
        """
        path = Path(check_path("path", path)) if path is not None else self.folder.trace
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"path must be a file in a folder that exists, got {shown(str(path))}")
        state = self.state
        if not any(rank.timelines for rank in state.ranks.values()):
            raise LookupError(
                f"{self.name} has no profiled step; run with sample_every=50, or call capture() during a run"
            )
        write_trace(state, path)
        return path

    def logs(self, rank: int = 0, stream: str = "stdout") -> str:
        """The complete `stdout` or `stderr` of one rank, all attempts in order; empty if there is no output yet.

        Raises `LookupError` for a rank that the run does not have.
        """
        self.check_rank(rank)
        check_choice("stream", stream, STREAMS)
        return b"".join(whole(lambda: self.log_paths(rank, stream), opened=self.folder.open)).decode(errors="replace")

    def log_paths(self, rank: int, stream: str) -> list[Path]:
        """The output files of one rank, by attempt."""
        return [path for (_, of), path in self.folder.log_files(stream).items() if of == rank]

    def check_rank(self, rank: int) -> None:
        """Raises `LookupError` for a rank that the run does not have, if its number of ranks is known."""
        ranks = self.state.world_size
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank must be an integer from 0 to {max(ranks, 1) - 1}, got {shown(rank)}")
        if rank < 0 or (ranks and rank >= ranks):
            raise LookupError(
                f"rank must be an integer from 0 to {max(ranks, 1) - 1} in run {self.name}, got {shown(rank)}"
            )
