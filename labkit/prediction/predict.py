"""Spec → plan: the memory and traffic of every rank, from a trace of the generated script, or else from formulas.

A plan is cached by what it depends on: the fields of the Spec that change a step, torch, and the code of this project.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from labkit.analysis.theory import states, theory
from labkit.common.atomic import write_atomically
from labkit.common.cache import user_cache
from labkit.plan.spec import Spec
from labkit.prediction.classes import classes
from labkit.prediction.tracer import TraceFailed, traced
from labkit.record.documents import Unreadable, read_document
from labkit.record.ring import sent
from labkit.record.types.documents import SpecFields
from labkit.record.types.measured import Operation
from labkit.record.types.prediction import VERSION, Called, Method, Plan, PredictedClass, PredictedRank

_KEPT = 200  # cached plans
_PACKAGES = ("plan", "prediction", "probe", "training")  # whose code a prediction depends on
_WITHOUT_EFFECT = frozenset(
    ("steps", "epochs", "seed", "save_every", "resume", "tensors", "hang_after", "sample_every", "max_restarts")
)


def predict(spec: Spec) -> Plan:
    """The plan of a Spec with a known number of ranks and a strategy. It takes seconds, unless it is cached.

    If the trace fails, the plan has what the formulas say, and the reason.
    """
    known = cached(spec)
    if known is not None:
        return known
    groups = classes(spec)
    try:
        traces = traced(spec, [ranks[0] for ranks in groups])
    except TraceFailed as failure:
        return _by_formula(spec, str(failure))
    plan = _of_traces(spec, groups, traces)
    keep(spec, plan)
    return plan


def cached(spec: Spec) -> Plan | None:
    """The plan of a Spec that was predicted before, on this machine; None if there is none."""
    with suppress(OSError, Unreadable):
        return cast(Plan, read_document(cache_folder(spec) / "plan.json") or None)
    return None


def _of_traces(spec: Spec, groups: Sequence[list[int]], traces: dict[int, dict[str, Any]]) -> Plan:
    found: dict[int, PredictedRank] = {}
    parts: list[PredictedClass] = []
    for ranks in groups:
        trace = traces[ranks[0]]
        step, calls = trace["step"], _executed(trace["calls"], spec.device != "cuda")
        ops = _by_operation(calls)
        parts.append({"ranks": ranks, "step": step, "ops": ops, "calls": calls})
        for rank in ranks:
            found[rank] = {
                "rank": rank,
                "like": ranks[0],
                "peak_memory_bytes": step["peak"],
                "at_peak": step["at_peak"],
                "phase_at_peak": trace["phase_at_peak"],
                "memory_bytes": trace["owners"],
                "comm_bytes_per_step": round(sum(one["sent"] for one in ops.values())),
            }
    in_order = [found[rank] for rank in sorted(found)]
    return _plan(spec, "simulated", in_order, parts)


def _by_formula(spec: Spec, reason: str) -> Plan:
    held, flows = states(spec), theory(spec)
    each = None if flows is None else round(sum(flow.theory for flow in flows) / spec.processes)
    ranks: list[PredictedRank] = [
        {
            "rank": rank,
            "like": rank,
            "peak_memory_bytes": None,
            "at_peak": {},
            "phase_at_peak": "",
            "memory_bytes": {name: round(size) for name, size in vars(held[rank]).items()} if held else {},
            "comm_bytes_per_step": each,
        }
        for rank in range(spec.processes)
    ]
    return {**_plan(spec, "formula", ranks, []), "reason": reason}


def _plan(spec: Spec, method: Method, ranks: list[PredictedRank], parts: list[PredictedClass]) -> Plan:
    asked = cast(SpecFields, spec.to_json())
    return {
        "v": VERSION,
        "spec": asked,
        "torch": metadata.version("torch"),
        "method": method,
        "ranks": ranks,
        "classes": parts,
    }


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
            one = ops.setdefault(op, {"calls": 0, "bytes": 0, "sent": 0.0})
            one["calls"] += 1
            one["bytes"] += size
            one["sent"] += sent(op, size, ranks)
    return ops


# ---- the cache


def keep(spec: Spec, plan: Plan) -> None:
    """Stores a plan in the cache, if possible."""
    folder = cache_folder(spec)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(folder / "plan.json", json.dumps(plan), private=True)
        for old in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def cache_folder(spec: Spec) -> Path:
    """The folder for what is known about a Spec before it runs."""
    asked = {name: value for name, value in spec.to_json().items() if name not in _WITHOUT_EFFECT}
    key = [sorted(asked.items(), key=lambda item: item[0]), metadata.version("torch"), _code()]
    return user_cache() / "labkit" / "predictions" / hashlib.sha256(repr(key).encode()).hexdigest()


@cache
def _code() -> str:
    """A digest of the code that a prediction depends on."""
    root = Path(__file__).parents[1]
    files = sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
