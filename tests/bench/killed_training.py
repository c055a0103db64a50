"""The kill matrix of a training run: sends SIGKILL to one or two of its processes at a known moment, and reports what
is left, whether the run says how it ended, and whether a checkpoint is lost."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.kill_rounds import MOMENTS, Attack, Outcome, Round, Rounds, figures, matrix, next_attack
from bench.kills import LIMIT, NotReached, appeared, find, left, of_root, role, starter_of
from bench.results import Result
from labkit.common.files import runtime_folder
from labkit.frontends.console import Console
from labkit.launch.warm import client
from labkit.plan import checkpoints
from labkit.record.events import Checkpoint
from labkit.record.folder import RunFolder
from labkit.record.follow import current_status
from labkit.record.state import OVER
from labkit.runs.handle import Run

STEPS = 40
ROUNDS = 4  # per moment, if neither rounds nor minutes are given
_ASKED: dict[str, Any] = {
    **{"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 32, "samples": 64 * STEPS, "save_every": 3},
    "options": {"workers": 1},  # which send batches through shared memory
}
_SHARED = Path("/dev/shm")
_POLL = 0.002  # seconds between two looks at the run
_MOST = 120.0  # seconds within which a moment must have come, and within which a run that goes on must end


def _printed(text: str) -> Callable[[RunFolder], bool]:
    return lambda folder: text in Run.attach(folder.path).logs(0)


_REACHED: dict[str, Callable[[RunFolder], bool]] = {
    "start": lambda folder: True,  # as soon as the victims exist
    "first step": _printed("step 1: loss"),
    "training": _printed("step 16: loss"),
    "checkpoint": lambda folder: (  # not the first one
        (folder.checkpoints / "unfinished").exists() and any(folder.checkpoints.glob("step*"))
    ),
    "evaluation": _printed(f"step {STEPS}: loss"),
    "end": _printed("epoch 1: accuracy"),
}


def training_kills(rounds: int | None = None, minutes: float | None = None, results: str | None = None) -> list[Result]:
    """SIGKILL to the processes of a training run, singly and in pairs, from its start to its end: what it leaves.

    Continues the rounds in the file `results` until there are `rounds` per moment, or for `minutes`.
    """
    found = Rounds(results)
    most = None if rounds is None and minutes is not None else (rounds or ROUNDS) * len(MOMENTS)
    last = None if minutes is None else time.monotonic() + 60 * minutes
    with _own_server():
        while (most is None or len(found.all) < most) and (last is None or time.monotonic() < last):
            found.add(_round(next_attack(found.all)))
    Console(stderr=True).print(matrix(found.all))
    return figures(found.all)


def _round(one: Attack) -> Round:
    try:
        return Round(one, attack(one))
    except NotReached as error:
        return Round(one, None, str(error))


def attack(one: Attack) -> Outcome:
    """One round; cleans up. Raises `NotReached` if the attack did not take place."""
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
            while not _REACHED[one.moment](folder) and find("supervisor", starter, root):
                if time.monotonic() > last:
                    raise NotReached(f"{one.moment} was not reached within {_MOST:g} s")
                time.sleep(_POLL)
            _kill(one, starter, root, server)
            if one.goes_on:
                _wait(lambda: not of_root(root))
            processes = tuple(map(role, left(root)))
            _wait(lambda: not (_segments() - shared or _ports() - ports or _temporary(place)), LIMIT)
            lost, checked = _checkpoints(folder)
            return Outcome(
                processes=processes,
                ports=len(_ports() - ports),
                shared=len(_segments() - shared),
                files=_temporary(place),
                wrong=_wrong(one, folder),
                lost=lost,
                checked=checked,
                warm=folder.read_launch().start == "warm",
            )


def _kill(one: Attack, starter: psutil.Process, root: str, server: psutil.Process | None) -> None:
    """Kills the victims. Raises `NotReached` if one of them has already ended."""
    victims = {who: server if who == "server" else find(who, starter, root) for who in one.victims}
    for who, victim in victims.items():
        try:
            if victim is None:
                raise NotReached(f"{who} had ended at {one.moment}")
            victim.kill()
        except psutil.NoSuchProcess:
            raise NotReached(f"{who} had ended at {one.moment}") from None


def _wrong(one: Attack, folder: RunFolder) -> str:
    """The state of the run, if it is a wrong one, otherwise empty. A run that was attacked after its last step may have
    finished before the kill."""
    state = current_status(folder).state
    if one.goes_on:
        return "" if state == "finished" else state or "no state"
    late = one.moment in ("evaluation", "end")
    return "" if state in OVER and (late or state != "finished") else state or "no state"


def _checkpoints(folder: RunFolder) -> tuple[int, int]:
    """How many checkpoints are lost, of those that the run has reported as written, and how many were verified."""
    steps = {
        event.step
        for rank in folder.event_files().values()
        for event in folder.reader(rank).poll()
        if isinstance(event, Checkpoint)
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


def _temporary(place: Path) -> tuple[str, ...]:
    """Temporary files of the run, each by the first word of its name, and folders for sockets. Those of the warm server
    stay while it lives."""
    found = [path.name.partition("-")[0] for path in (place / "tmp").iterdir()]
    return (*found, *("sockets" for path in runtime_folder().glob("*") if path.is_dir()))


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
        raise NotReached(f"the warm server was not ready within {_MOST:g} s")
    return psutil.Process(found["pid"])
