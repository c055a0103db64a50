"""The kill matrix of early moments: sends SIGKILL to one or two processes of a run that starts, and counts those that
remain. `killed_training.py` has the matrix of a run that trains."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.results import Result
from labkit.common.processes import TAG, is_supervisor, is_watchdog, living, tagged
from labkit.launch import local
from labkit.launch.warm import client

ROUNDS = 20  # per moment; victims and kinds of start alternate
LIMIT = 5.0  # seconds after which no process of the run may remain
_APPEARS = 60.0  # seconds within which a process must have appeared
_POLL = 0.002
_STARTER = """
import json, sys, time
from labkit.runs.handle import run
run(sys.argv[1], **json.loads(sys.argv[2]))
time.sleep(100)
"""
_SCRIPT = """
import time
time.sleep(100)
"""


class NotReached(RuntimeError):
    """An attack did not take place; the message is one clause with the reason."""


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


def kill_matrix(rounds: int = ROUNDS, moments: tuple[Moment, ...] = MOMENTS) -> list[Result]:
    """Processes that remain after SIGKILL to the supervisor, alone or with its starter or agent, early in a run."""
    figures = []
    client.prepare()  # the first warm rounds start cold until the server is ready
    for moment in moments:
        ways = product(VICTIMS, ("detached", "bound"), (False, True))
        attacks = [Attack(victims, moment, start, warm) for victims, start, warm in ways]
        left = [float(attack(one)) for one in islice(cycle(attacks), rounds)]
        killed = ", ".join(" and ".join(victims) for victims in VICTIMS)
        note = f"in total, {LIMIT:g} s later; killed: {killed}; detached and not, warm and cold"
        figures.append(Result(f"remaining after SIGKILL {moment}", sum(left), "processes", "0", tuple(left), note))
    return figures


def attack(one: Attack) -> int:
    """One round: starts a run, kills, and returns the number of processes that remain after `LIMIT` seconds. Cleans
    up."""
    with tempfile.TemporaryDirectory() as name:
        place, fields = Path(name), {"nproc": 2, "device": "cpu", "detached": one.start == "detached"}
        (place / "train.py").write_text(_SCRIPT)
        with starter_of(place, str(place / "train.py"), fields, one.warm) as starter:
            return len(_struck(one, starter, str(place / "runs")))


def _struck(one: Attack, starter: psutil.Process, root: str) -> list[psutil.Process]:
    appeared(one.moment.who, starter, root)
    time.sleep(one.moment.after)
    victims = [find(who, starter, root) for who in one.victims]
    for victim in victims:
        if victim is not None:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
    return left(root)


@contextmanager
def starter_of(place: Path, what: str, fields: dict[str, Any], warm: bool) -> Iterator[psutil.Process]:
    """A process that starts a run in `place` and keeps running, with a folder for temporary files; on exit it and all
    processes of the run are killed. `what` and `fields` are arguments of `run`."""
    (place / "tmp").mkdir()
    asked = {"LABKIT_RUNS": str(place / "runs"), "TMPDIR": str(place / "tmp"), client.FORCE_COLD: "" if warm else "1"}
    asked["TORCHINDUCTOR_CACHE_DIR"] = str(place / "cache")  # a cache, which is there to stay
    environment = local.standing_environment() | asked
    command = [sys.executable, "-c", _STARTER, what, json.dumps(fields)]
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()
        _clear(str(place / "runs"))


def of_root(root: str) -> list[psutil.Process]:
    """The processes of the runs below a folder."""
    return tagged(lambda tag: tag.startswith(root))


def find(who: str, starter: psutil.Process, root: str) -> psutil.Process | None:
    """A process of the run; None if it does not exist yet or any more."""
    if who == "starter":
        return living(starter.pid)
    return next(filter(_IS[who], of_root(root)), None)  # a rank precedes the processes that it starts


def _is_agent(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return not (is_supervisor(process) or is_watchdog(process) or "RANK" in process.environ())
    return False


def _is_rank(process: psutil.Process, number: str = "") -> bool:
    with suppress(psutil.Error):
        environment = process.environ()
        return TAG in environment and "RANK" in environment and number in ("", environment["RANK"])
    return False


_IS: dict[str, Callable[[psutil.Process], bool]] = {
    **{"supervisor": is_supervisor, "watchdog": is_watchdog, "agent": _is_agent, "rank": _is_rank},
    **{"rank 0": partial(_is_rank, number="0"), "rank 1": partial(_is_rank, number="1")},
}


def appeared(who: str, starter: psutil.Process, root: str) -> None:
    """Returns as soon as a process of the run exists."""
    last = time.monotonic() + _APPEARS
    while find(who, starter, root) is None:
        if time.monotonic() > last:
            raise NotReached(f"no {who} appeared within {_APPEARS:g} s")
        time.sleep(_POLL)


def role(process: psutil.Process) -> str:
    """What a process is in its run."""
    return next((who for who, matches in reversed(_IS.items()) if matches(process)), "process")


def left(root: str) -> list[psutil.Process]:
    """The processes that remain after `LIMIT` seconds."""
    last = time.monotonic() + LIMIT
    while time.monotonic() < last:
        if not of_root(root):
            time.sleep(0.1)  # a process that was just starting is found by the second check
            if not of_root(root):
                return []
        time.sleep(0.05)
    return of_root(root)


def _clear(root: str) -> None:
    while alive := of_root(root):
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)
