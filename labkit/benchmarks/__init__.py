"""The project's own performance figures, each measured side by side in one run: `labkit bench`.

These figures depend on the machine and on what else it does, so nothing here passes or fails: every line says what was measured,
how often, and the aim. Ratios come from pairs that take turns (A B, B A, …), so that a machine that slows down slows both.
What a step costs is told in CPU time too, which hears little of what else runs.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict

from rich.table import Column, Table

from labkit.benchmarks.faces import burst, importing, latency, opening
from labkit.benchmarks.figure import Figure
from labkit.benchmarks.fuzz import hostile
from labkit.benchmarks.kills import kill_matrix
from labkit.benchmarks.runs import beside_traceml, one_server, overhead, profiled, scaling, warm_starts, written_out
from labkit.benchmarks.scale import long_runs
from labkit.common.units import size
from labkit.frontends.console import Console
from labkit.setup.machine import Machine
from labkit.setup.progress import Progress

__all__ = ["BENCHES", "main"]

BENCHES: tuple[Callable[[], list[Figure]], ...] = (
    importing,
    latency,
    opening,
    long_runs,
    burst,
    overhead,
    warm_starts,
    one_server,
    profiled,
    beside_traceml,
    written_out,
    scaling,
    kill_matrix,
    hostile,
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
    on = f"{machine.cores} cores, {size(machine.memory, 0)}, {len(machine.gpus)} GPUs; load {os.getloadavg()[0]:.1f} at the end"
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
