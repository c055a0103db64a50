"""Runs that are slower, or take more memory, than they need to, and experts whose load is uneven."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from labkit.analysis.diagnose.finding import DDP, Finding, one_of
from labkit.analysis.metrics import (
    USUAL,
    counted_steps,
    expert_loads,
    median,
    phase_seconds,
    phase_seconds_of_parts,
    step_seconds,
    summed,
)
from labkit.analysis.profiled import seconds_by_phase
from labkit.common.units import counted, ranks_in_words, size
from labkit.record.events import Item, Loader

if TYPE_CHECKING:
    from labkit.record.events import Timeline
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState


# ---- mixtures of experts whose load is uneven


_UNEVEN = 2.0  # times the mean load, for the busiest expert
_BALANCED = 20  # steps before the load is judged: a new router needs some to balance it


def uneven_experts(state: RunState) -> Iterator[Finding]:
    """A mixture of experts whose busiest expert is chosen at least twice as often as the mean."""
    step, loads = expert_loads(state)
    total = summed(loads)
    mean = sum(total.values()) / max(len(total), 1)
    if step < _BALANCED or not mean:
        return
    busiest = max(total, key=total.__getitem__)
    idle = sum(load < mean / _UNEVEN for load in total.values())
    if total[busiest] >= _UNEVEN * mean:
        yield Finding(
            name="uneven_experts",
            kind="slow",
            title=f"expert {busiest} is chosen {total[busiest] / mean:.1f} times as often as the mean of the experts",
            evidence=f"step {step}, all layers and ranks: {total[busiest]:,.0f} choices of expert {busiest},"
            f" {mean:,.0f} per expert on average; {idle} of {len(total)} experts are chosen less than half as often as"
            " the mean",
            cause="an expert that is chosen more often is trained more and chosen even more often; choices beyond its"
            " slots are dropped, and without a limit the other ranks would wait for its rank",
            fix=one_of(state, "balance experts", "more slots"),
        )


# ---- runs that are slower, or take more memory, than they need to


_ENOUGH = 7  # steps, without the warm-up, before anything is judged: a median of fewer is noise
_LONG = 2.0  # seconds of such steps, before a rank is called slow: in less, another process may have delayed it
_DATA_SHARE = 0.3
_SLOWER = 1.5  # times the other ranks' own time, for a straggler
_EXCESS = 0.2  # least excess of a straggler, as a share of the step
_PARTS = 3  # of the steps, in each of which a straggler is the slowest: another process delays a rank for a while
_EXPOSED = 0.4
_SAMPLES = 3  # profiled steps that need no confirmation by unprofiled ones
_FEW_BYTES = 1 << 20
_MANY_BUCKETS = 8
_DOMINATES = 0.6
_NOTABLE = 64 << 20  # bytes below which memory need not be saved
_OWN = ("data", "copy", "forward", "optimizer", "other")  # phases in which a rank usually waits for no other


def input_bound(state: RunState) -> Iterator[Finding]:
    """Steps that start with a long wait for data."""
    shares = {rank.rank: _data_share(state, rank.rank) for rank in state.ranks.values() if _is_judged(rank)}
    slow = {rank: share for rank, share in shares.items() if share >= _DATA_SHARE}
    if not slow:
        return
    worst = max(slow, key=slow.__getitem__)
    loaders = state.ranks[worst].seen(Loader) if state.asked is None else []
    workers = min((loader.workers for loader in loaders), default=0)
    yield Finding(
        name="input_bound",
        kind="slow",
        title=f"rank {worst} spends {slow[worst]:.0%} of each step waiting for data",
        evidence=f"rank {worst}: {1e3 * _phases(state, worst)['data']:.1f} ms of {1e3 * _step(state, worst):.1f} ms per"
        f" step (medians); {_DATA_SHARE:.0%} or more on {ranks_in_words(sorted(slow))}",
        cause=(
            f"{counted(workers, 'worker')} of the DataLoader cannot load batches as fast as they are trained on"
            if workers
            else "each batch is loaded only after the previous step has ended, and loading is slow"
        ),
        fix=(
            "set a larger num_workers if there are free cores, and persistent_workers=True if epochs are short"
            if workers
            else one_of(state, "workers", "whole batches")
        )
        + "; or store the data on a local disk",
        ranks=tuple(sorted(slow)),
    )


def _is_judged(rank: RankState) -> bool:
    return counted_steps(rank) >= _ENOUGH


def _is_long(state: RunState, rank: RankState) -> bool:
    """Whether the counted steps took long enough to compare ranks, or computation with communication."""
    return counted_steps(rank) * _step(state, rank.rank) >= _LONG


def _step(state: RunState, number: int) -> float:
    """The current seconds of a step of a rank; 0 if unknown."""
    return step_seconds(state, number, now=True) or 0.0


def _phases(state: RunState, number: int) -> dict[str, float]:
    """The current seconds of each phase of a rank; 0 if unknown."""
    return {phase: seconds or 0.0 for phase, seconds in phase_seconds(state, number, now=True).items()}


def _data_share(state: RunState, number: int) -> float:
    whole = _step(state, number)
    return _phases(state, number)["data"] / whole if whole else 0.0


def straggler(state: RunState) -> Iterator[Finding]:
    """A rank that the others wait for, and the phase in which it loses time."""
    ranks = [rank for rank in state.ranks.values() if _is_judged(rank)]
    if len(ranks) < 2 or _stages(ranks):
        return  # different by design
    own = {rank.rank: {phase: _phases(state, rank.rank)[phase] for phase in _OWN} for rank in ranks}
    total = {number: sum(phases.values()) for number, phases in own.items()}
    slowest = max(total, key=total.__getitem__)
    others = [seconds for number, seconds in total.items() if number != slowest]
    excess = total[slowest] - median(others)
    step = max(_step(state, rank.rank) for rank in ranks)
    if not all(_is_long(state, rank) for rank in ranks):
        return
    if (
        total[slowest] < _SLOWER * median(others)
        or excess < _EXCESS * step
        or not _always_slowest(state, total, slowest)
    ):
        return
    lost = {
        phase: own[slowest][phase] - median(own[number][phase] for number in own if number != slowest) for phase in _OWN
    }
    phase = max(lost, key=lost.__getitem__)
    where = "outside the measured phases" if phase == "other" else f"in {phase}"
    yield Finding(
        name="straggler",
        kind="slow",
        title=f"rank {slowest} is slower than the other ranks, {where}",
        evidence=f"its own work takes {1e3 * total[slowest]:.1f} ms per step, the other ranks' "
        f"{1e3 * median(others):.1f} ms (medians); {1e3 * lost[phase]:.1f} ms of the difference {where}",
        cause="every collective waits for the slowest rank, so all ranks run at its speed",
        fix={
            "data": "check the size of this rank's data shard, and its disk",
            "other": "move work off this rank that it does between the phases: logging, saving, an `if rank ==`",
        }.get(
            phase,
            "stop other processes on this rank's device or core, and check that its batch is not larger than the"
            " others'",
        ),
        ranks=(slowest,),
    )


def _always_slowest(state: RunState, ranks: Iterable[int], slowest: int) -> bool:
    """Whether a rank's own work takes longer than that of the others in each part of the steps."""
    parts = {rank: phase_seconds_of_parts(state, rank, _PARTS) for rank in ranks}
    totals = [
        {rank: sum(of_rank[part][phase] for phase in _OWN) for rank, of_rank in parts.items()} for part in range(_PARTS)
    ]
    return all(
        total[slowest] >= _SLOWER * median(seconds for rank, seconds in total.items() if rank != slowest)
        for total in totals
    )


def _stages(ranks: Sequence[RankState]) -> bool:
    """Whether the ranks are pipeline stages: they send to each other, or only some of them have a loss."""
    sends = any(rank.traffic is not None and "send" in rank.traffic.ops for rank in ranks)
    return sends or len({rank.steps.has_loss for rank in ranks}) > 1


def communication_bound(state: RunState) -> Iterator[Finding]:
    """Steps in which communication is exposed for a large part of the time, on every rank.

    Only a few steps are profiled, and one of them may have been delayed by something else. The finding therefore
    requires either that several profiled steps agree, or that the phases of the unprofiled steps exceed their profiled
    computation by as much.
    """
    found = {rank.rank: _exposed(state, rank) for rank in state.ranks.values()}
    shares = {number: share for number, share in found.items() if share is not None}
    if any(_is_judged(rank) and not _is_long(state, rank) for rank in state.ranks.values()):
        return
    if not shares or len(shares) < len(found) or min(shares.values()) < _EXPOSED:
        return
    by_op: dict[str, float] = {}
    for rank in state.ranks.values():
        for call in _usual_steps(rank)[-1].comm:
            by_op[call.op] = by_op.get(call.op, 0.0) + call.end - call.start
    op = max(by_op, key=by_op.__getitem__, default="")
    if op in ("", "send", "recv"):
        return  # a stage waits for its neighbour: the pipeline bubble
    rank = state.ranks[min(shares)]
    backend = _usual_steps(rank)[-1].backend
    unprofiled = f"of {1e3 * _step(state, rank.rank):.1f} ms per step (median)" if _is_judged(rank) else "per step"
    yield Finding(
        name="communication_bound",
        kind="slow",
        title=f"communication is exposed for at least {min(shares.values()):.0%} of each step, on every rank",
        evidence=(
            f"by rank, {unprofiled}: {', '.join(f'{share:.0%}' for share in shares.values())}, "
            f"from {counted(len(_usual_steps(rank)), 'profiled step')}; mostly {op}"
        )
        + (f" ({backend})" if backend else ""),
        cause="a step computes too little for the bytes that it sends, or the computation does not overlap with the "
        "communication",
        fix=one_of(state, "larger batch", "accumulate", "compress", "fewer ranks"),
        ranks=tuple(sorted(state.ranks)),
    )


def _usual_steps(rank: RankState) -> list[Timeline]:
    return [timeline for step, timeline in sorted(rank.timelines.items()) if step >= USUAL and timeline.seconds > 0]


def _exposed(state: RunState, rank: RankState) -> float | None:
    """The share of a step that is exposed communication; None if unknown, or known only from profiled steps that
    nothing confirms."""
    profiled = _usual_steps(rank)
    if not profiled:
        return None
    share = median(sum(timeline.exposed.values()) / timeline.seconds for timeline in profiled)
    if _is_judged(rank):
        return min(share, median(_confirmed(state, rank, timeline) for timeline in profiled))
    return share if len(profiled) >= _SAMPLES else None


def _confirmed(state: RunState, rank: RankState, timeline: Timeline) -> float:
    """The exposed share of an unprofiled step, if each of its phases computed as long as in the profiled step."""
    whole, phases, exposed = _step(state, rank.rank), _phases(state, rank.rank), 0.0
    spent = seconds_by_phase(timeline.phases)
    for phase, seconds in timeline.exposed.items():
        computed = max(0.0, spent.get(phase, 0.0) - seconds)
        exposed += min(seconds, max(0.0, phases.get(phase, 0.0) - computed))
    return exposed / whole if whole else 0.0


def small_buckets(state: RunState) -> Iterator[Finding]:
    """Many small all-reduces where a few large ones would do."""
    for rank in state.ranks.values():
        reduced = rank.traffic.ops.get("all_reduce") if rank.traffic else None
        if not reduced or not any(model.name == DDP for model in rank.models):
            continue
        mean = reduced.bytes / max(reduced.calls, 1)
        if reduced.calls >= _MANY_BUCKETS and mean < _FEW_BYTES:
            yield Finding(
                name="small_buckets",
                kind="slow",
                title=f"rank {rank.rank} sends its gradients in {reduced.calls:.0f} buckets of {size(mean)}",
                evidence=f"all-reduces of one step on rank {rank.rank}, {size(reduced.bytes)} in total",
                cause="every collective has a fixed latency, however few bytes it sends",
                fix=f"{one_of(state, 'larger buckets')}; small buckets help only if the first one must start early",
                ranks=(rank.rank,),
            )
            return


def synchronised(state: RunState) -> Iterator[Finding]:
    """A script that reads a tensor's value in every step, and thereby waits for a GPU."""
    seen = {rank.rank: rank.seen(Item)[:1] for rank in state.ranks.values() if rank.device.startswith("cuda")}
    found = {number: items[0] for number, items in seen.items() if items and items[0].calls >= 0.9 * items[0].steps}
    if found:
        first = next(iter(found.values()))
        yield Finding(
            name="synchronised",
            kind="slow",
            title=f"{ranks_in_words(sorted(found))} {'waits' if len(found) == 1 else 'wait'} for "
            f"{'its' if len(found) == 1 else 'their'} device in every step: `.item()`",
            evidence=f"called between the phases in {first.calls} of {first.steps} steps",
            cause="a value can be read only after the device has computed it, and no work is queued meanwhile",
            fix="store loss.detach() and call .item() on it only every 20 steps",
            ranks=tuple(sorted(found)),
        )


def one_unit(state: RunState) -> Iterator[Finding]:
    """FSDP around the whole model only: all of it is gathered at once."""
    for rank in state.ranks.values():
        whole = next((model for model in rank.models if model.units == 1), None)
        if whole is not None:
            yield Finding(
                name="one_unit",
                kind="memory",
                title=f"FSDP shards {whole.name} as one unit on rank {rank.rank}",
                evidence=f"rank {rank.rank} has {whole.parameters:,} parameters in one unit",
                cause="a unit is gathered as a whole before it computes: the peak contains all parameters, and no "
                "all-gather overlaps with compute",
                fix="call fully_shard(block) for each block before fully_shard(model); with FSDP1 use an "
                "auto_wrap_policy that wraps each block (size_based_auto_wrap_policy needs a min_num_params below the "
                "size of a block)",
                ranks=(rank.rank,),
            )
            return


def activations(state: RunState) -> Iterator[Finding]:
    """A peak that is mostly activations, which sharding of parameters does not reduce."""
    profiled = [(rank, rank.memory_step) for rank in state.ranks.values() if rank.memory_step]
    if not profiled:
        return
    rank, step = max(profiled, key=lambda pair: pair[1].peak)
    peak, held = step.peak, step.at_peak.get("activations", 0)
    if peak < _NOTABLE or held < _DOMINATES * peak:
        return
    yield Finding(
        name="activations",
        kind="memory",
        title=f"activations take {held / peak:.0%} of the peak memory of rank {rank.rank}",
        evidence=f"rank {rank.rank}: {size(held)} of {size(peak)}, in step {step.step}",
        cause="activations grow with the batch; sharding parameters, gradients or optimizer state does not reduce them",
        fix=one_of(state, "checkpoint activations", "accumulate for memory", "smaller batch", "sequence parallel"),
        ranks=(rank.rank,),
    )
