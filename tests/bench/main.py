"""The project's performance figures, measured in paired runs: `labkit bench`.

The figures depend on the machine and its load, so nothing here passes or fails: every line shows what was measured, how
often, and the target. Ratios come from alternating pairs (A B, B A, …), so that a slower machine slows both sides. The
cost of a step is also measured in CPU time, which depends little on other load.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from bench import page, results
from bench.fuzz import hostile
from bench.killed_training import training_kills
from bench.kills import kill_matrix
from bench.long_run import memory_growth, memory_growth_control
from bench.panel import panel
from bench.predictions import predictions, ranges
from bench.responsiveness import burst, clients, importing, latency, long_runs, opening
from bench.results import Result
from bench.runs import generated_scripts, looks, one_server, overhead, profiled, scaling, traceml, warm_starts
from labkit.common.arguments import check_choice
from labkit.common.units import size
from labkit.frontends.console import Console
from labkit.setup.machine import Machine
from labkit.setup.progress import Progress

__all__ = ["BENCHES", "main"]

BENCHES: tuple[Callable[..., list[Result]], ...] = (
    importing,
    latency,
    panel,
    opening,
    long_runs,
    burst,
    overhead,
    looks,
    warm_starts,
    one_server,
    profiled,
    traceml,
    generated_scripts,
    scaling,
    predictions,
    ranges,
    kill_matrix,
    training_kills,
    clients,
    hostile,
    memory_growth,
    memory_growth_control,
)


def main(as_json: bool = False, only: str | None = None, save: bool = False, **given: Any) -> int:
    """Runs every benchmark, or `only` the one of this name, and prints its figures as a table or as one JSON object.
    With `save` they replace the saved ones, and the page of measurements is written anew. `given` are arguments of
    benchmarks: each takes those that it has (None: its default). Raises `ValueError` for an unknown name, and for an
    argument that none takes."""
    names = {bench.__name__: bench for bench in BENCHES}
    chosen = BENCHES if only is None else (names[check_choice("only", only, tuple(names))],)
    takes = {bench: inspect.signature(bench).parameters for bench in chosen}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if not any(name in known for known in takes.values()):
            raise ValueError(f"--{name} does not apply to the benchmark {only}: leave it out")
    if "results" in given:
        if only is None:
            raise ValueError("--results is for one benchmark: add --only training_kills or --only memory_growth")
        results.check(given["results"])
    began, figures = time.time(), []
    with tempfile.TemporaryDirectory() as runs, Progress() as progress:
        os.environ["LABKIT_RUNS"] = runs
        for bench in chosen:
            progress.step(" ".join(bench.__doc__.split()))
            measured = bench(**{name: value for name, value in given.items() if name in takes[bench]})
            figures += measured
            if save:
                page.save(bench, measured, _machine(), time.strftime("%Y-%m-%d"))
    if save:
        page.write([bench.__name__ for bench in BENCHES])
    on = _machine()
    if as_json:
        print(
            json.dumps(
                {
                    "machine": on,
                    "seconds": round(time.time() - began),
                    "figures": [asdict(figure) for figure in figures],
                }
            )
        )
        return 0
    table = Table("figure", "median", "min to max", "target", Column("note", overflow="fold"), title=on)
    for figure in figures:
        spread = f"{min(figure.each):.3g} to {max(figure.each):.3g} of {len(figure.each)}" if figure.each else ""
        median = "" if figure.median is None else f"{figure.median:.3g} {figure.unit}"
        table.add_row(figure.name, median, spread, figure.aim, figure.note)
    Console().print(table)
    return 0


def _machine() -> str:
    machine = Machine.here()
    what = f"{machine.cores} cores, {size(machine.memory, 0)}, {len(machine.gpus)} GPUs"
    return f"{what}; load {os.getloadavg()[0]:.1f} at the end"
