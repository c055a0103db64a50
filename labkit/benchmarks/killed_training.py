"""The kill matrix of a training run: sends SIGKILL to one or two of its processes at a known moment, and reports what
is left, whether the run says how it ended, and whether a checkpoint is lost."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations, cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from labkit.benchmarks.figure import Figure
from labkit.benchmarks.kills import LIMIT, appeared, find, left, of_root, starter_of
from labkit.launch.warm import client
from labkit.plan import checkpoints
from labkit.record.folder import RunFolder
from labkit.record.state import OVER
from labkit.record.status import current
from labkit.runs.handle import Run

STRATEGIES = ("ddp", "fsdp2")
STEPS = 40
ROUNDS = 4  # per moment; strategies, victims and kinds of start in random order
WHO = ("starter", "supervisor", "agent", "server", "rank 0", "rank 1")
VICTIMS = (*((one,) for one in WHO), *combinations(WHO, 2))
_ASKED: dict[str, Any] = {
    **{"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 32, "samples": 64 * STEPS, "save_every": 3},
    "options": {"workers": 1},  # which send batches through shared memory
}
_SHARED = Path("/dev/shm")
_POLL = 0.002  # seconds between two looks at the run
_MOST = 120.0  # seconds within which a moment must have come, and within which a run that goes on must end


def _printed(text: str) -> Callable[[RunFolder], bool]:
    return lambda folder: text in Run.attach(folder.path).logs(0)


MOMENTS: dict[str, Callable[[RunFolder], bool]] = {
    "start": lambda folder: True,  # as soon as the victims exist
    "first step": _printed("step 1: loss"),
    "training": _printed("step 16: loss"),
    "checkpoint": lambda folder: (  # not the first one
        (folder.checkpoints / "unfinished").exists() and any(folder.checkpoints.glob("step*"))
    ),
    "evaluation": _printed(f"step {STEPS}: loss"),
    "end": _printed("epoch 1: accuracy"),
}


class Attack(NamedTuple):
    """A run to start, the processes of it to kill, in this order, and the moment."""

    strategy: str
    victims: tuple[str, ...]
    moment: str
    detached: bool
    warm: bool

    @property
    def goes_on(self) -> bool:
        """Whether the run must finish: it needs neither the warm server, nor its starter if it is detached."""
        return set(self.victims) <= {"server", *(["starter"] if self.detached else [])}


class Outcome(NamedTuple):
    """What was found `LIMIT` seconds after the kill, or after the end of a run that goes on."""

    processes: int
    ports: int
    shared: int
    files: tuple[str, ...]  # the first words of their names
    wrong: str
    lost: int
    checked: int
    warm: bool


def training_kills(rounds: int = ROUNDS) -> list[Figure]:
    """SIGKILL to the processes of a training run, singly and in pairs, from its start to its end: what it leaves."""
    found: list[tuple[Attack, Outcome]] = []
    with _own_server():
        for moment in MOMENTS:
            ways = [*product(STRATEGIES, VICTIMS, [moment], (False, True), (False, True))]
            random.Random(moment).shuffle(ways)
            attacks = [Attack(*way) for way in islice(cycle(ways), rounds)]
            found += [(one, attack(one)) for one in attacks]
    return [*_left_behind(found, rounds), *_states(found)]


def _left_behind(found: list[tuple[Attack, Outcome]], rounds: int) -> list[Figure]:
    note = f"{rounds} rounds at each moment: {', '.join(MOMENTS)}; killed: {', '.join(WHO)}, singly and in pairs"
    names = sorted({name for _, outcome in found for name in outcome.files})
    counts = {
        "processes": ([outcome.processes for _, outcome in found], note),
        "listening ports": ([outcome.ports for _, outcome in found], ""),
        "segments of shared memory": ([outcome.shared for _, outcome in found], ""),
        "temporary files": ([len(outcome.files) for _, outcome in found], ", ".join(names)),
    }
    return [
        Figure(f"{what} left by SIGKILL in training", sum(each), "in total", "0", tuple(map(float, each)), words)
        for what, (each, words) in counts.items()
    ]


def _states(found: list[tuple[Attack, Outcome]]) -> list[Figure]:
    lost = tuple(float(outcome.lost) for _, outcome in found)
    wrong = tuple(float(bool(outcome.wrong)) for _, outcome in found)
    which = [f"{' and '.join(one.victims)} at {one.moment}: {outcome.wrong}" for one, outcome in found if outcome.wrong]
    cold = tuple(float(not outcome.warm) for one, outcome in found if one.warm)
    verified = f"of {sum(outcome.checked for _, outcome in found)} that the runs had reported as written"
    return [
        Figure("checkpoints lost by SIGKILL in training", sum(lost), "in total", "0", lost, verified),
        Figure("runs in a wrong state after it", sum(wrong), "in total", "0", wrong, "; ".join(which)),
        Figure("of its rounds with a warm server, those that started cold", sum(cold), "in total", "0", cold),
    ]


def attack(one: Attack) -> Outcome:
    """One round; cleans up."""
    server = _server() if one.warm or "server" in one.victims else None
    shared, ports = _segments(), _ports()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        asked = {**_ASKED, "steps": STEPS, "detached": one.detached}
        with starter_of(place, one.strategy, asked, one.warm) as starter:
            root = str(place / "runs")
            for who in ("supervisor", *one.victims):
                if who != "server":
                    appeared(who, starter, root)
            folder = RunFolder(next((place / "runs").iterdir()))
            last = time.monotonic() + _MOST
            while not MOMENTS[one.moment](folder) and find("supervisor", starter, root):
                if time.monotonic() > last:
                    raise RuntimeError(f"{one.moment} was not reached within {_MOST:g} s")
                time.sleep(_POLL)
            for who in one.victims:
                victim = server if who == "server" else find(who, starter, root)
                if victim is not None:
                    with suppress(psutil.NoSuchProcess):
                        victim.kill()
            if one.goes_on:
                _wait(lambda: not of_root(root))
            processes = left(root)
            _wait(lambda: not _segments() - shared and not _ports() - ports, LIMIT)
            lost, checked = _checkpoints(folder)
            return Outcome(
                processes=processes,
                ports=len(_ports() - ports),
                shared=len(_segments() - shared),
                files=tuple(path.name.partition("-")[0] for path in (place / "tmp").iterdir()),
                wrong=_wrong(one, folder),
                lost=lost,
                checked=checked,
                warm=RunFolder.read_json(folder.plan).get("start") == "warm",
            )


def _wrong(one: Attack, folder: RunFolder) -> str:
    """The state of the run, if it is a wrong one, otherwise empty. A run that was attacked after its last step may have
    finished before the kill."""
    state = current(folder).get("state", "")
    if one.goes_on:
        return "" if state == "finished" else state or "no state"
    late = one.moment in ("evaluation", "end")
    return "" if state in OVER and (late or state != "finished") else state or "no state"


def _checkpoints(folder: RunFolder) -> tuple[int, int]:
    """How many checkpoints are lost, of those that the run has reported as written, and how many were verified."""
    steps = {
        event["step"]
        for rank in folder.event_files().values()
        for event in folder.reader(rank).poll()
        if event["kind"] == "checkpoint"
    }
    lost = 0
    for step in steps:
        try:
            lost += bool(checkpoints.damage(checkpoints.read(folder.checkpoints / f"step{step:08}")))
        except checkpoints.CheckpointError:
            lost += 1
    return lost, len(steps)


# ---- what a process can leave behind


def _segments() -> set[str]:
    """Files of shared memory of this user that no living process has mapped."""
    found = {path.name for path in _SHARED.glob("*") if path.lstat().st_uid == os.getuid()}
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):
            text = maps.read_text()
            found -= {name for name in found if f"{_SHARED}/{name}" in text}
    return found


def _ports() -> set[int]:
    """Listening ports without a living process."""
    return {each.laddr.port for each in psutil.net_connections("inet") if each.status == "LISTEN" and not each.pid}


def _wait(reached: Callable[[], bool], most: float = _MOST) -> None:
    last = time.monotonic() + most
    while not reached() and time.monotonic() < last:
        time.sleep(0.05)


# ---- a warm server of its own


@contextmanager
def _own_server() -> Iterator[None]:
    """Warm starts from a server that only this benchmark uses, because it is killed."""
    before, place = os.environ.get("XDG_RUNTIME_DIR"), tempfile.mkdtemp(prefix="labkit-")  # a short path, for a socket
    os.environ["XDG_RUNTIME_DIR"] = place
    try:
        yield
    finally:
        found = client.about()
        if isinstance(found, dict):
            psutil.Process(found["pid"]).kill()
        del os.environ["XDG_RUNTIME_DIR"]
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(place)


def _server() -> psutil.Process:
    """The server, started again if the round before killed it."""
    client.prepare()
    _wait(lambda: isinstance(client.about(), dict))
    found = client.about()
    if not isinstance(found, dict):
        raise RuntimeError(f"the warm server was not ready within {_MOST:g} s")
    return psutil.Process(found["pid"])
