"""The same script run in several ways in turn, and the times of its steps, which the script itself notes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bench.results import EVERY, PAIRS
from labkit.runs.handle import run
from labkit.setup.preflight import LOOPBACK

FIRST, LAST = 11, 110  # the measured steps; 50 and 100 are profiled

# All sides run this clock at the same cost: it writes a line with Unix time and CPU time of the process at each
# optimizer step. Before the first and after the last measured step it waits for the GPU, which may be behind.
_CLOCK = f"""
import itertools as _itertools, os as _os, time as _time, torch as _torch
from torch.optim.optimizer import register_optimizer_step_post_hook as _hook
_file = _os.open(_os.environ["BENCH_CLOCK"] + _os.environ["RANK"], _os.O_CREAT | _os.O_WRONLY | _os.O_APPEND)
_steps = _itertools.count(1)
def _note(*_):
    if next(_steps) in ({FIRST - 1}, {LAST}) and _torch.cuda.is_initialized():
        _torch.cuda.synchronize()
    _os.write(_file, b"%.7f %.7f\\n" % (_time.time(), _time.process_time()))
_hook(_note)
"""


class Times(NamedTuple):
    """Seconds of one run: median and mean of steps 11 to 110, the same of their CPU time, time to first step, total
    time.
    """

    step: float
    mean: float
    cpu: float
    cpu_mean: float
    first: float
    whole: float


def in_turn(
    sides: dict[str, tuple[Callable[[Path, int], None], str]], nproc: int, pairs: int = PAIRS
) -> list[list[Times]]:
    """The times of `pairs` alternating runs of each side; a side is a function that runs a script, and the script's
    source.
    """
    return [list(side) for side in zip(*each_pair(sides, nproc, pairs))]


def each_pair(
    sides: dict[str, tuple[Callable[[Path, int], None], str]], nproc: int, pairs: int
) -> Iterator[tuple[Times, ...]]:
    """The times of each side, in the order of `sides`, after each of `pairs` alternating runs."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        for pair in range(pairs + 1):
            turn = list(sides)[:: -1 if pair % 2 else 1]  # compared sides run directly after each other
            measured = {}
            for name in turn if pair else turn[:1]:  # the first run warms the disk cache and is not counted
                start, source = sides[name]
                script.write_text(_CLOCK + source)
                os.environ["BENCH_CLOCK"] = clock = f"{place}/{name.replace(' ', '-')}{pair}-"
                began = time.time()
                start(script, nproc)
                if pair:
                    measured[name] = _read_clock(clock, nproc, began, time.time())
            if pair:
                yield tuple(measured[name] for name in sides)


def under_the_lab(script: Path, nproc: int, sample_every: int = EVERY, device: str = "cpu") -> None:
    run(str(script), nproc=nproc, device=device, sample_every=sample_every, cold=True).wait()


def started_warm(script: Path, nproc: int) -> None:
    handle = run(str(script), nproc=nproc, device="cpu").wait()
    if handle.state.status.start != "warm":
        raise RuntimeError(f"the run started cold instead of warm: {handle.state.status.cold_because}")


def under_torchrun(script: Path, nproc: int, python: str = sys.executable, device: str = "cpu") -> None:
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script)]
    _alone(command, script.parent, device)


def under_traceml(script: Path, nproc: int, python: str) -> None:
    _alone([python, "-m", "traceml_ai.launcher.cli", "run", str(script), f"--nproc-per-node={nproc}"], script.parent)


def _alone(command: list[str], place: Path, device: str = "cpu") -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | LOOPBACK
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # torch may abort a rank during shutdown, so the exit code is ignored
    subprocess.run(command, env=environment, cwd=place, check=False, capture_output=True)


def _read_clock(clock: str, nproc: int, began: float, ended: float) -> Times:
    """The times of a run between two moments; each is that of the slowest rank."""
    ranks = []
    for rank in range(nproc):
        lines = Path(f"{clock}{rank}").read_text().splitlines()
        times, work = zip(*(map(float, line.split()) for line in lines))
        each = [[b - a for a, b in pairwise(ends[FIRST - 2 :])] for ends in (times, work)]
        ranks.append(
            (
                *(middle(seconds) for seconds in each for middle in (statistics.median, statistics.fmean)),
                times[0] - began,
            )
        )
    return Times(*map(max, zip(*ranks)), ended - began)
