"""Measures how long collectives take between ranks of this machine, and the FLOP/s of its cores, for `labkit doctor
--calibrate`.

The ranks run `probe/link_times.py`, as the launcher would start them: on loopback only, one thread each, and killed
when this process dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import structs

from labkit.analysis.metrics import median
from labkit.common.arguments import Number
from labkit.common.text import last_line
from labkit.common.units import size
from labkit.launch.local import standing_environment
from labkit.prediction.links import LinkTable, Point
from labkit.probe.lifetime import PARENT, identity
from labkit.setup import preflight
from labkit.setup.machine import Machine

SIZES = tuple(4**power for power in range(5, 14))  # bytes: 1 KiB to 64 MiB
SECONDS = 22.0  # for which the ranks measure, if one round takes less; their start takes some seconds more
_LIMIT = 300.0  # seconds for everything; two ranks take less than 30
_POLL_INTERVAL = 0.05  # seconds
_RANKS = ("-m", "labkit.probe.link_times")


class CalibrationError(RuntimeError):
    """Nothing was measured; the message is one sentence with the reason."""


def plan(nproc: int | None = None) -> LinkTable:
    """What would be measured, without points: the backend and the number of ranks (default: all GPUs, or 2 CPU ranks).

    GPUs are used over NCCL if there is one for each rank. Raises `ValueError` for an impossible number of ranks.
    """
    machine = Machine.here()
    gpus = len(machine.gpus) if len(machine.gpus) > 1 and _has_nccl() else 0
    default = machine.default_nproc("cuda" if gpus else "cpu")
    most = max(gpus, machine.max_cpu_ranks)
    ranks = default if nproc is None else Number(int, 2, most).check("nproc", nproc)
    return LinkTable(
        machine=machine.hardware,
        torch=machine.torch_version,
        backend="nccl" if ranks <= gpus else "gloo",
        ranks=ranks,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        points={},
        missing={},
    )


def _has_nccl() -> bool:
    found = preflight.torch()
    return found.available and found.nccl


def calibrate(
    planned: LinkTable,
    report: Callable[[str], None] = lambda text: None,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
) -> LinkTable:
    """Starts the ranks of a plan and measures every operation on each of `sizes` (bytes), and on CPUs the fastest of
    several matrix products, in as many rounds as fit into `seconds`, at least one.

    `report` is called with what was measured last. No process is left when it returns or raises. Raises
    `CalibrationError` if the ranks fail.
    """
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    late: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    missing: dict[str, str] = {}
    flops: dict[str, list[float]] = defaultdict(list)
    kernels: dict[str, list[float]] = defaultdict(list)
    with closing(_lines(planned, [f"{seconds:g}", *map(str, sizes)])) as lines:
        for line in lines:
            if "precision" in line:
                flops[line["precision"]] += line["flops"]
                report(f"round {line['round']}: matrix products, {line['precision']}")
                continue
            if "kernels" in line:
                for name, values in line["kernels"].items():
                    kernels[name] += values
                continue
            operation = line["operation"]
            if "reason" in line:
                missing[operation] = line["reason"][:200]
                continue
            found[operation][line["size"]] += line["seconds"]
            late[operation][line["size"]] += zip(line["after_computing"], line["computed"])
            report(f"round {line['round']}: {operation}, {size(line['size'])}")
    points = {
        operation: tuple(
            _point(count, durations, late[operation][count]) for count, durations in sorted(by_size.items())
        )
        for operation, by_size in found.items()
        if operation not in missing
    }
    peaks = {precision: max(rates) for precision, rates in flops.items()}
    choose = {"copies": max, "launch": min, "slowdown": median}
    best = {name: choose[name](values) for name, values in kernels.items()}
    return structs.replace(planned, points=points, missing=missing, peaks=peaks, kernels=best)


def _point(count: int, seconds: list[float], late: list[tuple[float, float]]) -> Point:
    ordered, half = sorted(seconds), (len(seconds) + 1) // 2
    low, middle, high = median(ordered[:half]), median(ordered), median(ordered[-half:])
    after, computed = zip(*sorted(late)) if late else ((), ())
    return Point(count, middle, low, high, len(ordered), after, computed)


def _lines(planned: LinkTable, arguments: list[str]) -> Generator[dict[str, Any], None, None]:
    """The lines that rank 0 prints, while the ranks run."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as place:
        folder = Path(place)
        ranks: list[subprocess.Popen[bytes]] = []
        deadline, seen = time.monotonic() + _LIMIT, 0
        try:
            ranks += (_start(folder, rank, planned, arguments) for rank in range(planned.ranks))
            running = True
            while running:
                running = None in [rank.poll() for rank in ranks]
                whole = (folder / "0.out").read_bytes().splitlines(keepends=True)
                complete = [line for line in whole if line.endswith(b"\n")]
                yield from map(json.loads, complete[seen:])
                seen = len(complete)
                _check(ranks, folder, deadline)
                if running:
                    time.sleep(_POLL_INTERVAL)
        except OSError as error:
            raise CalibrationError(f"the ranks could not be started: {error}") from None
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()


def _start(folder: Path, rank: int, planned: LinkTable, arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = standing_environment() | preflight.LOOPBACK
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(planned.ranks)}
    environment |= {PARENT: identity(os.getpid())} if sys.platform == "linux" else {}
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # do not import a random.py from the working folder
    argv = [sys.executable, *safe, *_RANKS, str(folder / "store"), planned.backend, *arguments]
    with open(folder / f"{rank}.out", "wb") as output, open(folder / f"{rank}.err", "wb") as errors:
        return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)


def _check(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Raises `CalibrationError` if a rank has failed, or if they take too long."""
    for number, rank in enumerate(ranks):
        if rank.returncode:
            text = (folder / f"{number}.err").read_text(encoding="utf-8", errors="replace")
            why = last_line(text) or f"exit code {rank.returncode}"
            raise CalibrationError(f"communication could not be measured: rank {number} failed ({why})")
    if time.monotonic() > deadline:
        raise CalibrationError(f"communication could not be measured: the ranks took more than {_LIMIT:g} s")
