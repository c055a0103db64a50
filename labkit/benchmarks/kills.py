"""The kill matrix: sends SIGKILL to one or two processes early in a run, and counts the processes that remain."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice, product
from pathlib import Path
from typing import NamedTuple

import psutil

from labkit.benchmarks.figure import Figure
from labkit.common.processes import TAG, is_supervisor, living, tagged
from labkit.launch import local
from labkit.launch.warm import client

ROUNDS = 20  # per moment; victims and kinds of start alternate
LIMIT = 5.0  # seconds after which no process of the run may remain
_APPEARS = 60.0  # seconds within which a process must have appeared
_POLL = 0.002
_STARTER = """
import sys, time
from labkit.runs.handle import run
run(sys.argv[1], nproc=2, device="cpu", detached=sys.argv[2] == "detached")
time.sleep(100)
"""
_SCRIPT = """
import time
time.sleep(100)
"""


class Moment(NamedTuple):
    """`after` seconds from the appearance of the run's `supervisor`, `agent` or first `rank`."""

    who: str
    after: float

    def __str__(self) -> str:
        return f"{self.after * 1000:.0f} ms after the {self.who} appeared"


class Attack(NamedTuple):
    """The processes to kill in order, the moment, and the kind of start: `bound` to its starter or `detached`, warm or
    cold.
    """

    victims: tuple[str, ...]
    moment: Moment
    start: str
    warm: bool


MOMENTS = (
    *(Moment("supervisor", seconds) for seconds in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)),
    *(Moment("agent", seconds) for seconds in (0.0, 0.01, 0.03)),
    *(Moment("rank", seconds) for seconds in (0.0, 0.01, 0.03, 0.1)),
)
VICTIMS = (
    ("supervisor",),
    ("supervisor", "starter"),
    ("starter", "supervisor"),
    ("agent", "supervisor"),
    ("supervisor", "agent"),
)


def kill_matrix(rounds: int = ROUNDS, moments: tuple[Moment, ...] = MOMENTS) -> list[Figure]:
    """Processes that remain after SIGKILL to the supervisor, alone or with its starter or agent, early in a run."""
    figures = []
    client.prepare()  # the first warm rounds start cold until the server is ready
    for moment in moments:
        ways = product(VICTIMS, ("detached", "bound"), (False, True))
        attacks = [Attack(victims, moment, start, warm) for victims, start, warm in ways]
        left = [float(attack(one)) for one in islice(cycle(attacks), rounds)]
        killed = ", ".join(" and ".join(victims) for victims in VICTIMS)
        note = f"in total, {LIMIT:g} s later; killed: {killed}; detached and not, warm and cold"
        figures.append(Figure(f"remaining after SIGKILL {moment}", sum(left), "processes", "0", tuple(left), note))
    return figures


def attack(one: Attack) -> int:
    """One round: starts a run, kills, and returns the number of processes that remain after `LIMIT` seconds. Cleans
    up."""
    with tempfile.TemporaryDirectory() as place, _starter(Path(place), one) as starter:
        root = str(Path(place, "runs"))
        _appeared(one.moment.who, starter, root)
        time.sleep(one.moment.after)
        victims = [_find(who, starter, root) for who in one.victims]
        for victim in victims:
            if victim is not None:
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
        return _left(root)


@contextmanager
def _starter(place: Path, one: Attack) -> Iterator[psutil.Process]:
    """A process that starts a run and keeps running; on exit it and all processes of the run are killed."""
    (place / "train.py").write_text(_SCRIPT)
    asked = {"LABKIT_RUNS": str(place / "runs"), client.FORCE_COLD: "" if one.warm else "1"}
    environment = local.standing_environment() | asked
    command = [sys.executable, "-c", _STARTER, str(place / "train.py"), one.start]
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()
        _clear(str(place / "runs"))


def _of(root: str) -> list[psutil.Process]:
    return tagged(lambda tag: tag.startswith(root))


def _find(who: str, starter: psutil.Process, root: str) -> psutil.Process | None:
    """A process of the run; None if it does not exist yet or any more."""
    if who == "starter":
        return living(starter.pid)
    return next(filter(_IS[who], _of(root)), None)


def _is_agent(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return not is_supervisor(process) and "RANK" not in process.environ()
    return False


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return {TAG, "RANK"} <= set(process.environ())
    return False


_IS: dict[str, Callable[[psutil.Process], bool]] = {"supervisor": is_supervisor, "agent": _is_agent, "rank": _is_rank}


def _appeared(who: str, starter: psutil.Process, root: str) -> None:
    last = time.monotonic() + _APPEARS
    while _find(who, starter, root) is None:
        if time.monotonic() > last:
            raise RuntimeError(f"no {who} appeared within {_APPEARS:g} s")
        time.sleep(_POLL)


def _left(root: str) -> int:
    last = time.monotonic() + LIMIT
    while time.monotonic() < last:
        if not _of(root):
            time.sleep(0.1)  # a process that was just starting is found by the second check
            if not _of(root):
                return 0
        time.sleep(0.05)
    return len(_of(root))


def _clear(root: str) -> None:
    while left := _of(root):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
