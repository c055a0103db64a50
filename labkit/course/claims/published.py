"""Claims that published runs can judge (`labkit atlas`): runs are compared that differ in one factor only, and in what
follows from it.

One run of each pair is seldom repeated, and repetitions differ by a third and more. Verdicts therefore follow from many
pairs, and each says what its runs have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields

from labkit.analysis.metrics import median, quartiles
from labkit.common.units import counted
from labkit.course.claims.computed import modelled_speeds
from labkit.course.claims.measured import Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, PARTLY, Ruling
from labkit.prediction.scale.atlas import common, failed, published, speed
from labkit.prediction.scale.published import Published

MOST_GPUS = 256
_MOSTLY, _OFTEN = 0.9, 0.5  # the shares of pairs from which a claim holds, and holds in part

Speeds = Mapping[Hashable, Mapping[int, list[float]]]


def usable() -> tuple[Published, ...]:
    """The published runs that are compared."""
    return tuple(run for run in published()[0] if run.training.devices <= MOST_GPUS)


def matched(
    runs: Iterable[Published], factor: Callable[[Published], int], *follow: str, on_gpus: bool = True
) -> dict[Hashable, dict[int, list[Published]]]:
    """The runs with the same source, model, machine, batch, layout and (`on_gpus`) number of GPUs, except for fields of
    the layout that `follow` from the factor; each group by the value of the factor, and only groups with several."""
    groups: dict[Hashable, dict[int, list[Published]]] = {}
    for run in runs:
        groups.setdefault(_same(run, follow, on_gpus), {}).setdefault(factor(run), []).append(run)
    return {same: group for same, group in groups.items() if len(group) > 1}


def _same(run: Published, follow: Iterable[str], on_gpus: bool = True) -> Hashable:
    """What two runs must have in common; `follow` names fields of the layout that may differ."""
    names = [field.name for field in fields(run.layout) if field.name not in follow]
    values = (getattr(run.layout, name) for name in names)
    layout = tuple(getattr(value, "name", value) for value in values)  # rows of tables by their names
    return common(run), run.training.machine.name, run.training.devices if on_gpus else None, layout


def _speeds(groups: Mapping[Hashable, Mapping[int, list[Published]]]) -> Speeds:
    """The speeds of each group that ran, by the value of the factor, in tokens per second and GPU."""
    found: dict[Hashable, dict[int, list[float]]] = {}
    for same, group in groups.items():
        known = {value: [reached for reached in map(speed, runs) if reached] for value, runs in group.items()}
        found[same] = {value: speeds for value, speeds in known.items() if speeds}
    return found


def ratios(speeds: Speeds, value: int, other: int) -> tuple[float, ...]:
    """The speed with one value of the factor relative to that with another, for each group that has both."""
    pairs = [(group[value], group[other]) for group in speeds.values() if value in group and other in group]
    return tuple(median(one) / median(two) for one, two in pairs)


def _spread(ratios: tuple[float, ...]) -> str:
    low, high = quartiles(ratios)
    return f"× {median(ratios):.2f} (half of {counted(len(ratios), 'pair')} between {low:.2f} and {high:.2f})"


def _verdict(share: float) -> str:
    return HOLDS if share >= _MOSTLY else PARTLY if share >= _OFTEN else FAILS


def _limits() -> str:
    """What limits every comparison: runs that are left out, and how much repeated runs differ."""
    every = [run for run in published()[0] if speed(run)]
    groups = matched(every, lambda run: run.training.devices, "data", "shards", "micro_batches", on_gpus=False)
    speeds = _speeds(groups)
    drops = [ratio for many in (512, 1024) for few in (128, 256) for ratio in ratios(speeds, many, few)]
    left_out = f"Without runs on more than {MOST_GPUS} GPUs" + f", which are × {median(drops):.2f} as fast" * bool(
        drops
    )
    spreads = [max(repeats) / min(repeats) for repeats in _repeated() if len(repeats) > 1]
    if not spreads:
        return f"{left_out}."
    return f"{left_out}; {counted(len(spreads), 'repeated layout')} differ by × {median(spreads):.2f} in the median."


def _repeated() -> list[list[float]]:
    """The speeds of each layout that ran."""
    groups: dict[Hashable, list[float]] = {}
    for run in usable():
        if found := speed(run):
            groups.setdefault(_same(run, ()), []).append(found)
    return [*groups.values()]


# ---- the claims


def fsdp_from_16(trials: Trials) -> Ruling:
    """FSDP and DDP with everything else equal, from 16 GPUs on; and ZeRO-1 and DDP, if there is no such pair."""
    runs = [run for run in usable() if run.training.devices >= _FROM and run.layout.synced > 1]
    groups = matched(runs, lambda run: len(run.layout.sharding.owners), "sharding", "shards")
    speeds = _speeds(groups)
    ddp, first, whole = 0, 1, 3  # kinds of states that are sharded: none, the optimizer's, all
    direct, nearest = ratios(speeds, whole, ddp), ratios(speeds, first, ddp)
    lost = sum(
        all(map(failed, group[ddp])) and not all(map(failed, group[first]))
        for group in groups.values()
        if ddp in group and first in group
    )
    figures = {"FSDP / DDP": direct, "ZeRO-1 / DDP": nearest}
    modelled, words = modelled_speeds((16, 64))
    if direct:
        found = f"published runs that differ in nothing else: FSDP / DDP {_spread(direct)}."
        verdict = _verdict(sum(ratio > 1 for ratio in direct) / len(direct))
    else:
        found = "no two published runs differ in nothing but FSDP and DDP, so they do not decide it."
        verdict = OPEN
    if nearest:
        found += (
            f" The nearest pairs are ZeRO-1 / DDP from {_FROM} GPUs on: {_spread(nearest)}; in"
            f" {counted(lost, 'more pair')} DDP failed and ZeRO-1 ran. Sharding decides first whether a layout fits."
        )
    evidence = f"Published, on H100 and A100: {found} Modelled, not run: {words}. {_limits()}"
    return Ruling(verdict, evidence, {name: figure for name, figure in figures.items() if figure} | modelled)


_FROM = 16


def tensor_in_node(trials: Trials) -> Ruling:
    """TP of a node and of two nodes with the same pipeline, sharding and micro-batch; the data-parallel ranks are half
    as many, and compute twice as many micro-batches."""
    groups = matched(usable(), lambda run: run.layout.tensor, "tensor", "data", "shards", "micro_batches")
    speeds = _speeds(groups)
    within, across = ratios(speeds, _NODE, _NODE // 2), ratios(speeds, 2 * _NODE, _NODE)
    if not across:
        return Ruling(OPEN, "No two published runs differ in nothing but TP within a node and across two.")
    slower = sum(ratio < 1 for ratio in across) / len(across)
    crossing = sum(_fastest(runs).layout.tensor > _NODE for runs in _cases().values())
    machines = ", ".join(sorted({run.training.machine.title for runs in _cases().values() for run in runs}))
    return Ruling(
        _verdict(slower),
        f"Published, {machines}: speed of TP {2 * _NODE} relative to TP {_NODE} {_spread(across)}, slower in"
        f" {slower:.0%} of the pairs. Within a node, TP {_NODE} relative to TP {_NODE // 2}: {_spread(within)}."
        " Doubling TP costs speed within a node as well, but more across its border. Of the"
        f" {counted(len(_cases()), 'combination')} of model and GPUs in which TP across nodes ran, it was the fastest"
        f" in {crossing}. Other links, and NVLink domains of more than {_NODE} GPUs, have no pairs. {_limits()}",
        {f"TP {2 * _NODE} / TP {_NODE}": across, f"TP {_NODE} / TP {_NODE // 2}": within},
    )


_NODE = 8  # GPUs


def _cases() -> dict[Hashable, list[Published]]:
    """The runs of each model on each number of GPUs in which TP across nodes was tried and ran, with all that ran."""
    cases: dict[Hashable, list[Published]] = {}
    for run in usable():
        if speed(run):
            cases.setdefault((common(run), run.training.devices, run.training.machine.name), []).append(run)
    return {same: runs for same, runs in cases.items() if any(run.layout.tensor > _NODE for run in runs)}


def _fastest(runs: Iterable[Published]) -> Published:
    return max(runs, key=lambda run: speed(run) or 0.0)


def largest_micro_batch(trials: Trials) -> Ruling:
    """Layouts with several micro-batches: whether the largest one that ran is the fastest, and what doubling gains."""
    groups = matched(usable(), lambda run: run.layout.micro_batch, "micro_batch", "micro_batches")
    figures: dict[str, tuple[float, ...]] = {}
    said, wins, total = [], 0, 0
    for name, piped in (("without a pipeline", False), ("with a pipeline", True)):
        speeds = _speeds({same: group for same, group in groups.items() if _is_piped(group) == piped})
        several = [
            {size: median(values) for size, values in group.items()} for group in speeds.values() if len(group) > 1
        ]
        largest = sum(max(group, key=lambda size: group[size]) == max(group) for group in several)
        wins, total = wins + largest, total + len(several)
        gains = {size: ratios(speeds, 2 * size, size) for size in (1, 2, 4, 8)}
        figures |= {f"{2 * size} / {size}, {name}": gain for size, gain in gains.items() if gain}
        words = ", ".join(f"{2 * size} / {size} × {median(gain):.2f}" for size, gain in gains.items() if gain)
        said.append(f"{name}, the largest is the fastest in {largest} of {counted(len(several), 'layout')} ({words})")
    if not total:
        return Ruling(OPEN, "No two published runs differ in nothing but the micro-batch.")
    return Ruling(
        _verdict(wins / total),
        f"Published, the same layout and global batch: {'; '.join(said)}. What doubling gains shrinks as matrices get"
        f" large enough, and a pipeline loses it again when micro-batches become few. A larger micro-batch that ran out"
        f" of memory does not count against the claim. {_limits()}",
        figures,
    )


def _is_piped(group: Mapping[int, list[Published]]) -> bool:
    return next(iter(group.values()))[0].layout.pipeline > 1


def four_per_stage(trials: Trials) -> Ruling:
    """Pipelines of the same layout and global batch: whether the fastest has four micro-batches per stage or more."""
    piped = [run for run in usable() if run.layout.pipeline > 1]
    groups = matched(piped, lambda run: run.layout.micro_batches, "micro_batch", "micro_batches")
    gains, wins = [], 0
    for same, speeds in _speeds(groups).items():
        [stages] = {run.layout.pipeline for runs in groups[same].values() for run in runs}
        many = [median(reached) for count, reached in speeds.items() if count >= _PER_STAGE * stages]
        few = [median(reached) for count, reached in speeds.items() if count < _PER_STAGE * stages]
        if many and few:
            gains.append(max(many) / max(few))
            wins += max(many) > max(few)
    if not gains:
        return Ruling(OPEN, "No two published pipelines differ in nothing but the number of micro-batches.")
    bubble = 3 / 19  # of four stages with 16 micro-batches
    return Ruling(
        _verdict(wins / len(gains)),
        f"By formula, 1F1B with p stages and m micro-batches idles (p − 1) / (m + p − 1) of the time: {bubble:.0%} for"
        f" four stages with 16. Published, the same layout and global batch, the fastest run with m ≥ {_PER_STAGE}p"
        f" relative to the fastest with fewer: {_spread(tuple(gains))}; it wins in {wins} of"
        f" {counted(len(gains), 'layout')}. The global batch is constant, so more micro-batches are smaller ones: what"
        " small matrices and more messages cost exceeds what the bubble saves. With a batch that grows, the formula"
        f" applies again; no published pair shows that. {_limits()}",
        {"many / few": tuple(gains)},
    )


_PER_STAGE = 4
