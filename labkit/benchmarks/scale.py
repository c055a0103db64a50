"""Long runs of 8 ranks × 100,000 steps and of 10,000,000 steps: fabricated with the real writer, then opened in a new
process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labkit.benchmarks.figure import PAIRS, Figure
from labkit.plan.spec import Spec
from labkit.record.folder import RunFolder
from labkit.record.writer import Writer

_RANKS, _STEPS, _MOST = 8, 100_000, 10_000_000

# Opens a run, computes its summary and draws its charts; prints the CPU seconds of the first two, of the third, and the
# peak RSS in MB.
_OPEN = """
import json, resource, sys, time
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.analysis.summary import summarise
follower = Follower(RunFolder(sys.argv[1]))
follower.poll()
summary = summarise(follower.state)
opened = time.process_time()
from labkit.figures import CHARTS
for chart in CHARTS.values():
    chart(follower.state).drawn()
drawn = time.process_time() - opened
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
print(json.dumps([opened, drawn, peak, summary.steps, summary.broken_lines]))
"""


def long_runs() -> list[Figure]:
    """Runs of 8 ranks × 100,000 steps and of 10,000,000 steps in total: size on disk, CPU time and memory of
    opening."""
    with tempfile.TemporaryDirectory() as place:
        folder = _fabricated(Path(place))
        size = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file()) / 1e6
        opened = [_opened(folder) for _ in range(PAIRS)]
        shown = [_shown(folder) for _ in range(PAIRS)]
        longer = _lengthened(folder)
        most = _opened(longer)
    times, drawn, peaks = zip(*opened)
    name = f"{_RANKS} ranks × {_STEPS:,} steps"
    note = (
        f"reading and summary, including imports; the charts take another {statistics.median(drawn):.2f} s; "
        f"peak RSS {max(peaks):.0f} MB"
    )
    return [
        Figure(f"{name}, on disk", size, "MB", "≤ 100 MB", (size,)),
        Figure(f"{name}, opened", statistics.median(times), "s of CPU", "≤ 5 s", times, note),
        Figure(
            f"{name}, labkit show",
            statistics.median(shown),
            "s",
            "≤ 5 s",
            tuple(shown),
            "wall-clock time of the command",
        ),
        Figure(
            f"{_MOST:,} steps, peak memory",
            most[2],
            "MB",
            "≤ 500 MB",
            (most[2],),
            f"opened in {most[0]:.1f} s of CPU, charts {most[1]:.1f} s",
        ),
    ]


def _fabricated(place: Path) -> RunFolder:
    folder = RunFolder.create("long", place)
    RunFolder.write_json(folder.spec, Spec("ddp", nproc=_RANKS, steps=_STEPS).to_json())
    seconds = {"step": 0.01, "data": 0.001, "forward": 0.003, "backward": 0.005, "optimizer": 0.001, "other": 0.0}
    began = time.time()
    RunFolder.write_json(folder.status, {"v": 1, "state": "finished", "started": began, "ended": began + _STEPS / 100})
    for rank in range(_RANKS):
        writer = Writer(folder.events_of(rank), rank)
        writer.write("start", t=began, pid=os.getpid(), device="cpu")
        for step in range(1, _STEPS + 1):
            memory = {"allocated": 1 << 20, "reserved": None, "peak": (2 << 20) + step % 977}
            writer.write(
                "step", t=began + step / 100, step=step, loss=1 / step, samples=128, seconds=seconds, memory=memory
            )
        writer.write("end", t=began + _STEPS / 100, exit_code=0, steps=_STEPS, seconds=_STEPS / 100)
        writer.close()
    return folder


def _lengthened(folder: RunFolder) -> RunFolder:
    """The same folder with its records repeated until all ranks have ten million steps in total."""
    times = _MOST // (_RANKS * _STEPS)
    rest = (_MOST - times * _RANKS * _STEPS) // _RANKS
    for lines in folder.event_files().values():
        path = lines.with_suffix(".steps")
        _, _, records = path.read_bytes().partition(b"\n")
        with open(path, "ab") as file:
            for _ in range(times - 1):
                file.write(records)
            file.write(records[: rest * (len(records) // _STEPS)])
    return folder


def _opened(folder: RunFolder) -> tuple[float, float, float]:
    done = subprocess.run([sys.executable, "-c", _OPEN, str(folder.path)], capture_output=True, text=True, check=True)
    opened, drawn, peak, steps, broken = json.loads(done.stdout)
    if not steps or broken:
        raise RuntimeError(f"read {steps} steps, of which {broken} records are broken")
    return opened, drawn, peak


def _shown(folder: RunFolder) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "labkit", "show", str(folder.path)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began
