"""Runs that are slower, or take more memory, than they need."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose.advice import one_of
from labkit.analysis.diagnose.finding import DDP, Finding
from labkit.analysis.profiled import USUAL
from labkit.common.units import counted, ranks_in_words, size
from labkit.record.steps import Column, median

if TYPE_CHECKING:
    from labkit.record.columns import RankState
    from labkit.record.state import RunState

_RECENT = 50  # steps that are judged by
_WARM = 2  # first steps that are not
_ENOUGH = 8  # steps before anything is judged: a median of fewer is often the machine's mood
_DATA_SHARE = 0.3
_SLOWER = 1.5  # times the others' own time, for a straggler
_EXCESS = 0.2  # of a step, that its excess is at least
_EXPOSED = 0.4
_SAMPLES = 3  # profiled steps that need no confirmation by others
_FEW_BYTES = 1 << 20
_MANY_BUCKETS = 8
_DOMINATES = 0.6
_NOTABLE = 64 << 20  # bytes below which nobody needs to save memory
_OWN = ("data", "copy", "forward", "optimizer", "other")  # phases in which a rank waits for no other, as a rule


def input_bound(state: RunState) -> Iterator[Finding]:
    """Steps that begin with a long wait for data."""
    shares = {rank.rank: _data_share(rank) for rank in state.ranks.values() if len(rank.steps) >= _ENOUGH}
    slow = {rank: share for rank, share in shares.items() if share >= _DATA_SHARE}
    if not slow:
        return
    worst = max(slow, key=slow.__getitem__)
    yield Finding(
        name="input_bound",
        kind="slow",
        title=f"{slow[worst]:.0%} of a step is waiting for data",
        evidence=f"rank {worst}: {1e3 * _median(state.ranks[worst].steps.phases['data']):.1f} ms of "
        f"{1e3 * _median(state.ranks[worst].steps.seconds):.1f} ms (medians); {ranks_in_words(sorted(slow))} the same way",
        cause="a batch is fetched when the step before is over, and fetching takes long",
        fix=f"{one_of(state, 'workers', 'whole batches')}; or keep the data on a local disk",
        ranks=tuple(sorted(slow)),
    )


def _data_share(rank: RankState) -> float:
    whole = _median(rank.steps.seconds)
    return _median(rank.steps.phases["data"]) / whole if whole else 0.0


def straggler(state: RunState) -> Iterator[Finding]:
    """A rank that the others wait for, and the phase that it loses its time in."""
    ranks = [rank for rank in state.ranks.values() if len(rank.steps) >= _ENOUGH]
    if len(ranks) < 2 or _stages(ranks):
        return  # unlike by design
    own = {rank.rank: {phase: _median(rank.steps.phases[phase]) for phase in _OWN} for rank in ranks}
    total = {number: sum(phases.values()) for number, phases in own.items()}
    slowest = max(total, key=total.__getitem__)
    others = [seconds for number, seconds in total.items() if number != slowest]
    excess = total[slowest] - statistics.median(others)
    step = max(_median(rank.steps.seconds) for rank in ranks)
    if total[slowest] < _SLOWER * statistics.median(others) or excess < _EXCESS * step:
        return
    lost = {phase: own[slowest][phase] - statistics.median(own[number][phase] for number in own if number != slowest) for phase in _OWN}
    phase = max(lost, key=lost.__getitem__)
    yield Finding(
        name="straggler",
        kind="slow",
        title=f"rank {slowest} is slower than the others, in {phase}",
        evidence=f"its own work takes {1e3 * total[slowest]:.1f} ms a step, the others' {1e3 * statistics.median(others):.1f} ms "
        f"(medians); {1e3 * lost[phase]:.1f} ms of that in {phase}",
        cause="every collective waits for the last rank, so all ranks go at its pace",
        fix={
            "data": "look at this rank's share of the data and at its disk",
            "other": "look at what this rank does between the phases: logging, saving, an `if rank ==`",
        }.get(phase, "look at what else runs on this rank's device or core, and at its share of the batch"),
        ranks=(slowest,),
    )


def _stages(ranks: Sequence[RankState]) -> bool:
    """Whether ranks are the stages of a pipeline: they send to each other, or not all of them have a loss."""
    sends = any("send" in (rank.traffic or {"ops": {}})["ops"] for rank in ranks)
    return sends or len({rank.steps.has_loss for rank in ranks}) > 1


def communication_bound(state: RunState) -> Iterator[Finding]:
    """Steps of which a large part is exposed communication, on every rank.

    Only a few steps are profiled, and one of them may have been held up by something else. So either several profiled steps agree, or the
    phases of the steps that were not profiled leave room for as much: what a phase takes beyond the computing that the profile saw in it.
    """
    found = {rank.rank: _exposed(rank) for rank in state.ranks.values()}
    shares = {number: share for number, share in found.items() if share is not None}
    if not shares or len(shares) < len(found) or min(shares.values()) < _EXPOSED:
        return
    by_op: dict[str, float] = {}
    for rank in state.ranks.values():
        for op, start, end, *_ in _usual_steps(rank)[-1]["comm"]:
            by_op[op] = by_op.get(op, 0.0) + end - start
    op = max(by_op, key=by_op.__getitem__, default="")
    if op in ("", "send", "recv"):
        return  # a stage that waits for its neighbour: the pipeline's bubble
    rank = state.ranks[min(shares)]
    backend = _usual_steps(rank)[-1]["backend"]
    unprofiled = f"of {1e3 * _median(rank.steps.seconds):.1f} ms per step (median)" if len(rank.steps) >= _ENOUGH else "per step"
    yield Finding(
        name="communication_bound",
        kind="slow",
        title=f"at least {min(shares.values()):.0%} of a step is exposed communication",
        evidence=f"by rank, {unprofiled}: {', '.join(f'{share:.0%}' for share in shares.values())}, "
        f"from {counted(len(_usual_steps(rank)), 'profiled step')}; most of it in {op}" + (f" ({backend})" if backend else ""),
        cause="a step computes too little for the bytes that it sends, or computes nothing while they are sent",
        fix=one_of(state, "larger batch", "accumulate", "compress", "fewer ranks"),
        ranks=tuple(sorted(state.ranks)),
    )


def _usual_steps(rank: RankState) -> list[dict[str, Any]]:
    return [one for step, one in sorted(rank.timelines.items()) if step >= USUAL and one["seconds"] > 0]


def _exposed(rank: RankState) -> float | None:
    """The share of a step that is exposed communication; None if it is not known, or known from a single step that nothing confirms."""
    profiled = _usual_steps(rank)
    if not profiled:
        return None
    share = statistics.median(sum(one["exposed"].values()) / one["seconds"] for one in profiled)
    if len(rank.steps) >= _ENOUGH:
        return min(share, statistics.median(_confirmed(rank, one) for one in profiled))
    return share if len(profiled) >= _SAMPLES else None


def _confirmed(rank: RankState, one: Mapping[str, Any]) -> float:
    """The share of an unprofiled step in which communication was exposed, if each phase computed as much as in the profiled step."""
    whole, exposed = _median(rank.steps.seconds), 0.0
    spent: dict[str, float] = {}
    for name, start, end in one["phases"]:
        spent[name] = spent.get(name, 0.0) + end - start
    for phase, seconds in one["exposed"].items():
        computed = max(0.0, spent.get(phase, 0.0) - seconds)
        usual = _median(rank.steps.phases[phase]) if phase in rank.steps.phases else 0.0
        exposed += min(seconds, max(0.0, usual - computed))
    return exposed / whole if whole else 0.0


def small_buckets(state: RunState) -> Iterator[Finding]:
    """Many small all-reduces where few large ones would do."""
    for rank in state.ranks.values():
        ops = (rank.traffic or {"ops": {}})["ops"].get("all_reduce")
        if not ops or not any(model["name"] == DDP for model in rank.models):
            continue
        mean = ops["bytes"] / max(ops["calls"], 1)
        if ops["calls"] >= _MANY_BUCKETS and mean < _FEW_BYTES:
            yield Finding(
                name="small_buckets",
                kind="slow",
                title=f"gradients go out in {ops['calls']:.0f} buckets of {size(mean)}",
                evidence=f"all-reduces of one step on rank {rank.rank}, {size(ops['bytes'])} in all",
                cause="each collective costs its latency, however little it carries",
                fix=f"{one_of(state, 'larger buckets')}; small buckets help only if the first must start early",
                ranks=(rank.rank,),
            )
            return


def synchronised(state: RunState) -> Iterator[Finding]:
    """A script that reads a tensor's value in every step."""
    for rank in state.ranks.values():
        seen = rank.seen("item")
        if not seen or seen[0]["calls"] < 0.9 * seen[0]["steps"]:
            continue
        on_gpu = rank.device.startswith("cuda")
        yield Finding(
            name="synchronised",
            kind="slow",
            title="`.item()` waits for the device in every step",
            evidence=f"called between the phases of {seen[0]['calls']} of {seen[0]['steps']} steps on rank {rank.rank}",
            cause="a value can be read when the device has computed it, so that no work is queued meanwhile"
            if on_gpu
            else "on CPU ranks it costs nothing; on a GPU no work would be queued meanwhile",
            fix="keep loss.detach(), and read it every 20 steps",
            ranks=(rank.rank,),
        )
        return


def one_unit(state: RunState) -> Iterator[Finding]:
    """FSDP around a whole model and nothing inside it: all of it is gathered at once."""
    for rank in state.ranks.values():
        whole = next((model for model in rank.models if model["units"] == 1), None)
        if whole is not None:
            yield Finding(
                name="one_unit",
                kind="memory",
                title=f"FSDP shards {whole['name']} as one unit",
                evidence=f"rank {rank.rank} holds {whole['parameters']:,} parameters in one unit",
                cause="a unit is gathered as a whole before it computes: the peak holds all parameters, and no gathering overlaps",
                fix="call fully_shard(block) for each block before fully_shard(model); under FSDP1 use an auto_wrap_policy that wraps "
                "each block (size_based_auto_wrap_policy needs a min_num_params below the size of a block)",
                ranks=(rank.rank,),
            )
            return


def activations(state: RunState) -> Iterator[Finding]:
    """A peak that is mostly activations: what no sharding of parameters saves."""
    sampled = [rank for rank in state.ranks.values() if rank.memory_step]
    if not sampled:
        return
    rank = max(sampled, key=lambda one: one.memory_step["peak"])
    peak, held = rank.memory_step["peak"], rank.memory_step["at_peak"].get("activations", 0)
    if peak < _NOTABLE or held < _DOMINATES * peak:
        return
    yield Finding(
        name="activations",
        kind="memory",
        title=f"{held / peak:.0%} of the peak are activations",
        evidence=f"rank {rank.rank}: {size(held)} of {size(peak)}, in step {rank.memory_step['step']}",
        cause="they grow with the batch, and no sharding of parameters, gradients or optimizer state makes them less",
        fix=one_of(state, "checkpoint activations", "accumulate for memory", "smaller batch", "sequence parallel"),
        ranks=(rank.rank,),
    )


def _median(column: Column) -> float:
    """The median over the newest steps, without the first that warm up."""
    value = median(column, max(_WARM, len(column) - _RECENT))
    return 0.0 if math.isnan(value) else value
