"""The prediction of a run against its measurement, per rank, and one sentence about each miss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import cast

from labkit.analysis.theory import states
from labkit.common.units import size
from labkit.plan.spec import Spec
from labkit.record.columns import RankState
from labkit.record.events import OWNERS
from labkit.record.state import RunState, per_revision
from labkit.record.types.prediction import Plan, PredictedClass, PredictedRank
from labkit.record.types.summary import PredictionOutcome

# why an owner at the peak is smaller, and larger, than its formula
_WHY = {
    "parameters": ("freed or in another type", "gathered from other ranks"),
    "gradients": ("not computed or already freed then", "not yet reduced to a shard, or in two copies"),
    "optimizer": ("not created, or in CPU memory", "step counts, or other state"),
}
CLOSE = 0.02  # share of the measured peak; a smaller error needs no reason
_SMALL = 0.1  # share of the error; smaller differences of an owner are not named


@dataclass(frozen=True)
class Outcome:
    """Bytes at the peak of a step, and bytes sent per step, of one rank: predicted and measured. `error` is the
    predicted peak over the measured one, minus 1. `reason` names the owners in which a peak differs by more than 2 %;
    it is empty for a closer one. Unknown values are None."""

    rank: int
    peak_predicted: float | None
    peak_measured: float | None
    error: float | None
    sent_predicted: float | None
    sent_measured: float | None
    reason: str

    def to_json(self) -> PredictionOutcome:
        """The outcome as a dict that can be written as JSON."""
        return cast(PredictionOutcome, asdict(self))


@per_revision
def outcomes(state: RunState) -> tuple[Outcome, ...]:
    """The outcome of each rank; empty for a run without a prediction. Ranks whose peak is `unmeasured` have none."""
    ranks = state.prediction["ranks"] if state.prediction else ()
    hidden = bool(unmeasured(state))
    return tuple(_outcome(one, state.ranks.get(one["rank"]), hidden) for one in ranks)


def unmeasured(state: RunState) -> str:
    """Why the measured peaks of a run are not complete, so that they are not compared; empty if they are."""
    if state.in_threads and any(rank.device.startswith("cpu") for rank in state.ranks.values()):
        return "the threads of the replicas allocate memory, which torch's profiler does not record"
    return state.asked.strategy_row.unmeasured(state.asked.request) if state.asked else ""


def _outcome(predicted: PredictedRank, rank: RankState | None, hidden: bool) -> Outcome:
    step, traffic = (rank.memory_step, rank.traffic) if rank else (None, None)
    if hidden:
        step = None
    peak, measured = predicted["peak_memory_bytes"], step["peak"] if step else None
    error = peak / measured - 1 if peak is not None and measured else None
    reason = ""
    if step and error is not None and abs(error) > CLOSE:
        reason = _by_owner(predicted["at_peak"], step["at_peak"])
    sent = sum(one["sent"] for one in traffic["ops"].values()) if traffic else None
    return Outcome(predicted["rank"], peak, measured, error, predicted["comm_bytes_per_step"], sent, reason)


def _by_owner(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """`measured minus predicted, at the peak: activations +3.1 MiB, other −0.2 MiB`."""
    gaps = {owner: measured.get(owner, 0) - predicted.get(owner, 0) for owner in {**predicted, **measured}}
    least = _SMALL * max(map(abs, gaps.values()), default=0)
    named = [f"{owner} {_signed(gap)}" for owner, gap in gaps.items() if abs(gap) > least]
    return f"measured minus predicted, at the peak: {', '.join(named)}"


def _signed(count: float) -> str:
    return ("+" if count >= 0 else "−") + size(abs(count), digits=2)


def sentences(state: RunState) -> list[str]:
    """What to say about the prediction of a run: how close it was, and each miss; empty without a prediction."""
    if state.prediction is None:
        return []
    found = outcomes(state)
    errors = [abs(one.error) for one in found if one.error is not None]
    why = unmeasured(state)
    said = [f"The prediction was made {how_made(state.prediction)}."]
    if errors:
        said = [f"Peak memory was predicted {how_made(state.prediction)}, with an error of at most {max(errors):.2%}."]
    elif why:
        said.append(f"Peak memory is not compared: {why}.")
    said += [
        f"Rank {one.rank}: predicted {size(one.peak_predicted)}, measured {size(one.peak_measured)}; {one.reason}."
        for one in found
        if one.reason and one.peak_predicted is not None and one.peak_measured is not None
    ]
    wrong = [one for one in found if one.sent_measured is not None and _differs(one.sent_predicted, one.sent_measured)]
    said += [
        f"Rank {one.rank} was predicted to send {size(one.sent_predicted or 0)} per step, and sent"
        f" {size(one.sent_measured or 0)}."
        for one in wrong
    ]
    return said


def notes(plan: Plan) -> list[str]:
    """What to say about the ranks with the highest peak: the model states by formula, and why the trace differs from
    them; on GPUs, what comes on top of the peak, as estimates with their sources. Empty without a trace."""
    part = max(plan["classes"], key=lambda one: one["step"]["peak"], default=None)
    return [note for note in (_against_formula(plan, part), _on_gpus(part)) if note] if part else []


def _against_formula(plan: Plan, part: PredictedClass) -> str:
    asked = plan["spec"]
    held = states(Spec.from_json(asked)) if asked.get("strategy") else None
    if held is None:
        return ""
    formula, peak = asdict(held[part["ranks"][0]]), part["step"]["at_peak"]
    gaps = {owner: peak.get(owner, 0) - formula.get(owner, 0) for owner in OWNERS}
    differ = [
        f"{owner} {_signed(gap)}" + (f" ({_WHY[owner][gap > 0]})" if owner in _WHY else "")
        for owner, gap in gaps.items()
        if round(gap)
    ]
    return (
        f"Rank {ranges(part['ranks'])}, model states by formula (16 bytes per parameter: 4 for itself, 4 for its"
        f" gradient, 8 for AdamW's moments): {', '.join(f'{owner} {size(held)}' for owner, held in formula.items())}."
        f" The traced peak differs: {', '.join(differ)}."
    )


def _on_gpus(part: PredictedClass) -> str:
    found = part.get("estimates", [])
    if not found:
        return ""
    parts = [f"{one['name']} {_range(one['low'], one['high'])} ({one['source']})" for one in found]
    total = _range(sum(one["low"] for one in found), sum(one["high"] for one in found))
    return f"Rank {ranges(part['ranks'])}, on top of the peak, estimated and not traced: {total}. {'; '.join(parts)}."


def _range(low: float, high: float) -> str:
    return size(low) if low == high else f"{size(low)} to {size(high)}"


def _differs(predicted: float | None, measured: float) -> bool:
    return predicted is not None and round(predicted) != round(measured)


def how_made(plan: Plan) -> str:
    """`by tracing the script without data` or `by formulas, because …`."""
    if plan["method"] == "simulated":
        early = plan.get("reason")
        return "by tracing the script without data (simulated)" + (f"; {early}" if early else "")
    return f"by formulas, because {plan.get('reason', 'there is no trace')}"


def ranges(ranks: Iterable[int]) -> str:
    """Numbers of ranks in short: `0–3, 7`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in parts)
