"""The ledger of a step that was not run: what was sent, by operation."""

from __future__ import annotations

from typing import Any

from folded import apply

from labkit.analysis.ledger import Entry, ledger
from labkit.plan.spec import Spec
from labkit.record.state import RunState

BATCH = {"cnn": 16, "mlp": 32, "gpt": 8, "moe": 8, "resnet18": 8}


def spec(strategy: str, workload: str = "gpt", nproc: int | None = 2, **asked: Any) -> Spec:
    fields = {name: asked.pop(name) for name in ("batch_size", "precision", "samples") if name in asked}
    fields = {
        "batch_size": BATCH[workload],
        "precision": "fp32",
        "device": asked.pop("device", "cpu"),
        "steps": 3,
    } | fields
    return Spec(strategy, workload, nproc=nproc, options=asked, **fields)


def state(asked: Spec, sent: dict[str, float], step: int = 3, ranks: int | None = None, calls: int = 1) -> RunState:
    """A run in which every rank recorded an equal part of the total traffic."""
    folded = RunState()
    apply(folded, {"kind": "spec", "t": 0.0, "spec": asked.to_json()})
    count = ranks or asked.processes
    for rank in range(count):
        ops = {op: {"calls": calls, "bytes": size, "sent": size / count} for op, size in sent.items()}
        apply(folded, {"kind": "start", "t": 0.0, "rank": rank})
        apply(folded, {"kind": "traffic", "t": 1.0, "rank": rank, "step": step, "ops": ops})
    return folded


def entries(*given: Any, **more: Any) -> dict[str, Entry]:
    return {entry.op: entry for entry in ledger(state(*given, **more))}
