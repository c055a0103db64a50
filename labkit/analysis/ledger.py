"""The ledger: bytes that the ranks sent per step, by operation, next to the expected (analytical) bytes, and why they
differ.

Known additions to a formula, such as padding or the all-reduce with which gloo implements a reduce-scatter, are
computed separately: only the rest is unexplained.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from labkit.analysis.theory.formulas import Flow, theory
from labkit.common.units import size
from labkit.record.documents import LedgerEntry
from labkit.record.state import per_revision

if TYPE_CHECKING:
    from labkit.record.state import RunState

CLOSE = 0.01  # share of the larger of two figures; a smaller difference needs no reason


@dataclass(frozen=True)
class Entry:
    """One operation of a step. `calls` is the mean over ranks; `measured` and `theory` are bytes sent per step by all
    ranks.

    `theory` is None without a formula, as for a script that is not the lab's; `formula` shows its terms. `reason`
    explains a difference with numbers; it is empty if the two are within 1 % of each other.
    """

    op: str
    calls: float
    measured: float
    theory: float | None
    formula: str
    reason: str

    def recorded(self) -> LedgerEntry:
        """The entry as the summary has it."""
        return LedgerEntry(**asdict(self))


@per_revision
def ledger(state: RunState) -> tuple[Entry, ...]:
    """An entry for every operation that was measured or is expected, the largest first; empty until all ranks recorded
    traffic. Some ranks of a script of one's own may never take a step: without them once the run is over."""
    spec = state.asked
    seen = _copied(state) if state.in_threads else _seen(state, every_rank=spec is not None or not state.over)
    if seen is None:
        return ()
    measured, step = seen
    flows_of_step = theory(spec, step) if spec else None
    if flows_of_step is None:
        entries = [Entry(op, calls, sent, None, "", "") for op, (calls, sent) in measured.items()]
    else:
        flows: dict[str, list[Flow]] = {op: [] for op in measured}
        for flow in flows_of_step:
            flows.setdefault(flow.op, []).append(flow)
        entries = [_entry(op, *measured.get(op, (0.0, 0.0)), those) for op, those in flows.items()]
    return tuple(sorted(entries, key=lambda entry: -max(entry.measured, entry.theory or 0.0)))


def _seen(state: RunState, every_rank: bool) -> tuple[dict[str, tuple[float, float]], int] | None:
    """Calls (mean per rank) and bytes sent (by all ranks) by operation, and the step; None if no rank recorded any, or
    not `every_rank` that should have."""
    recorded = [rank.traffic for rank in state.ranks.values() if rank.traffic is not None]
    if not recorded or (every_rank and len(recorded) < state.world_size):
        return None
    ops = dict.fromkeys(op for traffic in recorded for op in traffic.ops)
    found = {}
    for op in ops:
        those = [traffic.ops[op] for traffic in recorded if op in traffic.ops]
        calls, sent = sum(operation.calls for operation in those), sum(operation.sent for operation in those)
        found[op] = calls / len(recorded), float(sent)
    return found, max(traffic.step for traffic in recorded)


def _entry(op: str, calls: float, measured: float, flows: list[Flow]) -> Entry:
    expected = float(sum(flow.theory for flow in flows))
    formula = " + ".join(dict.fromkeys(flow.formula for flow in flows if flow.theory))
    return Entry(op, calls, measured, expected, formula, _reason(measured, expected, flows))


def _reason(measured: float, expected: float, flows: list[Flow]) -> str:
    gap, least = measured - expected, CLOSE * max(measured, expected)
    if abs(gap) <= least:
        return ""
    known: dict[str, float] = {}
    for bytes_, why in (extra for flow in flows for extra in flow.extra):
        known[why] = known.get(why, 0.0) + bytes_
    reasons = [f"{_signed(bytes_)}: {why}" for why, bytes_ in known.items() if abs(bytes_) > 0.05 * abs(gap)]
    rest = gap - sum(known.values())
    if abs(rest) > least:
        reasons.append(f"{_signed(rest)}: not explained by the formulas")
    return "; ".join(reasons)


def _signed(count: float) -> str:
    """Bytes in words, with their sign."""
    return ("+" if count >= 0 else "−") + size(abs(count), digits=2)


def _copied(state: RunState) -> tuple[dict[str, tuple[float, float]], int]:
    """What device 0 of `nn.DataParallel` gathers and reduces in the newest recorded step; its copies use no process
    group."""
    newest = state.in_threads[-1]
    others, extra = len(newest.replicas) - 1, newest.extra
    outputs = extra.outputs * others / (others + 1)
    return {"gather": (others, outputs), "reduce": (others, float(extra.gradients))}, max(state.step, 1)
