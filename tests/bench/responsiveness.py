"""How fast the lab answers: imports, opening of runs, the delay of events, long and many runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.results import EVERY, PAIRS, Result
from labkit.plan.spec import Spec
from labkit.record import clock
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.writer import OWNERS, Writer
from labkit.setup.environment import CLONE

# ---- A burst of one million log lines


_LINES = 250_000

_BURST = f"""
import os
rank = os.environ["RANK"]
for number in range({_LINES}):
    print(f"rank {{rank}} writes line {{number}}, and it is about as long as such lines are")
"""


def burst() -> list[Result]:
    """1,000,000 log lines of 4 ranks shown by a kernel: its response times, its memory, the lines in files and on the
    page.
    """
    from jupyter_client.manager import start_new_kernel

    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "burst.py"
        script.write_text(_BURST)
        added = {"LABKIT_RUNS": str(Path(place) / "runs"), "PYTHONPATH": str(CLONE)}
        manager, client = start_new_kernel(env=os.environ | added, cwd=place, stderr=subprocess.DEVNULL)
        try:
            pages = _Pages(client)
            pages.ask("from labkit import run, show; import labkit.frontends.panel")
            kernel = psutil.Process(manager.provisioner.pid)
            before = kernel.memory_info().rss
            pages.ask(f"burst_ = show(run({str(script)!r}, nproc=4, device='cpu'))")
            answers, memory = [], []
            while pages.ask("print(burst_.folder.read_status().state)").strip() not in (
                "finished",
                "failed",
                "stopped",
            ):
                answers.append(pages.last_seconds * 1000)
                memory.append(kernel.memory_info().rss)
                time.sleep(0.02)
            lines = sum(
                path.read_bytes().count(b"\n") for path in Path(place).glob("runs/*/logs/*/attempt_0/*/stdout.log")
            )
            newest = pages.wait_for(f"writes line {_LINES - 1},")
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    grown = (max(memory) - before) / 1e6
    shown = "the page received the newest" if newest else "the page did NOT receive the newest"
    return [
        Result(
            "slowest kernel response during the burst",
            max(answers),
            "ms",
            "≤ 200 ms",
            tuple(answers),
            f"median {statistics.median(answers):.0f} ms",
        ),
        Result(
            "growth of the kernel's memory during the burst",
            grown,
            "MB",
            "≤ 100 MB",
            (grown,),
            f"{lines:,} of {4 * _LINES:,} lines are in the files; {shown}",
        ),
    ]


class _Pages:
    """A kernel client that behaves like a page, and stores the messages that the kernel sends to widgets."""

    def __init__(self, client) -> None:
        self._client = client
        self._sent: list[str] = []
        self.last_seconds = 0.0

    def ask(self, code: str) -> str:
        """Executes `code` and returns its printed output; stores the duration in `last_seconds`."""
        began, printed = time.perf_counter(), []
        request = self._client.execute(code, allow_stdin=True)
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            self._note(kind, content)
            if message["parent_header"].get("msg_id") != request:
                continue  # a widget message from another thread of the kernel
            if kind == "stream":
                printed.append(content["text"])
            elif kind == "error":
                raise RuntimeError(f"the kernel answered {content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                self.last_seconds = time.perf_counter() - began
                return "".join(printed)

    def wait_for(self, text: str, seconds: float = 20.0) -> bool:
        """Whether a widget receives `text` within `seconds`."""
        last = time.monotonic() + seconds
        while time.monotonic() < last:
            self.ask("None")
            if any(text in sent for sent in self._sent):
                return True
            time.sleep(0.1)
        return False

    def _note(self, kind: str, content: dict) -> None:
        if kind == "comm_open" and "_esm" in content["data"].get("state", {}):
            for word in ("pong", "ready"):  # the messages of a page that has rendered its charts and logs
                answer = {"method": "custom", "content": {"kind": word}}
                self._client.shell_channel.send(
                    self._client.session.msg("comm_msg", {"comm_id": content["comm_id"], "data": answer})
                )
        elif kind == "comm_msg":
            self._sent = [*self._sent[-50:], json.dumps(content.get("data"), default=str)]


# ---- long runs of 8 ranks × 100,000 steps and of 10,000,000 steps


_RECORDED_RANKS, _STEPS, _MOST = 8, 100_000, 10_000_000

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


def long_runs() -> list[Result]:
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
    name = f"{_RECORDED_RANKS} ranks × {_STEPS:,} steps"
    note = (
        f"reading and summary, including imports; the charts take another {statistics.median(drawn):.2f} s; "
        f"peak RSS {max(peaks):.0f} MB"
    )
    return [
        Result(f"{name}, on disk", size, "MB", "≤ 100 MB", (size,)),
        Result(f"{name}, opened", statistics.median(times), "s of CPU", "≤ 5 s", times, note),
        Result(
            f"{name}, labkit show",
            statistics.median(shown),
            "s",
            "≤ 5 s",
            tuple(shown),
            "wall-clock time of the command",
        ),
        Result(
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
    RunFolder.write_json(folder.spec, Spec("ddp", nproc=_RECORDED_RANKS, steps=_STEPS).to_json())
    seconds = {"step": 0.01, "data": 0.001, "forward": 0.003, "backward": 0.005, "optimizer": 0.001, "other": 0.0}
    began = time.time()
    RunFolder.write_json(folder.status, {"v": 1, "state": "finished", "started": began, "ended": began + _STEPS / 100})
    for rank in range(_RECORDED_RANKS):
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
    times = _MOST // (_RECORDED_RANKS * _STEPS)
    rest = (_MOST - times * _RECORDED_RANKS * _STEPS) // _RECORDED_RANKS
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


# ---- twenty clients that ask for the slots of one machine at the same moment


_CLIENTS = 20
_SLOTS = 4
_LIMIT = 300.0  # seconds in which all must have been served
# a run without ranks: it asks as a supervisor does, and writes when it asked, was in the queue, began and ended
_CLIENT = """
import sys, time
from pathlib import Path
from labkit.launch.leases import Lease
place, number = Path(sys.argv[1]), int(sys.argv[2])
(place / f"{number}.ready").touch()
while not (place / "go").exists():
    time.sleep(0.001)
lease = Lease(str(number), "cpu", 1 + number % 3, tuple("0123"), place / "leases")
times, taken = [time.time()], lease.take()
times.append(time.time())
while not taken:
    time.sleep(0.01)
    taken = lease.take()
time.sleep(0.05)
text = " ".join(map(str, (*times, lease.ticket.since, time.time(), *lease.ticket.granted)))
(place / f"{number}.half").write_text(text)
(place / f"{number}.half").rename(place / f"{number}.served")
lease.release()
"""


class _Served(NamedTuple):
    """When a client asked, was in the queue, began and ended, in Unix seconds; and its slots."""

    asked: float
    queued: float
    began: float
    ended: float
    slots: frozenset[str]


def clients() -> list[Result]:
    """20 clients that ask for 1 to 3 of 4 slots at once: served in order, none starves, no slot twice."""
    with tempfile.TemporaryDirectory() as folder:
        place, last = Path(folder), time.monotonic() + _LIMIT
        command = [sys.executable, "-c", _CLIENT, folder]
        processes = [subprocess.Popen([*command, str(number)]) for number in range(_CLIENTS)]
        try:
            while len(list(place.glob("*.ready"))) < _CLIENTS and time.monotonic() < last:
                time.sleep(0.01)
            (place / "go").touch()
            while any(process.poll() is None for process in processes) and time.monotonic() < last:
                time.sleep(0.01)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        served = [_served(path) for path in place.glob("*.served")]
    waits = tuple(sorted(one.began - one.asked for one in served))
    overtaken = sum(one.queued < other.asked and other.began < one.began for one, other in permutations(served, 2))
    twice = sum(
        bool(one.slots & other.slots) and one.began < other.ended and other.began < one.ended
        for one, other in combinations(served, 2)
    )
    note = f"{_CLIENTS} clients at once, each for 50 ms with 1 to 3 of {_SLOTS} slots"
    return [
        Result("clients that were not served", float(_CLIENTS - len(served)), "clients", "0", (), note),
        Result("clients that overtook an earlier one", float(overtaken), "pairs", "0", (), note),
        Result("slots that two clients had at once", float(twice), "pairs", "0", (), note),
        Result("longest wait", max(waits, default=None), "s", "", waits, note),
    ]


def _served(path: Path) -> _Served:
    asked, queued, began, ended, *slots = path.read_text(encoding="utf-8").split()
    return _Served(float(asked), float(queued), float(began), float(ended), frozenset(slots))


# ---- what a user waits for


# ---- import


def importing() -> list[Result]:
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
        Result(
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


def latency() -> list[Result]:
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
        Result("event to the panel's model, 95th percentile", quantiles[-1], "ms", "≤ 300 ms", (quantiles[-1],), note)
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


def opening() -> list[Result]:
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
        Result(
            f"opening {_RANKS} ranks × {_LONG:,} steps", statistics.median(opened), "s", "≤ 2 s", tuple(opened), note
        ),
        Result(
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
