"""The prediction of a run against its measurement, per rank, and one sentence about each miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from labkit.analysis.metrics import (
    against_prediction,
    flops_in_words,
    phase_seconds,
    predicted_efficiency,
    step_seconds,
)
from labkit.analysis.profiled import seconds_by_phase
from labkit.analysis.theory.formulas import states
from labkit.common.units import milliseconds, size
from labkit.record.documents import Plan, PredictedClass, PredictedRank, PredictedTimeline, PredictionOutcome
from labkit.record.events import Timeline
from labkit.record.ranks import RankState
from labkit.record.state import RunState, per_revision
from labkit.record.writer import OWNERS, PHASES

# why an owner at the peak is smaller, and larger, than its formula
_WHY = {
    "parameters": ("freed or in another type", "gathered from other ranks"),
    "gradients": ("not computed or already freed then", "not yet reduced to a shard, or in two copies"),
    "optimizer": ("not created, or in CPU memory", "step counts, or other state"),
    "other": ("not there then", "temporary tensors; on a GPU also workspaces of cuBLAS and the unused ends of blocks"),
}
CLOSE = 0.02  # share of the measured peak; a smaller error needs no reason
CLOSE_STEP = 0.08  # share of the measured step
_SMALL = 0.1  # share of the error; smaller differences of an owner or a phase are not named


@dataclass(frozen=True)
class Outcome:
    """Bytes at the peak of a step, bytes sent per step, and seconds of a step, of one rank: predicted and measured. On
    a GPU the measured peak is that of torch's allocator. `error` and `step_error` are the predicted value over the
    measured one, minus 1. `reason` names the owners in which a peak differs by more than 2 %, `step_reason` the
    phases in which a step differs by more than 8 %; they are empty for closer ones. Unknown values are None."""

    rank: int
    peak_predicted: float | None
    peak_measured: float | None
    error: float | None
    sent_predicted: float | None
    sent_measured: float | None
    reason: str
    step_predicted: float | None
    step_measured: float | None
    step_error: float | None
    step_reason: str

    def recorded(self) -> PredictionOutcome:
        """The outcome as the summary has it."""
        return PredictionOutcome(**asdict(self))


@per_revision
def outcomes(state: RunState) -> tuple[Outcome, ...]:
    """The outcome of each rank; empty for a run without a prediction. Ranks whose peak is `unmeasured` have none."""
    plan = state.prediction
    if plan is None:
        return ()
    timelines, hidden = predicted_timelines(plan), bool(unmeasured(state))
    return tuple(
        _outcome(predicted, state.ranks.get(predicted.rank), hidden, _step(state, predicted.rank, timelines))
        for predicted in plan.ranks
    )


def unmeasured(state: RunState) -> str:
    """Why the measured peaks of a run are not complete, so that they are not compared; empty if they are."""
    if state.in_threads and any(rank.device.startswith("cpu") for rank in state.ranks.values()):
        return "the threads of the replicas allocate memory, which torch's profiler does not record"
    return state.asked.strategy_row.unmeasured(state.asked) if state.asked else ""


def predicted_timelines(plan: Plan) -> dict[int, PredictedTimeline]:
    """The simulated step of each rank; empty if its time was not predicted."""
    return {rank: part.timeline for part in plan.classes if part.timeline for rank in part.ranks}


def as_profiled(timeline: PredictedTimeline) -> Timeline:
    """A simulated step in the form of a profiled one."""
    return Timeline(
        t=0.0,
        rank=0,
        step=0,
        t0=0.0,
        seconds=timeline.seconds,
        phases=timeline.phases,
        comm=timeline.comm,
        marks=[],
        busy=timeline.busy,
        exposed=timeline.exposed,
    )


def _step(
    state: RunState, rank: int, timelines: Mapping[int, PredictedTimeline]
) -> tuple[float | None, float | None, float | None, str]:
    """Seconds of a step, predicted and measured, the error, and where a large one comes from."""
    timeline = timelines.get(rank)
    measured = step_seconds(state, rank) if rank in state.ranks else None
    if timeline is None or not measured:
        return (timeline.seconds if timeline else None), measured, None, ""
    error = timeline.seconds / measured - 1
    if abs(error) <= CLOSE_STEP:
        return timeline.seconds, measured, error, ""
    spent = dict.fromkeys(PHASES, 0.0) | seconds_by_phase(timeline.phases)
    taken = {phase: seconds or 0.0 for phase, seconds in phase_seconds(state, rank).items()}
    return timeline.seconds, measured, error, _differences("per step", taken, spent, milliseconds)


def _outcome(
    predicted: PredictedRank,
    rank: RankState | None,
    hidden: bool,
    times: tuple[float | None, float | None, float | None, str],
) -> Outcome:
    step, traffic = (rank.memory_step, rank.traffic) if rank else (None, None)
    if hidden:
        step = None
    peak, measured = predicted.peak_memory_bytes, step.peak if step else None
    if rank and rank.device.startswith("cuda"):
        measured = rank.peak_memory  # of the allocator
    error = peak / measured - 1 if peak is not None and measured else None
    reason = ""
    if step and error is not None and abs(error) > CLOSE:
        reason = _differences("at the peak", step.at_peak, predicted.at_peak, _size)
    sent = sum(operation.sent for operation in traffic.ops.values()) if traffic else None
    return Outcome(predicted.rank, peak, measured, error, predicted.comm_bytes_per_step, sent, reason, *times)


_size = partial(size, digits=2)


def _signed(gap: float, words: Callable[[float], str]) -> str:
    """`+3.1 MiB`"""
    return f"{'+' if gap >= 0 else '−'}{words(abs(gap))}"


def _differences(
    when: str, measured: Mapping[str, float], predicted: Mapping[str, float], words: Callable[[float], str]
) -> str:
    """`measured minus predicted, at the peak: activations +3.1 MiB, other −0.2 MiB`; without small differences."""
    gaps = {name: measured.get(name, 0) - predicted.get(name, 0) for name in {**predicted, **measured}}
    least = _SMALL * max(map(abs, gaps.values()), default=0)
    named = [f"{name} {_signed(gap, words)}" for name, gap in gaps.items() if abs(gap) > least]
    return f"measured minus predicted, {when}: {', '.join(named)}"


def sentences(state: RunState) -> list[str]:
    """What to say about the prediction of a run: how close it was, and each miss; empty without a prediction."""
    if state.prediction is None:
        return []
    found = outcomes(state)
    errors = [abs(outcome.error) for outcome in found if outcome.error is not None]
    why = unmeasured(state)
    said = [f"The prediction was made {how_made(state.prediction)}."]
    if errors:
        said = [f"Peak memory was predicted {how_made(state.prediction)}, with an error of at most {max(errors):.2%}."]
    elif why:
        said.append(f"Peak memory is not compared: {why}.")
    said += [
        f"Rank {outcome.rank}: predicted {size(outcome.peak_predicted)}, measured {size(outcome.peak_measured)};"
        f" {outcome.reason}."
        for outcome in found
        if outcome.reason and outcome.peak_predicted is not None and outcome.peak_measured is not None
    ]
    steps = [outcome for outcome in found if outcome.step_error is not None]
    if steps:
        worst = max(steps, key=lambda outcome: abs(outcome.step_error or 0.0))
        predicted, measured = worst.step_predicted or 0.0, worst.step_measured or 0.0
        why = f"; {worst.step_reason}" if worst.step_reason else ""
        said.append(
            f"A step was predicted to take {milliseconds(predicted)}, and took {milliseconds(measured)}"
            f" ({worst.step_error:+.1%}){why}."
        )
    said += against_prediction(state, state.prediction)
    for outcome in found:
        if outcome.sent_predicted is not None and outcome.sent_measured is not None:
            predicted_size, measured_size = size(outcome.sent_predicted), size(outcome.sent_measured)
            if predicted_size != measured_size:
                said.append(
                    f"Rank {outcome.rank} was predicted to send {predicted_size} per step, and sent {measured_size}."
                )
    return said


def notes(plan: Plan) -> list[str]:
    """What to say about the ranks with the highest peak: the model states by formula, and why the trace differs from
    them; on GPUs, what comes on top of the peak, as estimates with their sources; the model FLOPs of a step;
    whether the ranks fit. Empty without a trace."""
    part = max(plan.classes, key=lambda part: part.step.peak, default=None)
    if part is None:
        return []
    return [note for note in (_against_formula(plan, part), _on_gpus(part), _fit(plan), flops_in_words(plan)) if note]


def _against_formula(plan: Plan, part: PredictedClass) -> str:
    asked = plan.spec
    held = states(asked.to_spec()) if asked.strategy else None
    if held is None:
        return ""
    formula, peak = asdict(held[part.ranks[0]]), part.step.at_peak
    gaps = {owner: peak.get(owner, 0) - formula.get(owner, 0) for owner in OWNERS}
    differ = [
        f"{owner} {_signed(gap, _size)}" + (f" ({_WHY[owner][gap > 0]})" if owner in _WHY else "")
        for owner, gap in gaps.items()
        if round(gap)
    ]
    return (
        f"Rank {ranges(part.ranks)}, model states by formula (16 bytes per parameter: 4 for itself, 4 for its"
        f" gradient, 8 for AdamW's moments): {', '.join(f'{owner} {size(held)}' for owner, held in formula.items())}."
        f" The traced peak differs: {', '.join(differ)}."
    )


def _on_gpus(part: PredictedClass) -> str:
    found = part.estimates
    if not found:
        return ""
    parts = [f"{estimate.name} {_range(estimate.low, estimate.high)} ({estimate.source})" for estimate in found]
    total = _range(sum(estimate.low for estimate in found), sum(estimate.high for estimate in found))
    return f"Rank {ranges(part.ranks)}, on top of the peak, estimated and not traced: {total}. {'; '.join(parts)}."


def _fit(plan: Plan) -> str:
    """Whether the ranks fit into the memory of their devices."""
    memory = plan.memory
    if memory is None:
        return ""
    needed, limit = _range(memory.low_bytes, memory.high_bytes), memory.limit_bytes
    if limit is None:
        return f"Whether the ranks fit is not known: {memory.source}."
    verdict = {True: "The ranks fit", False: "The ranks do not fit", None: "The ranks may fit"}[plan.fits]
    return f"{verdict}: they need {needed} of {size(limit)} ({memory.source})."


def _range(low: float, high: float) -> str:
    return size(low) if low == high else f"{size(low)} to {size(high)}"


def how_made(plan: Plan) -> str:
    """`by tracing the script without data` or `by formulas, because …`."""
    if plan.method == "simulated":
        early = plan.reason
        return "by tracing the script without data (simulated)" + (f"; {early}" if early else "")
    return f"by formulas, because {plan.reason or 'there is no trace'}"


def step_in_words(plan: Plan) -> str:
    """`a step takes 153 ms (148 ms to 160 ms), 1,670 samples/s, 0.0512 TFLOP/s, MFU 31.0 % per device`; empty if it is
    not known."""
    time = plan.time
    if time is None:
        return ""
    found = predicted_efficiency(plan, plan.spec.to_spec())
    seconds = milliseconds(time.seconds)
    if time.low is not None and time.high is not None:
        seconds += f" ({milliseconds(time.low)} to {milliseconds(time.high)})"
    return ", ".join([f"a step takes {seconds}", *found.words])


def time_made(plan: Plan) -> str:
    """How the time of a step was computed: `simulated, with …` or `modelled for …`; empty if it is not known."""
    if plan.time is None:
        return ""
    on = plan.time.links
    if plan.time.modelled:
        return f"modelled for {on}: the roofline of each traced kernel and the links, without loading samples"
    measured = f"and links measured on {on}" if on else "measured here"
    busy = (
        f"; something else used the machine for {plan.time.busy:.0%} of that measurement, so that the range is wider:"
        " predict again while it is idle"
        if plan.time.busy
        else ""
    )
    return f"simulated for a machine that runs nothing else, with computation {measured}{busy}"


def ranges(ranks: Iterable[int]) -> str:
    """Numbers of ranks in short: `0–3, 7`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in parts)
