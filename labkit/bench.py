"""The project's own performance figures, each measured side by side in one run: `labkit bench`.

These figures depend on the machine and on what else it does, so nothing here passes or fails: every line says what was measured,
how often, and the aim. Ratios come from pairs that take turns (A B, B A, …), so that a machine that slows down slows both.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from labkit.api import run
from labkit.events import Writer
from labkit.machine import Machine
from labkit.script import write_script
from labkit.spec import Spec

PAIRS = 5
_STEPS = 40


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of `each`, its unit, the aim, and what to know about it."""

    name: str
    median: float
    unit: str
    aim: str
    each: tuple[float, ...]
    note: str = ""


# ---- a run under the lab against the same script under bare torchrun

# Both sides run this clock, so that it costs both the same: the time of each optimizer step, one line each.
_CLOCK = """
import os as _os, time as _time
from torch.optim.optimizer import register_optimizer_step_post_hook as _hook
_file = _os.open(_os.environ["BENCH_CLOCK"] + _os.environ["RANK"], _os.O_CREAT | _os.O_WRONLY | _os.O_APPEND)
_hook(lambda *_: _os.write(_file, b"%.6f\\n" % _time.time()) and None)
"""


def overhead() -> list[Figure]:
    """Step time and time to the first step: supervisor, torchrun and probe against bare torchrun, paired."""
    spec = Spec("ddp", nproc=2, steps=_STEPS, device="cpu").on(Machine.here())
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        script.write_text(_CLOCK + write_script(spec))
        sides = {"lab": _under_the_lab, "bare": _under_torchrun}
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for pair in range(PAIRS + 1):  # the first warms the disk's cache and is not counted
            for name in sorted(sides, reverse=bool(pair % 2)):
                clock = Path(place) / f"{name}{pair}-"
                began = time.time()
                sides[name](script, clock)
                if pair:
                    measured[name].append(_read_clock(clock, began))
    pairs = list(zip(measured["lab"], measured["bare"]))
    steps = [lab[0] / bare[0] for lab, bare in pairs]
    firsts = [lab[1] / bare[1] for lab, bare in pairs]
    medians = [statistics.median(side[index] for side in measured["bare"]) for index in (0, 1)]
    return [
        _ratio("step time, lab / bare torchrun", steps, "≤ 1.02", f"ddp × 2, cnn, {_STEPS} steps; bare: {medians[0] * 1000:.1f} ms a step"),
        _ratio("time to first step, lab / bare torchrun", firsts, "≤ 1.05", f"supervisor included; bare: {medians[1]:.2f} s"),
    ]


def _under_the_lab(script: Path, clock: Path) -> None:
    os.environ["BENCH_CLOCK"] = str(clock)
    run(str(script), nproc=2, device="cpu").wait()


def _under_torchrun(script: Path, clock: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "BENCH_CLOCK": str(clock), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def _read_clock(clock: Path, began: float) -> tuple[float, float]:
    """(median seconds between steps, seconds from the start to the first step), of the slower rank."""
    steps, firsts = [], []
    for rank in (0, 1):
        times = [float(line) for line in Path(f"{clock}{rank}").read_text().split()]
        steps.append(statistics.median(b - a for a, b in zip(times[1:], times[2:])))
        firsts.append(times[0] - began)
    return max(steps), max(firsts)


# ---- two ranks against one

def scaling() -> list[Figure]:
    """Samples per second of DDP on two CPU ranks against one, one thread each, on the 60,000 digits; and what bounds it."""
    ratios, phases = [], {1: [], 2: []}
    for pair in range(PAIRS):
        speed = {}
        for nproc in sorted((1, 2), reverse=bool(pair % 2)):
            summary = run("ddp", nproc=nproc, steps=_STEPS, device="cpu").wait().summary()
            speed[nproc] = summary["samples_per_second"]
            phases[nproc].append(summary["ranks"][0]["phase_seconds"])
        ratios.append(speed[2] / speed[1])
    grown = {
        phase: statistics.median(each[phase] for each in phases[2]) - statistics.median(each[phase] for each in phases[1])
        for phase in phases[1][0]
    }
    worst = max(grown, key=grown.__getitem__)
    note = f"one thread a rank, batch 128 a rank; {worst} grows most: by {grown[worst] * 1000:+.1f} ms a step; one rank alone: " + ", ".join(
        f"{phase} {statistics.median(each[phase] for each in phases[1]) * 1000:.1f}" for phase in phases[1][0]
    )
    return [_ratio("samples per second, ddp × 2 / ddp × 1", ratios, "2.00 at the most", note + " ms")]


# ---- the small things

def importing() -> list[Figure]:
    """`import labkit`, in a process of its own each time, and whether anything heavy came along."""
    code = (
        "import time, sys; t = time.perf_counter(); import labkit; s = time.perf_counter() - t;"
        "print(s, *sorted({'torch', 'plotly', 'ipywidgets'} & set(sys.modules)))"
    )
    times, heavy = [], set()
    for _ in range(PAIRS):
        seconds, *loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        times.append(float(seconds) * 1000)
        heavy |= set(loaded)
    return [Figure("import labkit", statistics.median(times), "ms", "≤ 50 ms", tuple(times), f"loads {', '.join(heavy) or 'nothing heavy'}")]


def _ratio(name: str, each: list[float], aim: str, note: str) -> Figure:
    return Figure(name, statistics.median(each), "×", aim, tuple(each), note)


BENCHES: tuple[Callable[[], list[Figure]], ...] = (importing, overhead, scaling)
