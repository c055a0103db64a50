"""The project's own performance figures, each measured side by side in one run: `labkit bench`.

These figures depend on the machine and on what else it does, so nothing here passes or fails: every line says what was measured,
how often, and the aim. Ratios come from pairs that take turns (A B, B A, …), so that a machine that slows down slows both.
What a step costs is told in CPU time too, which hears little of what else runs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Column, Table

from labkit.api import run
from labkit.events import OWNERS, Writer
from labkit.launch.folder import RunFolder
from labkit.launch.follow import Follower
from labkit.machine import Machine
from labkit.progress import Progress
from labkit.script import write_script
from labkit.spec import Spec

PAIRS = 5
_STEPS = 40
_STRATEGIES = ("ddp", "fsdp2", "tp", "pp")


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of `each`, its unit, the aim, and what to know about it; None where nothing was measured."""

    name: str
    median: float | None
    unit: str
    aim: str
    each: tuple[float, ...]
    note: str = ""


# ---- a run under the lab against the same script under bare torchrun

# All sides run this clock, so that it costs them the same: unix time and the process's own CPU time at each optimizer step, one line each.
_CLOCK = """
import os as _os, time as _time
from torch.optim.optimizer import register_optimizer_step_post_hook as _hook
_file = _os.open(_os.environ["BENCH_CLOCK"] + _os.environ["RANK"], _os.O_CREAT | _os.O_WRONLY | _os.O_APPEND)
_hook(lambda *_: _os.write(_file, b"%.7f %.7f\\n" % (_time.time(), _time.process_time())) and None)
"""
_TINY = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))
for step in range(3000):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""
_FIRST, _LAST, _EVERY = 11, 110, 50  # steps that are measured, and that are sampled: 50 and 100 are among them
_FEW = 3  # pairs of each strategy and workload; all of them together have figures of their own
_BATCHES = {"cnn": 32, "gpt": 4}  # a rank: the bench ends in minutes, and a cost is a greater share than where people train
_ASPECTS = {  # fields of _Times: in words, and the lab's aim; what samples a step is in the mean alone
    "step": ("steps, median", "≤ 1.02"),
    "mean": ("steps, mean", "≤ 1.03"),
    "cpu": ("CPU time of steps, median", ""),
    "cpu_mean": ("CPU time of steps, mean", ""),
    "first": ("until the first step", "≤ 1.05"),
    "whole": ("the whole command", ""),
}


class _Times(NamedTuple):
    """Seconds of one run: median and mean of its steps from the eleventh on, the same of their CPU time, until the first, of the whole."""

    step: float
    mean: float
    cpu: float
    cpu_mean: float
    first: float
    whole: float


def overhead() -> list[Figure]:
    """A run under the lab against bare torchrun, paired: its steps, those that are sampled too, the first step, the whole command."""
    figures, labs, bares = [], [], []
    scripts = {f"{strategy}, {workload}": _short(strategy, workload) for workload, strategy in product(_BATCHES, _STRATEGIES)}
    for name, script in scripts.items():
        lab, bare = _in_turn({"lab": (_under_the_lab, script), "bare": (_under_torchrun, script)}, 2, _FEW)
        labs, bares = labs + lab, bares + bare
        figures += _against(name, "lab", lab, bare, "step", "mean", "cpu", "cpu_mean")
    figures += _against("all of these", "lab", labs, bares, *_ASPECTS)
    sides = {"lab": (partial(_under_the_lab, sample_every=0), _TINY), "bare": (_under_torchrun, _TINY)}
    tiny = [(under.step - without.step) * 1e6 for under, without in zip(*_in_turn(sides, nproc=1))]
    share = statistics.median(tiny) / statistics.median(bare.step for bare in bares) / 1e4
    note = f"always on; a step of a tiny model, 3,000 of them; of the median step above it is {share:.2f} %"
    return [*figures, Figure("the probe's own cost of a step", statistics.median(tiny), "µs", "small", tuple(tiny), note)]


def _short(strategy: str, workload: str) -> str:
    """A written-out script that trains on small batches until the last step that is measured, on two CPU ranks."""
    batch = _BATCHES[workload]
    spec = Spec(strategy, workload, nproc=2, steps=_LAST, batch_size=batch, samples=2 * batch * _LAST, device="cpu")
    return write_script(spec.on(Machine.here()))


def _against(what: str, side: str, under: list[_Times], bare: list[_Times], *fields: str) -> list[Figure]:
    """The ratios of one side's times to those under bare torchrun, and by how much they differ."""
    figures = []
    for field in fields:
        words, aim = _ASPECTS[field]
        usual = statistics.median(getattr(times, field) for times in bare)
        more = statistics.median(getattr(one, field) - getattr(other, field) for one, other in zip(under, bare))
        note = f"bare: {usual * 1000:,.1f} ms; {more * 1000:+,.2f} ms"
        name = f"{what}: {words}, {side} / bare torchrun"
        figures.append(_ratio(name, _ratios(under, bare, field), aim if side == "lab" else "", note))
    return figures


def _ratios(under: list[_Times], bare: list[_Times], field: str) -> list[float]:
    return [getattr(one, field) / getattr(other, field) for one, other in zip(under, bare)]


# ---- the package traceml-ai on the same script

_TRAINS = "loss = train_step(model, optimizer, inputs, targets)"
_TRACED = "import traceml_ai\ntraceml_ai.init(mode='auto')\n"
_VERSION = "import sklearn, torch, traceml_ai; from importlib.metadata import version; print(version('traceml-ai'))"
_HOW = "not measured; pip install traceml-ai torch scikit-learn in an environment of its own, named by LABKIT_BENCH_TRACEML=…/bin/python"


def beside_traceml() -> list[Figure]:
    """The package traceml-ai and the lab on the same script, each against bare torchrun of its own python, paired."""
    python = shutil.which(os.environ.get("LABKIT_BENCH_TRACEML", sys.executable))
    asked = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, check=False) if python else None
    if asked is None or asked.returncode:
        return [Figure("steps, traceml-ai / bare torchrun", None, "×", "", (), _HOW)]
    theirs, figures = f"traceml-ai {asked.stdout.strip()}", []
    for workload in _BATCHES:
        script = _short("ddp", workload)
        before, after = script.split(_TRAINS)  # a loop of one's own is traced where it says so
        sides = {
            "lab": (_under_the_lab, script),
            "bare": (_under_torchrun, script),
            "traceml": (partial(_under_traceml, python=python), f"{_TRACED}{before}with traceml_ai.trace_step(model): {_TRAINS}{after}"),
            "bare there": (partial(_under_torchrun, python=python), script),
        }
        lab, bare, traced, there = _in_turn(sides, 2, _FEW)
        figures += _against(f"ddp, {workload}", "lab", lab, bare, *_ASPECTS)
        figures += _against(f"ddp, {workload}", theirs, traced, there, *_ASPECTS)
    return figures


# ---- the written-out scripts against the same by hand


def written_out() -> list[Figure]:
    """Step time of the written-out scripts against the same written by hand with plain PyTorch, both under bare torchrun."""
    figures = []
    for strategy in _STRATEGIES:
        script = write_script(Spec(strategy, nproc=2, steps=_STEPS, device="cpu").on(Machine.here()))
        by_hand = (Path(__file__).with_name("by_hand") / f"{strategy}.py").read_text(encoding="utf-8")
        ours, theirs = _in_turn({"written out": (_under_torchrun, script), "by hand": (_under_torchrun, by_hand)}, nproc=2)
        note = f"× 2, cnn, {_STEPS} steps; by hand: {statistics.median(times.step for times in theirs) * 1000:.1f} ms a step"
        figures.append(_ratio(f"step time of {strategy}, written out / by hand", _ratios(ours, theirs, "step"), "≤ 1.01", note))
    return figures


def _in_turn(sides: dict[str, tuple[Callable[[Path, int], None], str]], nproc: int, pairs: int = PAIRS) -> list[list[_Times]]:
    """The times of so many runs of each side, a way to run a script and its source, which take turns."""
    measured: dict[str, list[_Times]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        for pair in range(pairs + 1):
            turn = list(sides)[:: -1 if pair % 2 else 1]  # sides that are compared stand beside each other
            for name in turn if pair else turn[:1]:  # one run warms the disk's cache and is not counted
                start, source = sides[name]
                script.write_text(_CLOCK + source)
                os.environ["BENCH_CLOCK"] = clock = f"{place}/{name.replace(' ', '-')}{pair}-"
                began = time.time()
                start(script, nproc)
                if pair:
                    measured[name].append(_read_clock(clock, nproc, began, time.time()))
    return list(measured.values())


def _under_the_lab(script: Path, nproc: int, sample_every: int = _EVERY) -> None:
    run(str(script), nproc=nproc, device="cpu", sample_every=sample_every).wait()


def _under_torchrun(script: Path, nproc: int, python: str = sys.executable) -> None:
    _alone([python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script)], script.parent)


def _under_traceml(script: Path, nproc: int, python: str) -> None:
    _alone([python, "-m", "traceml_ai.launcher.cli", "run", str(script), f"--nproc-per-node={nproc}"], script.parent)


def _alone(command: list[str], place: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    # torch may abort a rank on its way out; the clock tells
    subprocess.run(command, env=environment, cwd=place, check=False, capture_output=True)


def _read_clock(clock: str, nproc: int, began: float, ended: float) -> _Times:
    """The times of a run between two moments, each that of the slower rank."""
    ranks = []
    for rank in range(nproc):
        lines = Path(f"{clock}{rank}").read_text().splitlines()
        times, work = zip(*(map(float, line.split()) for line in lines))
        each = [[b - a for a, b in pairwise(ends[_FIRST - 2 :])] for ends in (times, work)]
        ranks.append((*(middle(seconds) for seconds in each for middle in (statistics.median, statistics.fmean)), times[0] - began))
    return _Times(*map(max, zip(*ranks)), ended - began)


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
    note = (
        f"one thread a rank, batch 128 a rank; {worst} grows most: by {grown[worst] * 1000:+.1f} ms a step; one rank alone: "
        + ", ".join(f"{phase} {statistics.median(each[phase] for each in phases[1]) * 1000:.1f}" for phase in phases[1][0])
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
    return [
        Figure("import labkit", statistics.median(times), "ms", "≤ 50 ms", tuple(times), f"loads {', '.join(heavy) or 'nothing heavy'}")
    ]


# ---- from an event's writing to the panel

_RANKS, _RATE, _SECONDS = 8, 100, 15


def latency() -> list[Figure]:
    """Milliseconds from an event's writing until the panel's model has it, with 8 ranks writing 100 steps a second each."""
    from labkit.panel.view import RunView

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
                late += [time.time() - t for t in rank.steps.t[seen[number] : known]]
                seen[number] = known
            time.sleep(0.005)
        _say_state(folder, "finished")
        view.wait()
    quantiles = statistics.quantiles([seconds * 1000 for seconds in late], n=20)
    note = f"{len(late):,} events of {_RANKS} ranks at {_RATE} a second each; median {quantiles[9]:.0f} ms, measured every 5 ms"
    return [Figure("event to the panel's model, 95th percentile", quantiles[-1], "ms", "≤ 300 ms", (quantiles[-1],), note)]


@dataclass
class _Watched:
    """A run folder that this process fills itself; nothing of it can be stopped."""

    folder: RunFolder

    def stop(self) -> None:
        """There is no process to end."""


def _say_state(folder: RunFolder, state: str) -> None:
    RunFolder.write_json(folder.status, {"v": 1, "state": state, "started": time.time()})


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


# ---- a recorded run, opened

_LONG = 1_000
_LAYERS, _MOMENTS = 50, 600  # units with a gather, a scatter and computing of their own; points of a step's memory, which are its most


def opening() -> list[Figure]:
    """A recorded run of 8 ranks and 1,000 steps with timelines, read and drawn: seconds, and the size of its largest figure."""
    import plotly.graph_objects as go

    from labkit.figures import NAMES, figure
    from labkit.ledger import ledger

    go.Figure().to_json()  # importing plotly is not what is measured
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
        f"reading {statistics.median(read):.2f} s, the ledger and {len(sizes)} figures the rest; CPU time {statistics.median(work):.2f} s"
    )
    note = f"{held:.0f} MB of events, one step of {_EVERY} sampled; {of_it}"
    return [
        Figure(f"{_RANKS} ranks × {_LONG:,} steps, opened", statistics.median(opened), "s", "≤ 2 s", tuple(opened), note),
        Figure("the largest figure of these", sizes[largest], "MB", "≤ 2 MB", tuple(sizes.values()), f"{largest}; {', '.join(sizes)}"),
    ]


def _write_sampled(folder: RunFolder, rank: int) -> None:
    """The events of one rank: every step, for one of fifty its timeline and traffic, for an early one its memory, as of a deep model."""
    writer, size = Writer(folder.events_of(rank), rank), 4 << 20
    writer.write("start", pid=os.getpid(), device="cpu")
    gather = {"calls": 2 * _LAYERS, "bytes": 2 * _LAYERS * size, "sent": 2 * _LAYERS * size * (_RANKS - 1) / _RANKS}
    for step in range(1, _LONG + 1):
        writer.write("step", **_measured(step))
        if step % _EVERY == 0:
            sampled = {"step": step, "t0": time.time(), "seconds": 0.1}
            writer.write("timeline", **sampled, **_timeline(rank, size))
            if step == _EVERY:
                writer.write("memory_step", **sampled, **_moments())
            writer.write("traffic", step=step, ops={"all_gather": gather})
    writer.write("end", exit_code=0, steps=_LONG, seconds=_LONG / 100)
    writer.close()


def _phases() -> list[list[Any]]:
    return [["data", 0.0, 0.01], ["forward", 0.01, 0.05], ["backward", 0.05, 0.09], ["optimizer", 0.09, 0.1]]


def _timeline(rank: int, size: int) -> dict[str, Any]:
    """Each unit is gathered and computed, forward and once more backward, where its gradients are scattered."""
    comm, busy, marks, group = [], [], [], ("default_pg", list(range(_RANKS)))
    for number in range(2 * _LAYERS):
        begin, way = 10_000 + 800 * number + 10 * rank, "backward" if number >= _LAYERS else "forward"
        marks.append([f"FSDP::pre_{way} ({number % _LAYERS})", *_seconds(begin, begin + 200)])
        comm.append(["all_gather", *_seconds(begin, begin + 300), size, *group, len(comm)])
        busy += [_seconds(begin + 300, begin + 500), _seconds(begin + 550, begin + 700)]
        if way == "backward":
            comm.append(["reduce_scatter", *_seconds(begin + 400, begin + 700), size, *group, len(comm)])
    exposed = {"forward": 3e-4 * _LAYERS, "backward": 35e-5 * _LAYERS}
    return {"backend": "gloo", "device": "cpu", "phases": _phases(), "comm": comm, "busy": busy, "marks": marks, "exposed": exposed}


def _seconds(*microseconds: int) -> list[float]:
    return [moment / 1e6 for moment in microseconds]


def _moments() -> dict[str, Any]:
    columns = {owner: [(number * place * 7919) % 512 << 20 for number in range(_MOMENTS)] for place, owner in enumerate(OWNERS, 1)}
    totals = [sum(row) for row in zip(*columns.values())]
    peak = max(range(_MOMENTS), key=totals.__getitem__)
    at_peak = {owner: column[peak] for owner, column in columns.items()}
    times = [round(number * 0.1 / _MOMENTS, 6) for number in range(_MOMENTS)]
    return {"phases": _phases(), "times": times, "owners": columns, "peak": totals[peak], "at_peak": at_peak}


# ---- a million lines of log at once

_LINES = 250_000
_BURST = f"""
import os
rank = os.environ["RANK"]
for number in range({_LINES}):
    print(f"rank {{rank}} writes line {{number}}, and it is about as long as such lines are")
"""


def burst() -> list[Figure]:
    """1,000,000 log lines from 4 ranks while a kernel shows them: its answers, its memory, the lines in files and on the page."""
    from jupyter_client.manager import start_new_kernel

    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "burst.py"
        script.write_text(_BURST)
        home = str(Path(__file__).resolve().parents[1])
        added = {"LABKIT_RUNS": str(Path(place) / "runs"), "PYTHONPATH": home}
        manager, client = start_new_kernel(env=os.environ | added, cwd=place, stderr=subprocess.DEVNULL)
        try:
            pages = _Pages(client)
            pages.ask("from labkit import run, show; import labkit.panel")
            kernel = psutil.Process(manager.provisioner.pid)
            before = kernel.memory_info().rss
            pages.ask(f"burst_ = show(run({str(script)!r}, nproc=4, device='cpu'))")
            answers, memory = [], []
            while pages.ask("print(burst_.folder.read_json(burst_.folder.status)['state'])").strip() not in (
                "finished",
                "failed",
                "stopped",
            ):
                answers.append(pages.last_seconds * 1000)
                memory.append(kernel.memory_info().rss)
                time.sleep(0.02)
            lines = sum(path.read_bytes().count(b"\n") for path in Path(place).glob("runs/*/logs/*/attempt_0/*/stdout.log"))
            newest = pages.wait_for(f"writes line {_LINES - 1},")
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    grown = (max(memory) - before) / 1e6
    shown = "the page was sent the newest" if newest else "the page was NOT sent the newest"
    return [
        Figure(
            "kernel's slowest answer during the burst",
            max(answers),
            "ms",
            "≤ 200 ms",
            tuple(answers),
            f"median {statistics.median(answers):.0f} ms",
        ),
        Figure(
            "kernel's memory grown by the burst",
            grown,
            "MB",
            "≤ 100 MB",
            (grown,),
            f"{lines:,} of {4 * _LINES:,} lines are in the files; {shown}",
        ),
    ]


class _Pages:
    """A client of a kernel that looks as a page does, and remembers what the kernel sends to widgets."""

    def __init__(self, client) -> None:
        self._client = client
        self._sent: list[str] = []
        self.last_seconds = 0.0

    def ask(self, code: str) -> str:
        """Executes `code` as a page would and gives what it printed; notes how long that took."""
        began, printed = time.perf_counter(), []
        request = self._client.execute(code, allow_stdin=True)
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            self._note(kind, content)
            if message["parent_header"].get("msg_id") != request:
                continue  # a widget's, sent by a thread of the kernel's own accord
            if kind == "stream":
                printed.append(content["text"])
            elif kind == "error":
                raise RuntimeError(f"the kernel answered {content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                self.last_seconds = time.perf_counter() - began
                return "".join(printed)

    def wait_for(self, text: str, seconds: float = 20.0) -> bool:
        """Whether a widget is sent `text` within so many seconds."""
        last = time.monotonic() + seconds
        while time.monotonic() < last:
            self.ask("None")
            if any(text in sent for sent in self._sent):
                return True
            time.sleep(0.1)
        return False

    def _note(self, kind: str, content: dict) -> None:
        if kind == "comm_open" and "_esm" in content["data"].get("state", {}):
            for word in ("here", "ready", "show"):  # what a page says of its charts and its logs when it has drawn them
                answer = {"method": "custom", "content": {"kind": word}}
                self._client.shell_channel.send(self._client.session.msg("comm_msg", {"comm_id": content["comm_id"], "data": answer}))
        elif kind == "comm_msg":
            self._sent = [*self._sent[-50:], json.dumps(content.get("data"), default=str)]


def _ratio(name: str, each: list[float], aim: str, note: str) -> Figure:
    return Figure(name, statistics.median(each), "×", aim, tuple(each), note)


BENCHES: tuple[Callable[[], list[Figure]], ...] = (
    importing,
    latency,
    opening,
    burst,
    overhead,
    beside_traceml,
    written_out,
    scaling,
)


def main(as_json: bool = False) -> int:
    """Runs every bench and prints its figures: a table, or one JSON object."""
    began, figures = time.time(), []
    with tempfile.TemporaryDirectory() as runs, Progress() as progress:
        os.environ["LABKIT_RUNS"] = runs
        for bench in BENCHES:
            progress.step(bench.__doc__.splitlines()[0])
            figures += bench()
    machine = Machine.here()
    on = f"{machine.cores} cores, {machine.memory / 2**30:.0f} GiB, {len(machine.gpus)} GPUs; load {os.getloadavg()[0]:.1f} at the end"
    if as_json:
        print(json.dumps({"machine": on, "seconds": round(time.time() - began), "figures": [asdict(figure) for figure in figures]}))
        return 0
    table = Table("figure", "median", "smallest to largest", "aim", Column("note", overflow="fold"), title=on)
    for figure in figures:
        spread = f"{min(figure.each):.3g} to {max(figure.each):.3g} of {len(figure.each)}" if figure.each else ""
        median = "" if figure.median is None else f"{figure.median:.3g} {figure.unit}"
        table.add_row(figure.name, median, spread, figure.aim, figure.note)
    Console().print(table)
    return 0
