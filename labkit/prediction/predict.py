"""Spec → plan: the memory and traffic of every rank, from a trace of the generated script, or else from formulas;
with what a GPU needs besides tensors, and whether the ranks fit into the memory of their devices.

A plan is cached by what it depends on: the fields of the Spec that change a step, torch, and the code of this project;
for a script of the user's own also the environment, the working folder and every file that the trace read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labkit.analysis.theory.formulas import six_nd, states, theory
from labkit.common.arguments import shown
from labkit.common.files import user_cache, write_atomically
from labkit.plan.spec import Spec, SpecError, check_available
from labkit.prediction.devices import BEFORE_HOPPER, DEVICES, HERE, Accelerator, Device, accelerator_of
from labkit.prediction.links import CALIBRATE, LinkTable, stored
from labkit.prediction.tracer import TRACER, TraceFailed, classes, joined, never, traced
from labkit.record.documents import (
    PLAN,
    AllocatorPeak,
    Called,
    Estimate,
    MemoryLimit,
    Method,
    Peak,
    Plan,
    PredictedClass,
    PredictedRank,
    PredictedStep,
    SpecFields,
    Unreadable,
    decoded,
    plain,
    read_document,
)
from labkit.record.events import Operation, parse
from labkit.record.files import read_below
from labkit.record.writer import sent
from labkit.setup.machine import Machine

Programs = Mapping[int, Sequence[Sequence[Any]]]  # by rank
_KEPT = 200  # cached plans
_PACKAGES = ("plan", "prediction", "probe", "training")  # whose code a prediction depends on
_WITHOUT_EFFECT = (
    *("steps", "epochs", "seed", "save_every", "checkpoint_async", "resume"),
    *("tensors", "hang_after", "sample_every", "max_restarts"),
)

_READ = "read.json"  # next to the plan of a script: what it read
_WORK, _LIMIT = "work.json", 64 << 20  # next to the plan: what its ranks compute, in at most so many bytes
_OF_THE_SHELL = ("_", "OLDPWD", "SHLVL")


def predict(spec: Spec, cancelled: Callable[[], bool] = never) -> Plan:
    """The plan of a Spec with a known number of ranks. It takes seconds, unless it is cached.

    If the trace of a strategy fails, the plan has what the formulas say, and the reason. Raises `TraceFailed` for a
    script of the user's own that cannot be traced, and `Cancelled` soon after `cancelled` returns true.
    """
    known = cached(spec)
    if known is not None:
        return known
    return on(_new(spec, cancelled)[0], spec, DEVICES[HERE])


def programs(spec: Spec, cancelled: Callable[[], bool] = never) -> Programs:
    """What the traced rank of each class computes and sends in a step, as `tracing.work` has it, by rank; empty without
    a trace. Raises as `predict` does."""
    place = cache_folder(spec) / _WORK
    if cached(spec):
        with suppress(OSError, ValueError, LookupError, TypeError):
            return {int(rank): items for rank, items in parse(read_below(place.parent, place, _LIMIT)).items()}
    return _new(spec, cancelled)[1]


def on(plan: Plan, spec: Spec, machine: Device) -> Plan:
    """A plan with what is known about the devices of a machine of the table."""
    return with_fit(on_gpus(replace(plan, peak=peak_of(spec, machine)), machine), spec, machine)


def _new(spec: Spec, cancelled: Callable[[], bool]) -> tuple[Plan, Programs]:
    TRACER.prepare()
    groups = classes(spec)
    try:
        traces = traced(spec, [ranks[0] for ranks in groups], cancelled)
    except TraceFailed as failure:
        if spec.strategy is None:
            raise
        return _by_formula(spec, cause(failure, spec)), {}
    read = {path for trace in traces.values() for path in trace.pop("read", ())}
    work = {rank: trace.pop("program") for rank, trace in traces.items()}
    plan = _of_traces(spec, groups if spec.strategy else joined(groups, traces), traces)
    with suppress(OSError):
        write_atomically(made(spec) / _WORK, json.dumps(work), private=True)
    keep(spec, plan, read)
    return plan, {part.ranks[0]: work[part.ranks[0]] for part in plan.classes}


def cause(failure: TraceFailed, spec: Spec) -> str:
    """Why a script of a strategy could not be traced or measured: a package or data that cannot be had here, or what
    the failure says."""
    try:
        check_available(spec)
    except SpecError as error:
        return str(error)
    return str(failure)


def cached(spec: Spec) -> Plan | None:
    """The plan of a Spec that was predicted before, on this machine, with what is known now about its devices; None if
    there is none."""
    folder = cache_folder(spec)
    with suppress(OSError, ValueError, Unreadable):
        read = {} if spec.strategy else json.loads((folder / _READ).read_text())
        if all(_state(path) == state for path, state in read.items()):
            known = read_document(folder / "plan.json", Plan)
            return on(known, spec, DEVICES[HERE]) if known else None
    return None


def _of_traces(spec: Spec, groups: Sequence[list[int]], traces: dict[int, dict[str, Any]]) -> Plan:
    found: dict[int, PredictedRank] = {}
    parts: list[PredictedClass] = []
    traced_share = spec.processes / (spec.nproc or 1) if spec.device == "cuda" else 1  # one device of a process
    for ranks in groups:
        trace = traces[ranks[0]]
        step, calls = decoded(trace["step"], PredictedStep), _executed(trace["calls"], spec.device != "cuda")
        ops = _by_operation(calls)
        allocator = [decoded(peaks, AllocatorPeak) for peaks in trace["allocator"]]
        parts.append(PredictedClass(ranks, step, ops, calls, allocator=allocator))
        for rank in ranks:
            found[rank] = PredictedRank(
                rank=rank,
                like=ranks[0],
                peak_memory_bytes=step.peak,
                at_peak=step.at_peak,
                phase_at_peak=trace["phase_at_peak"],
                memory_bytes=trace["owners"],
                comm_bytes_per_step=round(sum(operation.sent for operation in ops.values())),
                flops=trace["flops"] / traced_share,
                recomputed_flops=trace["recomputed_flops"] / traced_share,
            )
    plan = _plan(spec, "simulated", [found[rank] for rank in sorted(found)], parts)
    plan.model_flops = _model_flops(spec, plan.ranks, traces)
    plan.six_nd = six_nd(spec)
    plan.reason = next((trace["ended"] for trace in traces.values() if trace.get("ended")), "")
    return plan


def _model_flops(spec: Spec, ranks: Sequence[PredictedRank], traces: Mapping[int, Mapping[str, Any]]) -> float:
    """Those of the model on one device: ranks of tensor parallelism may all compute the same parts of it."""
    of_a_sample = next((trace["flops_of_a_sample"] for trace in traces.values() if "flops_of_a_sample" in trace), None)
    if of_a_sample is not None:
        return float(of_a_sample * spec.global_batch)
    return sum((rank.flops or 0) - (rank.recomputed_flops or 0) for rank in ranks)


def _by_formula(spec: Spec, reason: str) -> Plan:
    held, flows = states(spec), theory(spec)
    bytes_of_a_rank = None if flows is None else round(sum(flow.theory for flow in flows) / spec.processes)
    ranks = [
        PredictedRank(
            rank=rank,
            like=rank,
            peak_memory_bytes=None,
            at_peak={},
            phase_at_peak="",
            memory_bytes={name: round(size) for name, size in vars(held[rank]).items()} if held else {},
            comm_bytes_per_step=bytes_of_a_rank,
        )
        for rank in range(spec.processes)
    ]
    return replace(_plan(spec, "formula", ranks, []), reason=reason)


def _plan(spec: Spec, method: Method, ranks: list[PredictedRank], parts: list[PredictedClass]) -> Plan:
    return Plan(SpecFields.of(spec), method, ranks, parts, v=PLAN, torch=metadata.version("torch"))


def _executed(calls: Sequence[Sequence[Any]], on_gloo: bool) -> list[Called]:
    """The collectives as the backend executes them: gloo has no reduce-scatter, and all-reduces each of its parts."""
    found: list[Called] = []
    for op, size, ranks, parts in calls:
        if op == "reduce_scatter" and on_gloo:
            found += [("all_reduce", size // parts, ranks)] * parts
        else:
            found.append((op, size, ranks))
    return found


def _by_operation(calls: Sequence[Called]) -> dict[str, Operation]:
    """Calls and bytes by operation as in a `traffic` event, which counts no receives."""
    ops: dict[str, Operation] = {}
    for op, size, ranks in calls:
        if op != "recv":
            operation = ops.setdefault(op, Operation(calls=0, bytes=0, sent=0.0))
            operation.calls += 1
            operation.bytes += size
            operation.sent += sent(op, size, ranks)
    return ops


# ---- what a GPU adds to a trace

_MIB = 1 << 20
_CONNECTIONS = 2  # of a rank in a ring, each with a buffer per channel


def on_gpus(plan: Plan, machine: Device) -> Plan:
    """A plan of a trace with the peak of each rank on the GPUs of a machine, and what comes on top of it; any other
    plan stays as it is. What is not a tensor of the step counts as `other`."""
    accelerator = machine.accelerator or _here()
    workspace = accelerator.workspace if accelerator else BEFORE_HOPPER
    parts = [_on_gpu(part, workspace) for part in plan.classes]
    steps = {rank: part.step for part in parts if part.allocator for rank in part.ranks}
    ranks = []
    for predicted in plan.ranks:
        if step := steps.get(predicted.rank):
            predicted = replace(predicted, peak_memory_bytes=step.peak, at_peak=step.at_peak)
        ranks.append(predicted)
    return replace(plan, ranks=ranks, classes=parts)


def _here() -> Accelerator | None:
    gpus = Machine.here().gpus
    return accelerator_of(gpus[0].name) if gpus else None


def _on_gpu(part: PredictedClass, workspace: int) -> PredictedClass:
    found = next((peaks for peaks in part.allocator if peaks.workspace == workspace), None)
    if found is None:
        return part
    step = part.step
    more = found.allocated - step.peak
    owners = {**step.owners, "other": [size + more for size in step.owners["other"]]}
    at_peak = {**step.at_peak, "other": step.at_peak["other"] + more}
    step = replace(step, owners=owners, at_peak=at_peak, peak=found.allocated)
    return replace(part, step=step, estimates=estimates(part.calls, found))


def estimates(calls: Iterable[Called], allocator: AllocatorPeak) -> list[Estimate]:
    """The estimates for a rank with these collectives."""
    groups = len({ranks for _, _, ranks in calls if ranks > 1})
    found = [
        Estimate(
            "CUDA context and kernels",
            low=287_047_680,
            high=666_632_192,
            source="PyTorch pull request 86509, a process with one tensor: kernels loaded lazily, and all at once",
        )
    ]
    if groups:
        found.append(
            Estimate(
                "NCCL buffers",
                low=groups * 2 * _CONNECTIONS * 4 * _MIB,
                high=groups * 32 * _CONNECTIONS * 10 * _MIB,
                source="2 to 32 channels, two connections each; NCCL_BUFFSIZE of 4 MiB (NCCL's documentation) to"
                " buffers of 10 MiB (NCCL issue 1685), for each size of a group",
            )
        )
    found.append(
        Estimate(
            "cached by the allocator",
            low=0,
            high=allocator.reserved - allocator.allocated,
            source="a replay of PyTorch's caching allocator, which gives it back before it runs out of memory",
        )
    )
    return found


# ---- peaks


def peak_here(spec: Spec) -> Peak:
    """That of one device of a Spec on this machine."""
    machine = Machine.here()
    if spec.device != "cuda":
        return _measured(spec, machine)
    if not machine.gpus:
        return Peak(None, "this machine has no GPU; name one with --machine")
    name = machine.gpus[0].name
    found = accelerator_of(name)
    return _published(spec, found) if found else Peak(None, f"no published peak of {name} is known here")


def peak_of(spec: Spec, machine: Device) -> Peak:
    """That of one device of a Spec on a machine of the table."""
    return _published(spec, machine.accelerator) if machine.accelerator else peak_here(spec)


def _published(spec: Spec, accelerator: Accelerator) -> Peak:
    flops = accelerator.flops.get(spec.precision or "")
    if flops is None:
        asked = f"no peak for {spec.precision}" if spec.precision else "no peak for a script of unknown precision"
        return Peak(None, f"{accelerator.name} has {asked}, only for {', '.join(accelerator.flops)}")
    return Peak(flops, f"{accelerator.name}, {spec.precision}: {accelerator.sources['flops']}")


def _measured(spec: Spec, machine: Machine) -> Peak:
    """Of the ranks that were measured together, each had a share of the cores; so do the ranks of the Spec."""
    precision, ranks = spec.precision or "fp32", spec.nproc or 1
    table = _nearest([candidate for candidate in stored(machine).tables if precision in candidate.peaks], ranks)
    if table is None:
        return Peak(None, f"no peak of this CPU has been measured for {precision}; measure it with {CALIBRATE}")
    share = min(1.0, machine.cores / ranks) / min(1.0, machine.cores / table.ranks)
    how = f"matrix products in {precision} on one core per rank, {table.title}"
    return Peak(table.peaks[precision] * share, how)


def kernels_of(machine: Machine, ranks: int) -> LinkTable:
    """The measured table with what kernels reach on this machine, of the nearest number of ranks; `LookupError` if
    there is none."""
    tables = [candidate for candidate in stored(machine).tables if candidate.kernels and candidate.peaks]
    table = _nearest(tables, ranks)
    if table is None:
        raise LookupError(f"what kernels reach on this machine has not been measured; measure it with {CALIBRATE}")
    return table


def _nearest(tables: Sequence[LinkTable], ranks: int) -> LinkTable | None:
    return min(tables, key=lambda table: abs(math.log(table.ranks / ranks)), default=None)


# ---- whether the ranks of a plan fit into the memory of their devices

_NO_TRACE = "the peak of a rank is known from a trace only"
_SHARED = "the memory of this machine, which its ranks share; what their processes need besides tensors is not included"


def with_fit(plan: Plan, spec: Spec, machine: Device | None = None) -> Plan:
    """A plan with `fits` and `memory` on a machine of the table, or on this one."""
    peaks = [rank.peak_memory_bytes for rank in plan.ranks]
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks):
        return replace(plan, fits=None, memory=_memory(None, (0, 0), _NO_TRACE))
    accelerator = machine.accelerator if machine else None
    if accelerator:
        limit, source = accelerator.memory, f"{accelerator.name}: {accelerator.sources['memory']}"
        memory = _memory(limit, _of_a_rank(plan), source)
    elif spec.device == "cuda":
        memory = _on_gpus_here(plan, spec)
    else:
        memory = _memory(Machine.here().memory, (sum(known), sum(known)), _SHARED)
    return replace(plan, fits=_fits(memory), memory=memory)


def _memory(limit: float | None, needed: tuple[float, float], source: str) -> MemoryLimit:
    return MemoryLimit(limit_bytes=limit, low_bytes=needed[0], high_bytes=needed[1], source=source)


def _fits(memory: MemoryLimit) -> bool | None:
    limit = memory.limit_bytes
    if limit is None or memory.low_bytes <= limit < memory.high_bytes:
        return None
    return memory.high_bytes <= limit


def _of_a_rank(plan: Plan) -> tuple[float, float]:
    """The bytes of the rank that needs the most, with the least and the most of each estimate."""
    found = [(part.step.peak, part.estimates) for part in plan.classes]
    low = max(peak + sum(estimate.low for estimate in estimates) for peak, estimates in found)
    return low, max(peak + sum(estimate.high for estimate in estimates) for peak, estimates in found)


def _on_gpus_here(plan: Plan, spec: Spec) -> MemoryLimit:
    gpus, ranks = Machine.here().gpus, spec.nproc or 1
    if len(gpus) < ranks:
        why = f"this machine has {shown(len(gpus))} GPUs for {ranks} ranks; name a machine with --machine"
        return _memory(None, _of_a_rank(plan), why)
    least = min(gpus[:ranks], key=lambda gpu: gpu.memory)
    return _memory(least.memory, _of_a_rank(plan), f"{least.name}, as its driver reports it")


# ---- the cache


def keep(spec: Spec, plan: Plan, read: Iterable[str] = ()) -> None:
    """Stores a plan in the cache, if possible; `read` are the paths that a script of the user's own has read."""
    with suppress(OSError):
        folder = made(spec)
        if spec.strategy is None:
            write_atomically(folder / _READ, json.dumps({path: _state(path) for path in read}), private=True)
        write_atomically(folder / "plan.json", json.dumps(plain(plan)), private=True)
        same = folder.parent.glob("?" * len(folder.name))  # nothing else that may be there
        for old in sorted(same, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def made(spec: Spec) -> Path:
    """The folder for what is known about a Spec before it runs, which exists; `OSError` if it cannot be created."""
    folder = cache_folder(spec)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _state(path: str) -> list[int]:
    """Size and time of the last change of a file or folder; empty if it does not exist."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def cache_folder(spec: Spec) -> Path:
    """The folder for what is known about a Spec before it runs."""
    asked = {name: value for name, value in spec.to_json().items() if name not in _WITHOUT_EFFECT}
    key = [sorted(asked.items(), key=lambda item: item[0]), metadata.version("torch"), _code()]
    if spec.strategy is None:  # which may read its environment
        variables = sorted(item for item in os.environ.items() if item[0] not in _OF_THE_SHELL)
        key += [str(Path.cwd()), variables]
    return user_cache() / "labkit" / "predictions" / hashlib.sha256(repr(key).encode()).hexdigest()


@cache
def _code() -> str:
    """A digest of the code that a prediction depends on."""
    root = Path(__file__).parents[1]
    files = sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
