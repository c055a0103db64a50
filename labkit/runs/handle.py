"""Runs as Python objects: starting, following, and what a notebook shows."""

from __future__ import annotations

import ast
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose import NAMES, findings
from labkit.analysis.ledger import ledger
from labkit.analysis.summary import summarise
from labkit.common.arguments import check_choice, check_flag, check_path, check_seconds, check_type, shown
from labkit.common.text import visible_line
from labkit.common.units import counted, size
from labkit.exports.exporting import TOOLS, Live, check_tools, export
from labkit.figures.tables import Findings, Ledger
from labkit.launch import local
from labkit.launch.job import Job, ask
from labkit.launch.local import standing_environment
from labkit.launch.schedulers import follow_again
from labkit.launch.warm.client import prepare
from labkit.plan.nodes import Node
from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError, bounds_of, check_fields, default_precision
from labkit.prediction.predict import cached
from labkit.record.documents import plain
from labkit.record.files import whole
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.follow import Follower
from labkit.record.state import OVER, RunState
from labkit.runs.guesses import Guess, attach, document, pending
from labkit.runs.notebook import in_notebook
from labkit.setup.machine import Machine
from labkit.setup.progress import Reading

if TYPE_CHECKING:
    import plotly.graph_objects as go


# ---- the arguments of `run`


_LARGEST = 16 << 20  # bytes of a script


def settle(what: str | os.PathLike[str] | Spec, *, look: bool = True, nodes: int = 1, **fields: Any) -> Spec:
    """The Spec that `run` would start with the same arguments, resolved for this machine, or for several `nodes` like
    it; `SpecError` if it cannot run. Without `look`, it takes milliseconds: data and checkpoints are not looked for."""
    spec = named(what, **fields)
    _check_script(spec)
    machine = Machine.here().times(nodes)
    return spec.on(machine) if look else spec.settled(machine)


def named(what: str | os.PathLike[str] | Spec, **fields: Any) -> Spec:
    """The Spec of the arguments of `run`, not yet resolved for a machine."""
    check_fields(fields)
    return located(replace(what, **fields) if isinstance(what, Spec) else Spec(**_named(what, fields), **fields))


def with_ranks(spec: Spec) -> Spec:
    """A Spec that may be for another machine: only a missing number of ranks, device or precision and the checkpoint to
    resume from are taken from this one."""
    machine = Machine.here()
    device = spec.device if spec.device != "auto" else "cuda" if machine.gpus else "cpu"
    spec = replace(spec, nproc=spec.nproc or machine.default_nproc(device) or 2, device=device)
    if spec.script is not None:
        _check_script(spec)
        return spec
    precision = spec.precision or default_precision(spec, machine.gpus[: spec.nproc])
    return located(replace(spec, precision=precision)).with_checkpoint()


def _named(what: Any, fields: Mapping[str, Any]) -> dict[str, str]:
    """`what` as a field of Spec: a script or a strategy."""
    if not isinstance(what, (str, os.PathLike)):
        raise SpecError("strategy", f"what must be a strategy, the path of a script or a Spec, got {shown(what)}")
    field = "script" if fields.get("as_module") or str(what).endswith(".py") else "strategy"
    duplicates = {"strategy", "script"} & fields.keys()
    if duplicates:
        name = min(duplicates)
        raise SpecError(name, f"{shown(what)} and {name}={shown(fields[name])} exclude each other; give one of them")
    return {field: os.fspath(what)}


def _check_script(spec: Spec) -> None:
    """`SpecError` if a Spec names a script or module that does not exist."""
    if spec.as_module:
        _check_module(spec.script)
    elif spec.script is not None and not os.path.isfile(spec.script):  # noqa: PTH113 as above
        raise SpecError("script", f"{Path.cwd()} has no script {shown(spec.script)}; give the path of a Python file")
    elif spec.script is not None and os.path.getsize(spec.script) > _LARGEST:  # noqa: PTH202 as above
        raise SpecError(
            "script",
            f"{shown(spec.script)} is larger than {size(_LARGEST, 0)}, which no script is; give the path of a Python"
            " file",
        )


def _check_module(name: str) -> None:
    """`SpecError` if no module of this name is found, without importing anything."""
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        raise SpecError(
            "script", f"module must be a name such as package.module, got {shown(name)}; to run a file, omit -m"
        )
    found = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path])
    paths = [Path(place, *rest) for place in (found and found.submodule_search_locations) or ()]
    if rest or paths:
        there = any(path.with_name(f"{path.name}.py").is_file() or (path / "__main__.py").is_file() for path in paths)
    else:
        there = found is not None
    if not there:
        raise SpecError(
            "script",
            f"no module {name} that can run as a script was found in {Path.cwd()} or on the path of {sys.executable}",
        )


def check_sizes(spec: Spec, node: Node) -> None:
    """`SpecError` unless an elastic run works with each number of nodes that it admits."""
    if not node.fewer:
        return
    if not spec.max_restarts:
        raise SpecError(
            "max_restarts",
            f"--nodes {node.words} needs --max-restarts of at least 1: when a node leaves, the ranks of the others end"
            " with an error, and torchrun starts them again",
        )
    each, whole = node.share(spec.processes), _constants(spec)
    for nodes in node.fewer:
        few = f"--nodes {node.words} admits {counted(nodes, 'node')} with {counted(nodes * each, 'rank')}"
        try:
            other = _constants(settle(replace(spec, nproc=nodes * each), look=False, nodes=nodes))
        except SpecError as error:
            raise SpecError("nodes", f"{few}, on which this cannot run: {error}") from None
        for name in whole:
            if other.get(name) != whole[name]:
                raise SpecError(
                    "nodes",
                    f"{few}, for which the script has {name} = {other.get(name)} instead of {whole[name]}; use --nodes"
                    f" {node.nodes}, or settings in which {name} does not depend on the number of ranks",
                )


def _constants(spec: Spec) -> dict[str, str]:
    """The constants of a generated script, by name, as source; empty for a user's script, which is the same for all."""
    if spec.script is not None:
        return {}
    tree = ast.parse(write_script(spec)).body
    return {
        ast.unparse(statement.targets[0]): ast.unparse(statement.value)
        for statement in tree
        if isinstance(statement, ast.Assign)
    }


def descriptor(stdin: int | None) -> int | None:
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
    """`nproc` and `device` for this many ranks on this machine: GPUs if there are enough, otherwise CPU ranks.

    Raises `SpecError` if the number of ranks is out of bounds.
    """
    try:
        nproc = bounds_of("nproc").check("nproc", nproc)
    except ValueError as error:
        raise SpecError("nproc", str(error)) from None
    return {"nproc": nproc, "device": "cuda" if len(Machine.here().gpus) >= nproc else "cpu"}


def located(spec: Spec) -> Spec:
    """The same Spec, with `resume` converted to a path if it is the name of a run; `SpecError` if there is no such
    run."""
    if spec.resume is None or os.path.isdir(spec.resume):  # noqa: PTH112 pathlib raises for a name that is too long for a path
        return spec
    try:
        return replace(spec, resume=str(RunFolder.find(spec.resume).path))
    except LookupError as error:
        raise SpecError("resume", str(error)) from None


# ---- the Python API of runs


AFTER = "labkit after a run"  # the thread that then starts a warm server
_POLL_INTERVAL = 0.5  # seconds between two checks of a run's state
_FOR_EXPORTS = 120.0  # seconds that `wait` waits for exports after the end of a run


def run(
    what: str | os.PathLike[str] | Spec,
    *,
    detached: bool = False,
    cold: bool = False,
    stdin: int | None = None,
    export: str | Sequence[str] = (),
    **fields: Any,
) -> Run:
    """Starts a run on this machine and returns at once.

    `what` is a strategy's name, the path of a script (it ends in `.py`), or a `Spec`; `fields` are the Spec's other
    fields, such as `nproc=2`, `steps=100`, or `args=[...]` for your own script; with `as_module=True`, `what` is the
    name of a module. The run ends with this process, unless it is `detached`. `stdin` is a file descriptor that all
    ranks inherit as their standard input, as under torchrun (default: empty input). The first run of a session starts
    cold; when it is over, a warm server is started, which forks the ranks of later runs. A `cold` run is always started
    by torchrun. What was predicted with `guess("peak_mb", 40)` is stored with the run. `export` names tools, such as
    `tensorboard`, to which the run is exported while it is under way (see `Run.export` and `Run.exports`). Raises
    `SpecError` before anything is created, and `LaunchError` if the run cannot be started.
    """
    check_flag("detached", detached)
    check_flag("cold", cold)
    tools = exported_live(export, detached)
    return begin(settle(what, **fields), detached=detached, cold=cold, stdin=descriptor(stdin), tools=tools)


def exported_live(asked: str | Sequence[str], detached: bool) -> tuple[str, ...]:
    """The tools to which a run is exported while it is under way. Raises `ValueError` or `TypeError`."""
    tools = check_tools("export", asked)
    if tools and detached:
        raise ValueError(
            f"a detached run outlives the process that would export it to {tools[0]}; export it when it is over"
        )
    return tools


def begin(spec: Spec, *, cold: bool = False, tools: Sequence[str] = (), **options: Any) -> Run:
    """Starts a resolved Spec as `start` does, its exports to `tools`, and then a warm server, unless `cold`."""
    job = start(spec, cold=cold, **options)
    if not cold:
        prepare_after(job)
    return Run(job, tools)


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
    planned = options.pop("planned", partial(local.plan, below_page=in_notebook()))
    job = Job.start(spec, prediction=cached(spec), guess=document(guesses), planned=planned, **options)
    attach(guesses, job.folder)
    return job


def prepare_after(job: Job) -> None:
    """Starts a warm server for later runs when this run is over, because importing torch would slow its steps down."""

    environment = standing_environment()  # now: the program may change its environment while the run starts

    def prepare_then() -> None:
        while job.state not in OVER:
            time.sleep(_POLL_INTERVAL)
        prepare(environment)

    threading.Thread(target=prepare_then, daemon=True, name=AFTER).start()


class Run:
    """One run: its current state, figures and logs; methods wait for it and stop it."""

    def __init__(self, job: Job, tools: Sequence[str] = ()):
        check_type("job", job, Job, "a Job; start a run with run(), or open a recorded one with Run.attach()")
        self._job = job
        self._exports = [Live(job.folder, tool) for tool in tools]
        self._of_thread = threading.local()
        self._first = self._of_thread.follower = self._follower()

    def __repr__(self) -> str:
        state = self.state
        steps = f", step {state.step}" + (f"/{state.total_steps}" if state.total_steps else "") if state.step else ""
        return f"<Run {visible_line(self.name)}: {visible_line(state.words)}{steps}>"

    @classmethod
    def attach(cls, name: str | os.PathLike[str] = "last") -> Run:
        """An existing run, in progress or over: by its name, the start or end of its name, its path, or `last`.

        A run that was submitted to a scheduler is followed again if its supervisor was killed. Raises `LookupError` if
        there is no such run.
        """
        job = Job.attach(RunFolder.find(check_path("the name of a run", name)))
        follow_again(job.folder)
        return cls(job)

    @property
    def folder(self) -> RunFolder:
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
                self._finish_exports()
            else:
                self._wait_for(until, timeout)
        except KeyboardInterrupt:
            self._job.stop()
            raise
        return self

    def _finish_exports(self) -> None:
        """Waits for the exports of a run that is over, in which a client may be slow."""
        if self._exports and self._job.state in OVER:
            last = time.monotonic() + _FOR_EXPORTS
            for live in self._exports:
                live.join(max(0.0, last - time.monotonic()))

    def _wait_for(self, finding: str, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not any(diagnosed.name == finding for diagnosed in self.findings()) and self._job.state not in OVER:
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

    def export(self, to: str, out: str | os.PathLike[str] | None = None) -> str:
        """Exports what the run has recorded so far to a tool: tensorboard, trackio, wandb, mlflow, perfetto, csv or
        parquet. Returns where the export is and how to open it.

        `out` is the folder for it (default: `exports/TOOL`; of trackio, wandb and mlflow, the place where the tool
        keeps its runs). Nothing is overwritten but a trace for Perfetto that the lab has written. Raises `ExportError`
        (a `ValueError`) with one sentence, `ValueError` or `TypeError` for an unknown tool.
        """
        check_type("to", to, str, f"one of {', '.join(TOOLS)}")
        check_choice("to", to, TOOLS)
        check_tools("to", to)
        return export(self.folder, to, None if out is None else check_path("out", out))

    @property
    def exports(self) -> list[Live]:
        """The exports that follow this run, as asked for with `run(…, export=…)`; `words` say where each is, or why it
        ended."""
        return list(self._exports)

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
