"""The time of a step: what each rank computes, measured on this machine, and collectives as measured between its ranks,
put together by `simulation`.

What was measured is cached until collectives are measured again (`labkit doctor --calibrate`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from labkit.analysis.metrics import throughput_of_median_steps
from labkit.common.atomic import write_atomically
from labkit.plan.spec import Spec
from labkit.prediction.classes import classes
from labkit.prediction.devices import HERE
from labkit.prediction.link_table import folder as link_tables
from labkit.prediction.links import communication
from labkit.prediction.predict import cache_folder, keep
from labkit.prediction.simulation import program_of, simulate
from labkit.prediction.tracer import computed, never
from labkit.record.files import read_below
from labkit.record.plain import parse
from labkit.record.types.prediction import Plan, PredictedTimeline
from labkit.setup.machine import Machine

Items = Sequence[Sequence[Any]]

# The script that is measured trains only, for more steps than are needed.
_MEASURED: dict[str, Any] = {
    **dict.fromkeys(("epochs", "save_every", "resume", "fault")),
    "steps": 100,
    "max_restarts": 0,
}
_MOST = 8  # ranks that are all simulated
_FILE, _LIMIT = "programs.json", 16 << 20  # bytes


def timed(spec: Spec, plan: Plan, cancelled: Callable[[], bool] = never) -> Plan:
    """The plan of a Spec of CPU ranks with the time of a step on this machine. It takes seconds, unless it is cached.

    Raises `LookupError` for GPUs, or if collectives have not been measured here, `TraceFailed` if a rank cannot be
    measured, and `Cancelled` soon after `cancelled` returns true.
    """
    if spec.strategy is None:
        raise LookupError("the time of a step can be predicted for a strategy's script only")
    if spec.device == "cuda":
        raise LookupError("the time of a step can be predicted for CPU ranks only; use device='cpu'")
    links = communication(HERE) if spec.processes > 1 else None
    groups, machine = classes(spec), Machine.here()
    like = {rank: ranks[0] for ranks in groups for rank in ranks}
    firsts = [ranks[0] for ranks in groups]
    programs = {rank: program_of(items) for rank, items in _programs(spec, firsts, machine, cancelled).items()}
    if spec.processes <= _MOST:
        programs = {rank: programs[first] for rank, first in like.items()}
        like = {rank: rank for rank in like}
    found = simulate(programs, like, links, machine.cores)
    steps = {ranks[0]: max((found[rank] for rank in ranks if rank in found), key=_seconds) for ranks in groups}
    slowest = max(steps.values(), key=_seconds)
    timed_plan: Plan = {
        **plan,
        "classes": [{**part, "timeline": steps[part["ranks"][0]]} for part in plan["classes"]],
        "time": {
            "seconds": slowest["seconds"],
            "low": slowest["low"],
            "high": slowest["high"],
            "samples_per_second": throughput_of_median_steps(spec.global_batch, [slowest["seconds"]]) or 0.0,
            "links": links.title if links else "",
        },
    }
    keep(spec, timed_plan)
    return timed_plan


def _seconds(timeline: PredictedTimeline) -> float:
    return timeline["seconds"]


def _programs(spec: Spec, ranks: Sequence[int], machine: Machine, cancelled: Callable[[], bool]) -> Mapping[int, Items]:
    """The programs of some ranks, measured now or before."""
    state = [machine.hardware, *sorted(path.stat().st_mtime_ns for path in link_tables().glob("*.json"))]
    place = cache_folder(spec) / _FILE
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = parse(read_below(place.parent, place, _LIMIT))
        if known["state"] == state:
            return {int(rank): items for rank, items in known["programs"].items()}
    together = max(min(spec.processes, machine.cores), len(ranks))
    repeated = [ranks[index % len(ranks)] for index in range(together)]
    found = computed(replace(spec, **_MEASURED), repeated, cancelled)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(place, json.dumps({"state": state, "programs": found}), private=True)
    return found
