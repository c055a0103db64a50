"""The ledger: bytes that the ranks sent in a step, by operation, against what theory demands, with why they differ.

What is known to come on top of a formula, such as padding or what gloo makes of a reduce-scatter, has a number of its own: only the rest
is unexplained.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory import Flow, theory
from labkit.common.units import size
from labkit.plan.spec import Spec, SpecError
from labkit.record.state import per_revision

if TYPE_CHECKING:
    from labkit.record.state import RunState

CLOSE = 0.01  # of two figures, the larger: what is nearer needs no reason


@dataclass(frozen=True)
class Entry:
    """One operation of a step. `calls` is the mean of the ranks; `measured` and `theory` are bytes sent in a step, over all ranks.

    `theory` is None where there is no formula, as for a script of one's own; `formula` says how it is made up. `reason` is one sentence
    with numbers where the two differ, and empty where they are within one per cent of each other.
    """

    op: str
    calls: float
    measured: float
    theory: float | None
    formula: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self)


@per_revision
def ledger(state: RunState) -> tuple[Entry, ...]:
    """An entry for every operation that was seen or is demanded, the largest first; empty until every rank has told of a step."""
    spec = _asked(state)
    seen = _copied(state) if state.in_threads else _seen(state)
    if seen is None:
        return ()
    measured, step = seen
    if spec is None:
        entries = [Entry(op, calls, sent, None, "", "") for op, (calls, sent) in measured.items()]
    else:
        flows: dict[str, list[Flow]] = {op: [] for op in measured}
        for flow in theory(spec, step):
            flows.setdefault(flow.op, []).append(flow)
        entries = [_entry(op, *measured.get(op, (0.0, 0.0)), those) for op, those in flows.items()]
    return tuple(sorted(entries, key=lambda entry: -max(entry.measured, entry.theory or 0.0)))


def _asked(state: RunState) -> Spec | None:
    """The Spec of a run, where it has a strategy and its ranks are known."""
    try:
        spec = Spec.from_json(state.spec) if state.spec else None
    except SpecError:
        return None  # of a version that knew more
    return spec if spec and spec.strategy and spec.nproc else None


def _seen(state: RunState) -> tuple[dict[str, tuple[float, float]], int] | None:
    """Calls (mean per rank) and bytes sent (over all ranks) by operation, and the step; None where a rank has told of none."""
    told = [rank.traffic for rank in state.ranks.values() if rank.traffic is not None]
    if not told or len(told) < state.world_size:
        return None
    ops = dict.fromkeys(op for traffic in told for op in traffic["ops"])
    found = {}
    for op in ops:
        those = [traffic["ops"][op] for traffic in told if op in traffic["ops"]]
        found[op] = sum(one["calls"] for one in those) / len(told), float(sum(one["sent"] for one in those))
    return found, max(traffic["step"] for traffic in told)


def _entry(op: str, calls: float, measured: float, flows: list[Flow]) -> Entry:
    demanded = float(sum(flow.theory for flow in flows))
    formula = " + ".join(dict.fromkeys(flow.formula for flow in flows if flow.theory))
    return Entry(op, calls, measured, demanded, formula, _reason(measured, demanded, flows))


def _reason(measured: float, demanded: float, flows: list[Flow]) -> str:
    gap, least = measured - demanded, CLOSE * max(measured, demanded)
    if abs(gap) <= least:
        return ""
    known: dict[str, float] = {}
    for bytes_, why in (each for flow in flows for each in flow.beside):
        known[why] = known.get(why, 0.0) + bytes_
    told = [f"{_signed(bytes_)}: {why}" for why, bytes_ in known.items() if abs(bytes_) > 0.05 * abs(gap)]
    rest = gap - sum(known.values())
    if abs(rest) > least:
        told.append(f"{_signed(rest)}: no formula explains them")
    return "; ".join(told)


def _signed(count: float) -> str:
    """Bytes in words, with their sign."""
    return ("+" if count >= 0 else "−") + size(abs(count), digits=2)


def _copied(state: RunState) -> tuple[dict[str, tuple[float, float]], int] | None:
    """What device 0 of `nn.DataParallel` gathers and reduces in the newest step that was looked at; its copies pass no process group."""
    if not state.in_threads:
        return None
    newest = state.in_threads[-1]
    others, extra = len(newest["replicas"]) - 1, newest["extra"]
    outputs = extra["outputs"] * others / (others + 1)
    return {"gather": (others, outputs), "reduce": (others, float(extra["gradients"]))}, max(state.step, 1)
