"""The time of a step: what each rank computes by the roofline, and its collectives, put together by simulation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from labkit.analysis.metrics import throughput_of_median_steps
from labkit.common.files import write_atomically
from labkit.plan.spec import Spec
from labkit.prediction.devices import HERE, Accelerator, Device
from labkit.prediction.fitting import kernels_of
from labkit.prediction.links import CommunicationModel, LinkTable, communication, tables_folder
from labkit.prediction.predict import Programs, cache_folder, cause, keep, made, on, programs
from labkit.prediction.simulation import STEPS, moved, program_of, simulate
from labkit.prediction.tracer import TraceFailed, classes, computed, never
from labkit.record.documents import Plan, PredictedTime, PredictedTimeline
from labkit.record.events import parse
from labkit.record.files import read_below
from labkit.setup.machine import Machine

# ---- kernels, by the roofline model (Williams, Waterman and Patterson 2009)


EDGE = 100.0  # elements, fitted to published runs (labkit/MEASUREMENTS.md)
_WIDTHS = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # bytes of an element by type
WITH_TENSOR_CORES = {"tf32": {"fp32": "tf32"}}  # by precision, types whose matrix products have the peak of another


@dataclass(frozen=True)
class Roofline:
    """What one device reaches: FLOP/s by type of the numbers in large products, bytes per second of its memory, the
    seconds of the shortest kernel, and the `edge` of products (0: short sides reach as much as long ones)."""

    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    edge: float = 0.0

    def seconds(self, kernels: Iterable[tuple[str, float, float, int]]) -> float:
        """The time of kernels one after another, each group as (type, FLOPs, bytes, number of them). `LookupError` for
        matrix products of a type without a peak."""
        return sum(count * self._one(kind, flops, size) for kind, flops, size, count in kernels)

    def _one(self, kind: str, flops: float, size: float) -> float:
        if flops and kind not in self.flops:
            raise LookupError(f"no peak is known for matrix products in {kind}, only for {', '.join(self.flops)}")
        product = product_seconds(flops, size / _WIDTHS.get(kind, 4), self.flops[kind], self.edge) if flops else 0.0
        return max(product, size / self.bandwidth, self.launch)


def product_seconds(flops: float, elements: float, rate: float, edge: float = EDGE) -> float:
    """The seconds of a matrix product of so many FLOPs whose three matrices have so many elements together, at the
    `rate` of large products in FLOP/s."""
    return (flops + 2 * edge * elements) / rate


def of_accelerator(accelerator: Accelerator, precision: str, share: float) -> Roofline:
    """That of an accelerator for a training in a precision: `share` from 0 to 1 chooses between the least and the most
    that its kernels reach."""

    def reached(name: str) -> float:
        least, most = accelerator.reached[name]
        return least + share * (most - least)

    peaks = dict(accelerator.flops)
    for kind, other in WITH_TENSOR_CORES.get(precision, {}).items():
        peaks[kind] = peaks[other]
    return Roofline(
        {kind: peak * reached("products") for kind, peak in peaks.items()},
        accelerator.bandwidth * reached("copies"),
        reached("launch"),
        EDGE,
    )


def of_cores(table: LinkTable, share: float) -> Roofline:
    """That of a rank of this machine, whose kernels reach between half and all of what was measured; half is an
    assumption."""
    reached = (1 + share) / 2
    peaks = {kind: reached * peak for kind, peak in table.peaks.items()}
    return Roofline(peaks, reached * table.kernels["copies"], table.kernels["launch"] / reached)


def with_seconds(program: Iterable[Iterable[Any]], roofline: Roofline) -> list[list[Any]]:
    """A program of `tracing.work` with the seconds of its kernels in their place, as `simulation.program_of` reads
    it."""
    found = []
    for kind, *rest in program:
        if kind == "compute":
            phase, kernels = rest
            rest = [phase, [roofline.seconds(kernels)]]
        found.append([kind, *rest])
    return found


# ---- the time of a step


# The script that is measured trains only, for more steps than are needed.
_MEASURED: dict[str, Any] = {
    **dict.fromkeys(("epochs", "save_every", "resume", "fault")),
    "steps": 100,
    "max_restarts": 0,
}
_MOST = 8  # ranks that are all simulated
ERROR = 0.17  # of the predicted step: 16 of 20 steps are in the range with it (MEASUREMENTS.md, Time of a step)
_BUSY = 0.05  # share of a measurement in which something else may use the machine
_SHARES = (0.5, 1.0, 0.0)  # of what kernels reach: the middle, the most, the least
_ALIKE = 3  # steps to simulate if all of them compute equally long
_FILE, _LIMIT = "programs.json", 16 << 20  # bytes


def timed(spec: Spec, plan: Plan, cancelled: Callable[[], bool] = never) -> Plan:
    """The plan of a Spec of CPU ranks with the time of a step on this machine: measured for a strategy, modelled for a
    script of the user's own. It takes seconds, unless it is cached.

    `low` and `high` of the time of a strategy are the seconds minus and plus √(a² + b² + c² + d²): a is the distance to
    the lower or the upper quartile of the simulated steps, b what the exposed communication varies by, c the error of a
    step for which 80 % of cases are in the range (`ERROR`), d the share of the measurement in which something else used
    the machine. With such a share, the next call measures again.

    Raises `LookupError` for GPUs, or if this machine has not been measured, `TraceFailed` if a rank cannot be measured,
    and `Cancelled` soon after `cancelled` returns true.
    """
    if spec.device == "cuda":
        raise LookupError("the time of a step can be predicted for CPU ranks only; use device='cpu'")
    links = communication(HERE) if spec.processes > 1 else None
    machine = Machine.here()
    if spec.strategy is None:
        table = kernels_of(machine, spec.processes)
        rooflines = [of_cores(table, share) for share in _SHARES]
        found = _modelled(spec, plan, rooflines, links, machine.cores, f"this machine, {table.title}", cancelled)
    else:
        groups = classes(spec)
        measured, busy = _programs(spec, [ranks[0] for ranks in groups], machine, cancelled)
        steps = _simulated(groups, measured, links, machine.cores)
        bounds = _bounds(max(steps.values(), key=_seconds), links.error if links else 0.0, busy)
        found = _with_time(spec, plan, steps, bounds, links.title if links else "")
        assert found.time, "it was just added"
        found.time.busy = busy
    keep(spec, found)
    return found


def _bounds(step: PredictedTimeline, error: float, busy: float) -> tuple[float, float]:
    seconds = step.seconds
    own = math.hypot(error * sum(step.exposed.values()), ERROR * seconds, busy * seconds)
    low, high = (math.hypot(own, (seconds if end is None else end) - seconds) for end in (step.low, step.high))
    return max(0.0, seconds - low), seconds + high


def modelled(spec: Spec, plan: Plan, machine: Device, cancelled: Callable[[], bool] = never) -> Plan:
    """The plan of a Spec on a machine of the table, with the time of a step, without the loading of samples: in the
    middle of what its kernels reach, with the least and the most as the range. If a step cannot be modelled, `untimed`
    of the plan says why.

    Raises `ValueError` for a precision that the machine lacks, and as `predict` does.
    """
    accelerator = machine.accelerator
    assert accelerator
    if spec.precision:
        accelerator.peak(spec.precision)
    plan = on(plan, spec, machine)
    rooflines = [of_accelerator(accelerator, spec.precision or "", share) for share in _SHARES]
    links = communication(machine.name) if spec.processes > 1 else None
    try:
        return _modelled(spec, plan, rooflines, links, None, machine.title, cancelled)
    except LookupError as error:
        return replace(plan, untimed=f"there is no time of a step: {error}")


def _modelled(
    spec: Spec,
    plan: Plan,
    rooflines: Sequence[Roofline],
    links: CommunicationModel | None,
    cores: int | None,
    title: str,
    cancelled: Callable[[], bool],
) -> Plan:
    """`rooflines` are in the order of `_SHARES`."""
    if spec.options.get("cpu_offload"):
        raise LookupError("it is not modelled with cpu_offload, which computes on CPUs, too")
    if plan.method != "simulated":
        raise LookupError(f"it needs a trace, and {plan.reason or 'there is none'}")
    if spec.processes < (spec.nproc or 1):
        raise LookupError("it is not modelled for several devices in one process")
    groups, work = [part.ranks for part in plan.classes], programs(spec, cancelled)
    middle, fast, slow = (
        _simulated(groups, {rank: with_seconds(items, roofline) for rank, items in work.items()}, links, cores, _ALIKE)
        for roofline in rooflines
    )
    for first, timeline in middle.items():
        timeline.low, timeline.high = fast[first].seconds, slow[first].seconds
    low, high = (max(map(_seconds, steps.values())) for steps in (fast, slow))
    found = _with_time(spec, plan, middle, (low, high), title)
    assert found.time, "it was just added"
    found.time.modelled = True
    return found


def _simulated(
    groups: Sequence[Sequence[int]],
    programs: Programs,
    links: CommunicationModel | None,
    cores: int | None,
    steps: int = STEPS,
) -> dict[int, PredictedTimeline]:
    """The timeline of the slowest rank of each class, by the first rank, which has a program."""
    known = {rank: program_of(items) for rank, items in programs.items()}
    like = {rank: ranks[0] for ranks in groups for rank in ranks}
    if len(like) <= _MOST:
        known = {rank: moved(known[first], first, rank, len(like)) for rank, first in like.items()}
        like = {rank: rank for rank in like}
    found = simulate(known, like, links, cores, steps)
    return {ranks[0]: max((found[rank] for rank in ranks if rank in found), key=_seconds) for ranks in groups}


def _with_time(
    spec: Spec, plan: Plan, steps: Mapping[int, PredictedTimeline], bounds: tuple[float, float], links: str
) -> Plan:
    seconds = max(map(_seconds, steps.values()))
    time = PredictedTime(seconds, links, low=bounds[0], high=bounds[1])
    if spec.strategy:
        time.samples_per_second = throughput_of_median_steps(spec.global_batch, [seconds]) or 0.0
    parts = [replace(part, timeline=steps[part.ranks[0]]) for part in plan.classes]
    return replace(plan, classes=parts, time=time)


def _seconds(timeline: PredictedTimeline) -> float:
    return timeline.seconds


def _programs(
    spec: Spec, ranks: Sequence[int], machine: Machine, cancelled: Callable[[], bool]
) -> tuple[Programs, float]:
    """The programs of some ranks, measured now or before, and the share of the measurement in which something else used
    the machine."""
    state = [machine.hardware, *sorted(path.stat().st_mtime_ns for path in tables_folder().glob("*.json"))]
    place = cache_folder(spec) / _FILE
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = parse(read_below(place.parent, place, _LIMIT))
        if known["state"] == state:
            return {int(rank): items for rank, items in known["programs"].items()}, 0.0
    together = max(min(spec.processes, machine.cores), len(ranks))
    repeated = [ranks[index % len(ranks)] for index in range(together)]
    options = {**spec.options, "warmup_steps": 0}  # which may be longer than what is measured
    try:
        found = computed(dataclasses.replace(spec, **_MEASURED, options=options), repeated, cancelled)
    except TraceFailed as failure:
        raise TraceFailed(cause(failure, spec)) from None
    shares = [item[1] for items in found.values() for item in items if item[0] == "busy"]
    measured = {rank: [item for item in items if item[0] != "busy"] for rank, items in found.items()}
    if (busy := max(shares)) >= _BUSY:
        return measured, busy
    with suppress(OSError):
        made(spec)
        write_atomically(place, json.dumps({"state": state, "programs": measured}), private=True)
    return measured, 0.0
