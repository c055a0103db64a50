"""Runs that are slower, or take more memory, than they need."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from labkit.diagnose.finding import DDP, Finding, ranks_in_words
from labkit.sampled import USUAL
from labkit.units import size

if TYPE_CHECKING:
    from labkit.columns import RankState
    from labkit.state import RunState

_RECENT = 50  # steps that are judged by
_WARM = 2  # first steps that are not
_ENOUGH = 8  # steps before anything is judged: a median of fewer is often the machine's mood
_DATA_SHARE = 0.3
_SLOWER = 1.5  # times the others' own time, for a straggler
_EXCESS = 0.2  # of a step, that its excess is at least
_EXPOSED = 0.4
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
        way_out="workers=2 fetches ahead in processes of their own; fetch=batches takes a batch at once; keep the data on a local disk",
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
        way_out={
            "data": "look at this rank's share of the data and at its disk",
            "other": "look at what this rank does between the phases: logging, saving, an `if rank ==`",
        }.get(phase, "look at what else runs on this rank's device or core, and at its share of the batch"),
        ranks=(slowest,),
    )


def _stages(ranks: Sequence[RankState]) -> bool:
    """Whether ranks are the stages of a pipeline: they send to each other, or not all of them have a loss."""
    sends = any("send" in (rank.traffic or {"ops": {}})["ops"] for rank in ranks)
    return sends or len({all(math.isnan(loss) for loss in rank.steps.loss) for rank in ranks}) > 1


def communication_bound(state: RunState) -> Iterator[Finding]:
    """Steps of which much is waiting for collectives, on every rank."""
    shares, by_op, backend = [], {}, ""
    for rank in state.ranks.values():
        usual = [one for step, one in rank.timelines.items() if step >= USUAL and one["seconds"] > 0]
        if not usual:
            return
        shares.append(statistics.median(sum(one["exposed"].values()) / one["seconds"] for one in usual))
        for op, start, end, *_ in usual[-1]["comm"]:
            by_op[op] = by_op.get(op, 0.0) + end - start
        backend = usual[-1]["backend"] or backend
    if not shares or not by_op or min(shares) < _EXPOSED:
        return
    op = max(by_op, key=by_op.__getitem__)
    if op in ("send", "recv"):
        return  # a stage that waits for its neighbour: the pipeline's bubble
    yield Finding(
        name="communication_bound",
        kind="slow",
        title=f"{min(shares):.0%} of a step or more is communication that nothing hides",
        evidence=f"sampled steps, by rank: {', '.join(f'{share:.0%}' for share in shares)}; most of it in {op} ({backend})",
        cause="there is too little to compute for what is sent in a step, or nothing to compute while it is sent",
        way_out="a larger batch or accumulate=4 (fewer exchanges for as many samples), compression=fp16 for ddp, or fewer ranks",
        ranks=tuple(sorted(state.ranks)),
    )


def small_buckets(state: RunState) -> Iterator[Finding]:
    """Many small all-reduces where few large ones would do."""
    for rank in state.ranks.values():
        models = rank.seen("model")
        ops = (rank.traffic or {"ops": {}})["ops"].get("all_reduce")
        if not ops or not models or models[-1]["name"] != DDP:
            continue
        mean = ops["bytes"] / max(ops["calls"], 1)
        if ops["calls"] >= _MANY_BUCKETS and mean < _FEW_BYTES:
            yield Finding(
                name="small_buckets",
                kind="slow",
                title=f"gradients go out in {ops['calls']:.0f} buckets of {size(mean)}",
                evidence=f"all-reduces of one step on rank {rank.rank}, {size(ops['bytes'])} in all",
                cause="each collective costs its latency, however little it carries",
                way_out="a larger bucket_mb (25 is DDP's own); small ones help only where the first must start early",
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
            way_out="keep loss.detach(), and read it every 20 steps",
            ranks=(rank.rank,),
        )
        return


def one_unit(state: RunState) -> Iterator[Finding]:
    """FSDP around the whole model alone: all of it is gathered at once."""
    for rank in state.ranks.values():
        models = rank.seen("model")
        if models and models[-1]["units"] == 1:
            yield Finding(
                name="one_unit",
                kind="memory",
                title="FSDP has one unit only",
                evidence=f"rank {rank.rank}: {models[-1]['parameters']:,} parameters of its own in one unit",
                cause="a unit is gathered whole before it computes, so the peak has all parameters, and nothing is computed meanwhile",
                way_out="shard each block too: fully_shard(block) for all of them before fully_shard(model); FSDP1: an auto_wrap_policy",
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
        way_out="checkpoint_activations=true, a smaller batch with accumulate, or for gpt sequence_parallel=true under tp",
        ranks=(rank.rank,),
    )


def _median(column: Sequence[float]) -> float:
    """The median over the newest steps, without the first that warm up."""
    known = [value for value in column[max(_WARM, len(column) - _RECENT) :] if not math.isnan(value)]
    return statistics.median(known) if known else 0.0
