"""The memory of a long run, sampled once per minute: of the kernel that shows its panel, the supervisor, each rank and
the page; and of the same script under plain torchrun, for comparison.

The memory of a process is its USS (unique set size): the bytes that would be freed if it ended, without pages that it
shares with other processes. Kernel, supervisor and ranks share the libraries of Python and torch.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.table import Table

from bench.notebook import Shown, end_tree, executed
from bench.results import Result, append
from labkit.frontends.console import Console
from labkit.launch import local
from labkit.launch.job import Job
from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.record.folder import RunFolder
from labkit.record.reader import StepFile
from labkit.record.state import OVER
from labkit.record.writer import steps_path
from labkit.setup.machine import Machine

MINUTES, RANKS = 15, 8
WARM_UP = 10.0  # minutes that do not count: caches, buffers and charts reach their size
_APPEARS = 600.0  # seconds within which all ranks must train
_PID = "kernel.pid"
_CELL = """
import os
from pathlib import Path
from labkit import run, show
Path({pid!r}).write_text(str(os.getpid()))
show(run("ddp", cold=True, **{fields!r}))
"""
_STEP = re.compile(rb"step ([\d,]+): loss")
_MIB = 2**20
_TAIL = 1 << 14  # bytes at the end of a log in which the newest step is looked for


class Sample(NamedTuple):
    """What was measured `minute` minutes after all ranks had begun to train, in bytes; None: there is no such thing."""

    minute: float
    step: int
    ranks: tuple[int, ...]
    kernel: int | None = None
    supervisor: int | None = None
    page: int | None = None
    nodes: int | None = None
    folder: int | None = None

    @property
    def rank(self) -> float:
        """The median of the ranks."""
        return statistics.median(self.ranks)


def memory_growth(minutes: int = MINUTES, ranks: int = RANKS, results: str | None = None) -> list[Result]:
    """Memory of a run of 8 CPU ranks with its panel in a notebook: growth per hour of kernel, supervisor, ranks and
    page."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as home, _under_the_lab(Path(home), ranks) as (take, shown):
        samples = sampled(take, shown.wait, minutes, partial(_noted, results, "lab"))
    return _reported("the lab", samples, ranks)


def memory_growth_control(minutes: int = MINUTES, ranks: int = RANKS, results: str | None = None) -> list[Result]:
    """Memory of the ranks of the same script under plain torchrun, without the lab: growth per hour."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as home, _under_torchrun(Path(home), ranks) as take:
        samples = sampled(take, time.sleep, minutes, partial(_noted, results, "torchrun"))
    return _reported("torchrun", samples, ranks)


# ---- arithmetic


def growth(samples: Sequence[Sample], name: str, after: float = WARM_UP) -> float | None:
    """The slope of a column in bytes per hour, by least squares over the samples from minute `after` on; None if there
    are fewer than two, or if it is unknown."""
    known = [(one.minute / 60, getattr(one, name)) for one in samples if one.minute >= after]
    if len(known) < 2 or any(value is None for _, value in known):
        return None
    return statistics.linear_regression(*zip(*known)).slope


def table(samples: Sequence[Sample]) -> Table:
    """A row per sample; memory in MiB."""
    titles = {"kernel": "kernel", "supervisor": "supervisor", "rank": "rank", "page": "JS heap", "folder": "folder"}
    shown = Table("minute", "step", *titles.values(), "DOM nodes", title="MiB; the rank is the median rank")
    for one in samples:
        values = (getattr(one, name) for name in titles)
        sizes = ("" if value is None else f"{value / _MIB:.1f}" for value in values)
        nodes = "" if one.nodes is None else f"{one.nodes:,}"
        shown.add_row(f"{one.minute:.0f}", f"{one.step:,}", *sizes, nodes)
    return shown


def figures(what: str, samples: Sequence[Sample], ranks: int) -> list[Result]:
    """The growth per hour of everything that was measured."""
    found = []
    for name in ("kernel", "supervisor", "rank", "page", "nodes", "folder"):
        values = [getattr(one, name) for one in samples]
        if values[0] is None:
            continue
        slope, unit, scale = growth(samples, name), *(("nodes", 1) if name == "nodes" else ("MiB", _MIB))
        each = tuple(value / scale for value in values)
        note = f"min to max in {unit}; {ranks} ranks, {samples[-1].step:,} steps in {samples[-1].minute:.0f} minutes"
        short = f"; a growth needs more than {WARM_UP:g} minutes" if slope is None else ""
        title = f"{_TITLES[name]} under {what}: growth after {WARM_UP:g} minutes"
        found.append(Result(title, slope if slope is None else slope / scale, f"{unit}/h", "", each, note + short))
    return found


_TITLES = {
    "kernel": "memory of the kernel",
    "supervisor": "memory of the supervisor",
    "rank": "memory of a rank (median)",
    "page": "JavaScript heap of the page",
    "nodes": "DOM nodes of the page",
    "folder": "run folder",
}


def sampled(
    take: Callable[[float], Sample],
    wait: Callable[[float], None],
    minutes: int,
    note: Callable[[Sample], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Sample]:
    """A sample now and after each of `minutes` minutes; `take` takes it, `note` is called with each, `wait` waits some
    seconds."""
    began, samples = clock(), []
    for minute in range(minutes + 1):
        wait(max(0.0, began + 60 * minute - clock()))
        samples.append(take((clock() - began) / 60))
        note(samples[-1])
    return samples


def _noted(path: str | None, side: str, sample: Sample) -> None:
    if path is not None:
        append(path, {"benchmark": "memory_growth", "side": side, "t": time.time(), **sample._asdict()})


def _reported(what: str, samples: Sequence[Sample], ranks: int) -> list[Result]:
    Console(stderr=True).print(table(samples))
    return figures(what, samples, ranks)


# ---- the two sides


def _fields(ranks: int) -> dict[str, Any]:
    """A run that lasts until it is stopped."""
    return {"workload": "cnn", "nproc": ranks, "batch_size": 8, "epochs": 1_000_000, "device": "cpu"}


@contextmanager
def _under_the_lab(home: Path, ranks: int) -> Iterator[tuple[Callable[[float], Sample], Shown]]:
    """A run that was started in a notebook, with its panel."""
    runs = home / "runs"
    cell = _CELL.format(pid=str(home / _PID), fields=_fields(ranks))
    with executed(cell, home, local.standing_environment() | {"LABKIT_RUNS": str(runs)}) as shown:
        try:
            _until(lambda: len(_ranks_of(runs)) == ranks and min(_steps(_folder(runs), ranks)) > 0, shown.wait)
            kernel, folder = int((home / _PID).read_text()), _folder(runs)
            yield partial(_of_the_lab, kernel, folder, ranks, shown), shown
        finally:
            for folder in RunFolder.all(runs):
                Job.attach(folder).stop()


def _of_the_lab(kernel: int, folder: RunFolder, ranks: int, shown: Shown, minute: float) -> Sample:
    status = folder.read_status()
    if status.state in OVER:
        raise RuntimeError(f"the run ended after {minute:.1f} minutes: {status.state} {status.message}")
    heap, nodes = shown.counted()
    return Sample(
        minute,
        min(_steps(folder, ranks)),
        tuple(_uss(pid) for pid in _ranks_of(folder.path.parent)),
        _uss(kernel),
        _uss(status.supervisor.pid),
        heap,
        nodes,
        sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file()),
    )


def _folder(runs: Path) -> RunFolder:
    return RunFolder.all(runs)[0]


def _ranks_of(runs: Path) -> list[int]:
    found = RunFolder.all(runs)
    return [*(found[0].read_status().ranks or {}).values()] if found else []


def _steps(folder: RunFolder, ranks: int) -> list[int]:
    return [StepFile(steps_path(folder.events_of(rank))).whole() for rank in range(ranks)]


@contextmanager
def _under_torchrun(home: Path, ranks: int) -> Iterator[Callable[[float], Sample]]:
    """The script of that run, under torchrun."""
    script, log = home / "train.py", home / "log"
    script.write_text(write_script(Spec("ddp", **_fields(ranks)).on(Machine.here())), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    with open(log, "wb") as output:
        agent = subprocess.Popen(
            command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        _until(lambda: _printed_step(log) > 0 or agent.poll() is not None, time.sleep)
        yield partial(_of_torchrun, agent, log, ranks)
    finally:
        end_tree(agent)


def _of_torchrun(agent: subprocess.Popen[Any], log: Path, ranks: int, minute: float) -> Sample:
    found = [] if agent.poll() is not None else psutil.Process(agent.pid).children()
    pids = [child.pid for child in found if "RANK" in child.environ()]
    if len(pids) < ranks:
        raise RuntimeError(f"torchrun or a rank of it ended after {minute:.1f} minutes")
    return Sample(minute, _printed_step(log), tuple(map(_uss, pids)))


def _printed_step(log: Path) -> int:
    """The newest step of which the script has printed the loss; 0 before the first."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        found = _STEP.findall(file.read())
    return int(found[-1].replace(b",", b"")) if found else 0


def _uss(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)


def _until(reached: Callable[[], bool], wait: Callable[[float], None]) -> None:
    last = time.monotonic() + _APPEARS
    while not reached():
        if time.monotonic() > last:
            raise RuntimeError(f"the ranks did not train within {_APPEARS:g} s")
        wait(0.5)
