"""Twenty clients that ask for the slots of one machine at the same moment: the order in which they are served."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from itertools import combinations, permutations
from pathlib import Path
from typing import NamedTuple

from labkit.benchmarks.figure import Figure

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


def clients() -> list[Figure]:
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
        Figure("clients that were not served", float(_CLIENTS - len(served)), "clients", "0", (), note),
        Figure("clients that overtook an earlier one", float(overtaken), "pairs", "0", (), note),
        Figure("slots that two clients had at once", float(twice), "pairs", "0", (), note),
        Figure("longest wait", max(waits, default=None), "s", "", waits, note),
    ]


def _served(path: Path) -> _Served:
    asked, queued, began, ended, *slots = path.read_text(encoding="utf-8").split()
    return _Served(float(asked), float(queued), float(began), float(ended), frozenset(slots))
