"""The project's own performance figures, each measured side by side in one run: `labkit bench`.

These figures depend on the machine and on what else it does, so nothing here passes or fails: every line says what was measured,
how often, and the aim. Ratios come from pairs that take turns (A B, B A, …), so that a machine that slows down slows both.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from labkit.api import run
from labkit.events import Writer
from labkit.launch.folder import RunFolder
from labkit.machine import Machine
from labkit.progress import Progress
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
_hook(lambda *_: _os.write(_file, b"%.7f\\n" % _time.time()) and None)
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


def overhead() -> list[Figure]:
    """Step time and time to the first step: supervisor, torchrun and probe against bare torchrun, paired."""
    script = write_script(Spec("ddp", nproc=2, steps=_STEPS, device="cpu").on(Machine.here()))
    lab, bare = _in_turn({"lab": (_under_the_lab, script), "bare": (_under_torchrun, script)}, nproc=2)
    step, first = ([under[index] / without[index] for under, without in zip(lab, bare)] for index in (0, 1))
    usual = [statistics.median(side[index] for side in bare) for index in (0, 1)]
    sides = {"lab": (_under_the_lab, _TINY), "bare": (_under_torchrun, _TINY)}
    tiny = [(under[0] - without[0]) * 1e6 for under, without in zip(*_in_turn(sides, nproc=1))]
    what = f"ddp × 2, cnn, {_STEPS} steps; bare: {usual[0] * 1000:.1f} ms a step"
    share = f"a step of a tiny model, 3,000 of them; of the step above it is {statistics.median(tiny) / usual[0] / 1e4:.2f} %"
    return [
        _ratio("step time, lab / bare torchrun", step, "≤ 1.02", what),
        _ratio("time to first step, lab / bare torchrun", first, "≤ 1.05", f"supervisor included; bare: {usual[1]:.2f} s"),
        Figure("the probe's own cost of a step", statistics.median(tiny), "µs", "small", tuple(tiny), share),
    ]


def written_out() -> list[Figure]:
    """Step time of the written-out scripts against the same written by hand with plain PyTorch, both under bare torchrun."""
    figures = []
    for strategy in ("ddp", "fsdp2", "tp", "pp"):
        script = write_script(Spec(strategy, nproc=2, steps=_STEPS, device="cpu").on(Machine.here()))
        by_hand = (Path(__file__).with_name("by_hand") / f"{strategy}.py").read_text(encoding="utf-8")
        ours, theirs = _in_turn({"written out": (_under_torchrun, script), "by hand": (_under_torchrun, by_hand)}, nproc=2)
        ratios = [one[0] / other[0] for one, other in zip(ours, theirs)]
        note = f"× 2, cnn, {_STEPS} steps; by hand: {statistics.median(other[0] for other in theirs) * 1000:.1f} ms a step"
        figures.append(_ratio(f"step time of {strategy}, written out / by hand", ratios, "≤ 1.01", note))
    return figures


def _in_turn(sides: dict[str, tuple[Callable[[Path, int], None], str]], nproc: int) -> list[list[tuple[float, float]]]:
    """What `_read_clock` gives of `PAIRS` runs of each side, a way to run a script and its source, which take turns."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        for pair in range(PAIRS + 1):  # the first warms the disk's cache and is not counted
            for name in sorted(sides, reverse=bool(pair % 2)):
                start, source = sides[name]
                script.write_text(_CLOCK + source)
                os.environ["BENCH_CLOCK"] = clock = f"{place}/{name.replace(' ', '-')}{pair}-"
                began = time.time()
                start(script, nproc)
                if pair:
                    measured[name].append(_read_clock(clock, nproc, began))
    return list(measured.values())


def _under_the_lab(script: Path, nproc: int) -> None:
    run(str(script), nproc=nproc, device="cpu").wait()


def _under_torchrun(script: Path, nproc: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script)]
    subprocess.run(command, env=environment, check=False, capture_output=True)  # torch may abort a rank on its way out; the clock tells


def _read_clock(clock: str, nproc: int, began: float) -> tuple[float, float]:
    """(median seconds between steps, seconds from the start to the first step), of the slower rank."""
    ranks = []
    for rank in range(nproc):
        times = [float(line) for line in Path(f"{clock}{rank}").read_text().split()]
        ranks.append((statistics.median(b - a for a, b in pairwise(times[1:])), times[0] - began))
    return max(step for step, _ in ranks), max(first for _, first in ranks)


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
        seconds = {"step": 0.01, "data": 0.001, "forward": 0.003, "backward": 0.005, "optimizer": 0.001, "other": 0.0}
        memory = {"allocated": 1 << 20, "reserved": None, "peak": 2 << 20}
        writer.write("step", step=step, loss=1 / step, samples=128, seconds=seconds, memory=memory)
        due += 1 / _RATE
        time.sleep(max(0.0, due - time.monotonic()))


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


BENCHES: tuple[Callable[[], list[Figure]], ...] = (importing, latency, burst, overhead, written_out, scaling)


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
    table = Table("figure", "median", "smallest to largest", "aim", "note", title=on)
    for figure in figures:
        spread = f"{min(figure.each):.3g} to {max(figure.each):.3g} of {len(figure.each)}"
        table.add_row(figure.name, f"{figure.median:.3g} {figure.unit}", spread, figure.aim, figure.note)
    Console().print(table)
    return 0
