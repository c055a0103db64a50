"""What a user waits for: the import, the panel's delay behind events, opening a recorded run, a burst of log lines."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.benchmarks.figure import EVERY, PAIRS, Figure
from labkit.plan.spec import Spec
from labkit.record import clock
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.writer import OWNERS, Writer

# ---- import


def importing() -> list[Figure]:
    """Time of `import labkit` in a new process, and whether it imports anything heavy."""
    code = (
        "import time, sys; t = time.perf_counter(); import labkit; s = time.perf_counter() - t;"
        "print(s, *sorted({'torch', 'plotly', 'ipywidgets'} & set(sys.modules)))"
    )
    times, heavy = [], set()
    for _ in range(PAIRS):
        seconds, *loaded = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        times.append(float(seconds) * 1000)
        heavy |= set(loaded)
    return [
        Figure(
            "import labkit",
            statistics.median(times),
            "ms",
            "≤ 50 ms",
            tuple(times),
            f"loads {', '.join(heavy) or 'nothing heavy'}",
        )
    ]


# ---- delay between an event and the panel


_RANKS, _RATE, _SECONDS = 8, 100, 15


def latency() -> list[Figure]:
    """Milliseconds from writing an event until the panel's model has it, with 8 ranks writing 100 steps per second
    each.
    """
    from labkit.frontends.panel.view import RunView

    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create("latency", Path(place))
        RunFolder.write_json(folder.spec, Spec("ddp", nproc=_RANKS, steps=_RATE * _SECONDS).to_json())
        _say_state(folder, "running")
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_write_steps, args=(folder.path, rank)) for rank in range(_RANKS)]
        for rank in ranks:
            rank.start()
        view, seen, late = RunView(), [0] * _RANKS, []
        view.follow(_Watched(folder))
        while any(rank.is_alive() for rank in ranks) or min(seen) < _RATE * _SECONDS:
            for number, rank in list(view.state.ranks.items()):
                known = len(rank.steps)
                late += [clock.now() - t for t in rank.steps.t[seen[number] : known]]
                seen[number] = known
            time.sleep(0.005)
        _say_state(folder, "finished")
        view.wait()
    quantiles = statistics.quantiles([seconds * 1000 for seconds in late], n=20)
    note = (
        f"{len(late):,} events of {_RANKS} ranks at {_RATE} per second each; median {quantiles[9]:.0f} ms, measured"
        " every 5 ms"
    )
    return [
        Figure("event to the panel's model, 95th percentile", quantiles[-1], "ms", "≤ 300 ms", (quantiles[-1],), note)
    ]


@dataclass
class _Watched:
    """A run folder that this process fills itself."""

    folder: RunFolder

    def stop(self) -> None:
        """Does nothing, because there is no process to stop."""


def _say_state(folder: RunFolder, state: str) -> None:
    RunFolder.write_json(folder.status, {"v": 1, "state": state, "started": clock.now()})


def _write_steps(path: Path, rank: int) -> None:
    writer = Writer(RunFolder(path).events_of(rank), rank)
    writer.write("start", pid=os.getpid(), device="cpu")
    writer.write("activity", name="training")
    due = time.monotonic()
    for step in range(1, _RATE * _SECONDS + 1):
        writer.write("step", **_measured(step))
        due += 1 / _RATE
        time.sleep(max(0.0, due - time.monotonic()))


def _measured(step: int) -> dict[str, Any]:
    seconds = {"step": 0.01, "data": 0.001, "forward": 0.003, "backward": 0.005, "optimizer": 0.001, "other": 0.0}
    return {
        "step": step,
        "loss": 1 / step,
        "samples": 128,
        "seconds": seconds,
        "memory": {"allocated": 1 << 20, "reserved": None, "peak": 2 << 20},
    }


# ---- opening a recorded run


_LONG = 1_000

# units, each with an all-gather, a reduce-scatter and compute; points of a memory curve (the maximum)
_LAYERS, _MOMENTS = 50, 600


def opening() -> list[Figure]:
    """Seconds to read and draw a recorded run of 8 ranks and 1,000 steps with timelines, and the size of its largest
    figure.
    """
    import plotly.graph_objects as go

    from labkit.analysis.ledger import ledger
    from labkit.figures import NAMES, figure

    go.Figure().to_json()  # the import of plotly is not measured
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create("opening", Path(place))
        RunFolder.write_json(folder.spec, Spec("fsdp2", "gpt", nproc=_RANKS, steps=_LONG).to_json())
        _say_state(folder, "finished")
        for rank in range(_RANKS):
            _write_sampled(folder, rank)
        held = sum(path.stat().st_size for path in folder.event_files().values()) / 1e6
        opened, read, work, sizes = [], [], [], {}
        for _ in range(PAIRS):
            began, before = time.perf_counter(), time.process_time()
            follower = Follower(folder)
            follower.poll()
            read.append(time.perf_counter() - began)
            ledger(follower.state)
            drawn = {name: figure(name, follower.state).to_json() for name in NAMES}
            opened.append(time.perf_counter() - began)
            work.append(time.process_time() - before)
            sizes = {name: len(text.encode()) / 1e6 for name, text in drawn.items()}
    largest = max(sizes, key=sizes.__getitem__)
    of_it = (
        f"reading takes {statistics.median(read):.2f} s, the rest is for the ledger and {len(sizes)} figures; "
        f"CPU time {statistics.median(work):.2f} s"
    )
    note = f"{held:.0f} MB of events, every {EVERY}th step profiled; {of_it}"
    return [
        Figure(
            f"opening {_RANKS} ranks × {_LONG:,} steps", statistics.median(opened), "s", "≤ 2 s", tuple(opened), note
        ),
        Figure(
            "largest figure of that run",
            sizes[largest],
            "MB",
            "≤ 2 MB",
            tuple(sizes.values()),
            f"{largest}; {', '.join(sizes)}",
        ),
    ]


def _write_sampled(folder: RunFolder, rank: int) -> None:
    """Writes the events of one rank of a deep model: every step, every 50th with timeline and traffic, one with
    memory."""
    writer, size = Writer(folder.events_of(rank), rank), 4 << 20
    writer.write("start", pid=os.getpid(), device="cpu")
    gather = {"calls": 2 * _LAYERS, "bytes": 2 * _LAYERS * size, "sent": 2 * _LAYERS * size * (_RANKS - 1) / _RANKS}
    for step in range(1, _LONG + 1):
        writer.write("step", **_measured(step))
        if step % EVERY == 0:
            sampled = {"step": step, "t0": clock.now(), "seconds": 0.1}
            writer.write("timeline", **sampled, **_timeline(rank, size))
            if step == EVERY:
                writer.write("memory_step", **sampled, **_moments())
            writer.write("traffic", step=step, ops={"all_gather": gather})
    writer.write("end", exit_code=0, steps=_LONG, seconds=_LONG / 100)
    writer.close()


def _phases() -> list[list[Any]]:
    return [["data", 0.0, 0.01], ["forward", 0.01, 0.05], ["backward", 0.05, 0.09], ["optimizer", 0.09, 0.1]]


def _timeline(rank: int, size: int) -> dict[str, Any]:
    """Each unit has an all-gather and compute in forward and in backward, and a reduce-scatter of gradients in
    backward.
    """
    comm, busy, marks, group = [], [], [], ("default_pg", list(range(_RANKS)))
    for number in range(2 * _LAYERS):
        begin, way = 10_000 + 800 * number + 10 * rank, "backward" if number >= _LAYERS else "forward"
        marks.append([f"FSDP::pre_{way} ({number % _LAYERS})", *_seconds(begin, begin + 200)])
        comm.append(["all_gather", *_seconds(begin, begin + 300), size, *group, len(comm)])
        busy += [_seconds(begin + 300, begin + 500), _seconds(begin + 550, begin + 700)]
        if way == "backward":
            comm.append(["reduce_scatter", *_seconds(begin + 400, begin + 700), size, *group, len(comm)])
    exposed = {"forward": 3e-4 * _LAYERS, "backward": 35e-5 * _LAYERS}
    return {
        "backend": "gloo",
        "device": "cpu",
        "phases": _phases(),
        "comm": comm,
        "busy": busy,
        "marks": marks,
        "exposed": exposed,
    }


def _seconds(*microseconds: int) -> list[float]:
    return [moment / 1e6 for moment in microseconds]


def _moments() -> dict[str, Any]:
    columns = {
        owner: [(number * place * 7919) % 512 << 20 for number in range(_MOMENTS)]
        for place, owner in enumerate(OWNERS, 1)
    }
    totals = [sum(row) for row in zip(*columns.values())]
    peak = max(range(_MOMENTS), key=totals.__getitem__)
    at_peak = {owner: column[peak] for owner, column in columns.items()}
    times = [round(number * 0.1 / _MOMENTS, 6) for number in range(_MOMENTS)]
    return {"phases": _phases(), "times": times, "owners": columns, "peak": totals[peak], "at_peak": at_peak}
