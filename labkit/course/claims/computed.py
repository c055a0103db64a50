"""Claims that are decided without a measured run: from the model's code, from batch sizes and formulas, from published
runs (`labkit atlas`), from what torch does in a process of its own, or from documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from labkit.analysis.metrics import median, quartiles
from labkit.analysis.theory.formulas import RECIPES, theory
from labkit.common.units import counted, size
from labkit.course.claims.measured import FAILS, HOLDS, OPEN, PARTLY, Judge, Ruling, Trials, ask, claim
from labkit.plan.spec import Spec
from labkit.prediction.devices import DEVICES
from labkit.prediction.links import Balance
from labkit.prediction.scale.advice import advice, training
from labkit.prediction.scale.atlas import Published, common, failed, published, speed


def answered(
    question: Callable[[Trials], tuple[Any, str]], failed: str = "torch could not be queried"
) -> Callable[[Callable[[Any], Ruling]], Judge]:
    """Makes a judge of a function of the answer to a question, which may have failed with an error."""

    def judged(function: Callable[[Any], Ruling]) -> Judge:
        def judge(trials: Trials) -> Ruling:
            answer, error = question(trials)
            return Ruling(OPEN, f"{failed}: {error}.") if error else function(answer)

        return judge

    return judged


# ---- claims about sizes


_PER_PARAMETER = sum(RECIPES["mixed"].values())  # bytes; the same in 32 bits
_MACHINE = "a100x8"


def _states(parameters: float) -> float:
    return _PER_PARAMETER * parameters


def _gb(count: float) -> str:
    return f"{count / 1e9:,.0f} GB"


@claim("65b", "65B parameters can be trained on 8 GPUs with 80 GB", "computed")
def sixty_five_billion(trials: Trials) -> Ruling:
    """The states of 65B parameters, and the memory of eight GPUs with 80 GB each."""
    states, there = _states(65e9), 8 * 80e9
    return Ruling(
        HOLDS if states <= there else FAILS,
        f"By formula: the states of Adam take 16 bytes per parameter, {_gb(states)} in total, and eight GPUs have"
        f" {_gb(there)}. It needs offloading, states in fewer bits, or an adapter (LoRA) that leaves the model frozen.",
        {"states, GB": (states / 1e9,), "memory, GB": (there / 1e9,)},
    )


@claim("7b", "FSDP stores 7B parameters in 28 GB, and in 14 GB on each of two GPUs", "computed")
def seven_billion(trials: Trials) -> Ruling:
    """What each of one and two ranks stores of 7B parameters."""
    whole, two = _states(7e9), _states(7e9) / 2
    claimed = 28e9, 14e9
    return Ruling(
        HOLDS if (whole, two) == claimed else FAILS,
        f"By formula: 28 GB are the parameters alone, in 32 bits. With gradients and the state of Adam it is"
        f" {_gb(whole)}, and {_gb(two)} on each of two ranks, without activations.",
        {"one rank, GB": (whole / 1e9,), "each of two, GB": (two / 1e9,)},
    )


@claim("1b-10b", "Models of 1B to 10B parameters cannot be trained on one GPU", "computed")
def billions_on_one(trials: Trials) -> Ruling:
    """The states of 1B and 10B parameters, and the memory of one GPU."""
    small, large, memory = _states(1e9), _states(10e9), 80e9
    fits = [states <= memory for states in (small, large)]
    return Ruling(
        PARTLY if any(fits) and not all(fits) else FAILS if all(fits) else HOLDS,
        f"By formula: the states of 1B parameters take {_gb(small)}, which fits on a GPU with 24 GB if the activations"
        f" do; those of 10B take {_gb(large)}, more than any GPU with 80 GB.",
        {"1B, GB": (small / 1e9,), "10B, GB": (large / 1e9,)},
    )


@claim("2-gb", "Training a CNN with 120K parameters takes 2 GB", "measured", "single")
def two_gigabytes(trials: Trials) -> Ruling:
    """The states of 120K parameters, and the measured peak of the CNN with 405,898."""
    summary = trials.summary("single")
    if summary is None:
        return Ruling(OPEN, f"Not measured: {trials.why(['single'])}.")
    peak, states = summary["ranks"][0]["peak_memory_bytes"], _states(120_000)
    return Ruling(
        HOLDS if peak >= 1e9 else FAILS,
        f"By formula, the states of 120,000 parameters take {size(states)}. Measured: the CNN with 405,898 parameters"
        f" and 128 samples has a peak of {size(peak)} in tensors. nvidia-smi also counts the CUDA context and the cache"
        " of the allocator, which a small model does not fill.",
        {"peak, bytes": (float(peak),), "states, bytes": (states,)},
    )


@claim("overhead", "n GPUs are n / (1 + overhead) times as fast, with one overhead for all n", "computed")
def one_overhead(trials: Trials) -> Ruling:
    """How the traffic of a rank grows with the ranks: an overhead measured on two does not hold for eight."""
    sent = {n: sum(flow.theory or 0 for flow in theory(Spec("ddp", nproc=n))) / n for n in (2, 4, 8)}
    words = ", ".join(f"{count / sent[2]:.2f} on {n}" for n, count in sent.items())
    return Ruling(
        PARTLY,
        "By formula: for a given n it is the definition of the overhead, so it cannot be wrong. As a prediction it"
        f" is: a rank of DDP sends 2 (n − 1) / n of its gradients, relative to 2 ranks {words}; latency grows with n,"
        " and links between machines are slower than within. Measure the overhead at the n that you want to know"
        " about.",
        {f"sent on {n}": (count / sent[2],) for n, count in sent.items()},
    )


# ---- modelled: evidence that does not decide a claim


@claim("fsdp-8", "From 8 GPUs on, prefer FSDP to DDP", "modelled")
def fsdp_from_8(trials: Trials) -> Ruling:
    """DDP and FSDP on 8 devices, for models that fit under both."""
    figures, words = modelled_speeds((8,))
    return Ruling(
        OPEN,
        f"Modelled, not run, {words}. Differences of a few percent are smaller than the error of the model; deciding"
        " the claim needs that many GPUs. The first question is another one: whether the states fit under DDP.",
        figures,
    )


def modelled_speeds(devices: Iterable[int]) -> tuple[dict[str, tuple[float, ...]], str]:
    """The speed of FSDP relative to DDP by the model of `labkit advise`, where both fit: by name, and in words."""
    figures: dict[str, tuple[float, ...]] = {}
    for count in devices:
        for parameters in ("350M", "1.3B"):
            advised = advice(training(parameters, machine=_MACHINE, devices=count))
            ddp, fsdp = advised.of_kind("DDP"), advised.of_kind("FSDP")
            if ddp and fsdp:
                figures[f"{parameters} on {count}"] = (ddp.seconds / fsdp.seconds,)
    ratios = ", ".join(f"{name} × {ratio:.2f}" for name, (ratio,) in figures.items())
    return figures, f"speed of FSDP relative to DDP ({DEVICES[_MACHINE].title}, `labkit advise`, bf16): {ratios}"


@claim(
    "tp-batch",
    "Tensor parallelism within a node lowers the batch from which FSDP is no longer communication-bound",
    "modelled",
)
def tensor_parallel_batch(trials: Trials) -> Ruling:
    """The tokens per device from which FSDP hides its communication, with and without tensor parallelism."""
    figures, words = {}, []
    for machine in ("a100x8", "h100x8", "b200x8"):
        least = Balance(machine).thresholds()
        combined = next(name for name in least if name.startswith("FSDP ×"))
        figures |= {f"{name} on {machine}": (float(least[name] or math.inf),) for name in ("FSDP", combined)}
        tokens = {name: f"{least[name]:,}" if least[name] else "more than any" for name in ("FSDP", combined)}
        words.append(f"{tokens['FSDP']} with FSDP and {tokens[combined]} with {combined} ({machine})")
    return Ruling(
        OPEN,
        f"Modelled, not run, for an MLP of 8192 × 28672 on 64 devices, tokens per device: {', '.join(words)}. A ring"
        " over whole nodes already uses all network adapters of a node, so that TP within a node saves no time there"
        " and adds its own messages. Where each axis of the mesh has links of its own, as on TPUs, it lowers the"
        " threshold (Austin et al., How to Scale Your Model, 2025).",
        figures,
    )


# ---- what DTensor sends


_TO_OTHER_DIMENSION = """
import json, logging, torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
logging.disable()  # torch warns of what is asked here
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
with CommDebugMode() as calls:
    shard = DTensor.from_local(torch.ones(1, 4), dist.init_device_mesh("cpu", (4,)), [Shard(0)])
    shard.redistribute(placements=[Shard(1)])
print(json.dumps([torch.__version__, [str(call).rpartition(".")[2] for call in calls.get_comm_counts()]]))
"""


@claim("dtensor-all-to-all", "Redistributing a DTensor from one dimension to another is an all-to-all", "asked")
@answered(lambda trials: ask(_TO_OTHER_DIMENSION))
def to_other_dimension(seen: tuple[str, list[str]]) -> Ruling:
    """Asks torch which collective it calls on a mesh of 4 CPU ranks; nothing is sent."""
    version, calls = seen
    if not any("all_gather" in call for call in calls):
        return Ruling(HOLDS, f"Run here: torch {version} calls {', '.join(calls)} on a mesh of 4 CPU ranks.")
    return Ruling(
        PARTLY,
        f"Run here: torch {version} calls {', '.join(calls)} on a mesh of 4 CPU ranks and keeps a slice. So every rank"
        " receives the whole tensor, n times what it needs. By its source code, not run here, torch calls an all-to-all"
        " on all other devices.",
        {"all-gathers": (float(len(calls)),)},
    )


# ---- claims about platforms


_NCCL = """
import json, platform, torch, torch.distributed as dist
available, message = dist.is_nccl_available(), ""
if not available:
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        message = str(error).splitlines()[0]
versions = {"system": platform.system(), "torch": torch.__version__, "cuda": torch.version.cuda}
print(json.dumps(versions | {"nccl": available, "message": message}))
"""
# torch.distributed, "Backends that come with PyTorch"; release notes of CUDA 10.2 (2019), "Operating systems".
_DOCUMENTED = (
    "Documented, not run: according to the documentation of torch.distributed, NCCL is included in builds for Linux"
    " with CUDA; CUDA 10.2 was the last release that supported macOS. On macOS the backend is gloo."
)


@claim("nccl-macos", "NCCL works on macOS", "asked")
@answered(lambda trials: ask(_NCCL))
def nccl_on_macos(here: dict[str, Any]) -> Ruling:
    """On macOS, torch on this machine decides; elsewhere the documentation decides, and the result here is added to
    it."""
    failure = f", and init_process_group fails with “{here['message']}”" if here["message"] else ""
    answer = f"is_nccl_available() is {here['nccl']}{failure}"
    build = f"torch {here['torch']} {'with CUDA ' + here['cuda'] if here['cuda'] else 'without CUDA'}"
    if here["system"] == "Darwin":
        return Ruling(HOLDS if here["nccl"] else FAILS, f"Run here, on macOS ({build}): {answer}.")
    return Ruling(FAILS, f"{_DOCUMENTED} Run here, on {here['system']} ({build}): {answer}.")


# ---- claims that can be computed


_CLAIMED = 120_000
_COUNT = """
import json
from labkit.training.workloads.cnn import build_blocks
print(json.dumps([sum(parameter.numel() for parameter in block.parameters()) for block in build_blocks()]))
"""


@claim("cnn-parameters", "The MNIST CNN with three convolutions has 120K parameters", "computed")
@answered(lambda trials: ask(_COUNT), "The model could not be built")
def cnn_parameters(blocks: list[int]) -> Ruling:
    """Counts the parameters of the model that the workload builds. Any number that rounds to 120K counts as 120K."""
    total, largest = sum(blocks), max(blocks)
    verdict = HOLDS if round(total, -4) == _CLAIMED else FAILS
    terms = " + ".join(f"{block:,}" for block in blocks)
    evidence = f"The parameters of the model, by block: {terms} = {total:,}. The largest block alone has {largest:,}."
    return Ruling(verdict, evidence, {"parameters": (float(total),)})


@claim("batch", "With a batch size of 128 on 2 GPUs, each GPU takes 64 samples", "computed")
def batch_of_two(trials: Trials) -> Ruling:
    """DDP has one data loader per process, nn.DataParallel has a single one."""
    ddp = Spec("ddp", nproc=2, batch_size=128)
    shared = replace(ddp, scaling="strong")
    verdict = HOLDS if ddp.batch_per_rank == 64 else FAILS
    evidence = (
        f"Under DDP every process has its own data loader, so a batch size of 128 is per rank: {ddp.batch_sentence}."
        f" With 64 samples per rank, a global batch size of 128, an epoch would have {shared.steps_per_epoch:,} steps."
        " nn.DataParallel does split the batch: its single loader returns 128 samples, and each device gets 64."
    )
    figures = {"samples of a rank": (float(ddp.batch_per_rank),), "steps of an epoch": (float(ddp.steps_per_epoch),)}
    return Ruling(verdict, evidence, figures)


@claim("fsdp-all-reduce", "FSDP synchronises gradients with an all-reduce", "computed")
def fsdp_gradients(trials: Trials) -> Ruling:
    """By the formulas for expected traffic, and by the ledger of a run if another claim needed one."""
    sends = {flow.op: flow for flow in theory(Spec("fsdp2", nproc=2, device="cuda"))}
    ddp = next(iter(theory(Spec("ddp", nproc=2, device="cuda"))))
    if "reduce_scatter" not in sends or "all_reduce" in sends:
        return Ruling(HOLDS, f"Expected (analytical): FSDP sends {', '.join(sends)}.")
    evidence = (
        f"Expected (analytical): gradients are reduce-scattered ({sends['reduce_scatter'].formula}), so each rank gets"
        f" the sum of only its own shard. Before that, parameters are all-gathered ({sends['all_gather'].formula}). DDP"
        f" is the strategy that uses an all-reduce ({ddp.formula})."
    )
    return Ruling(FAILS, f"{evidence} {_ledger(trials)}".rstrip(), {op: (flow.theory,) for op, flow in sends.items()})


def _ledger(trials: Trials) -> str:
    """What a run of FSDP2 sent. gloo implements a reduce-scatter as an all-reduce, and the ledger says so."""
    summary = trials.summary("fsdp2")
    if not summary or not summary["ledger"]:
        return "(On CPU ranks gloo implements a reduce-scatter as an all-reduce of the whole.)"
    sent = "; ".join(
        f"{row['op']} {size(row['measured'])}" + (f" ({row['reason']})" if row["reason"] else "")
        for row in summary["ledger"]
        if math.isfinite(row["measured"])
    )
    return f"A step of the run {summary['run']} sent: {sent}."


# ---- published runs that differ in one factor only, and in what follows from it
#
# One run of each pair is seldom repeated, and repetitions differ by a third and more. Verdicts therefore follow from
# many pairs, and each says what its runs have in common.


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
    speeds_by_group: dict[Hashable, dict[int, list[float]]] = {}
    for same, group in groups.items():
        known = {value: [reached for reached in map(speed, runs) if reached] for value, runs in group.items()}
        speeds_by_group[same] = {value: speeds for value, speeds in known.items() if speeds}
    return speeds_by_group


def ratios(speeds: Speeds, value: int, other: int) -> tuple[float, ...]:
    """The speed with one value of the factor relative to that with another, for each group that has both."""
    pairs = [(group[value], group[other]) for group in speeds.values() if value in group and other in group]
    return tuple(median(speeds) / median(others) for speeds, others in pairs)


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
    as_fast = f", which are × {median(drops):.2f} as fast" if drops else ""
    left_out = f"Without runs on more than {MOST_GPUS} GPUs{as_fast}"
    spreads = [max(repeats) / min(repeats) for repeats in _repeated() if len(repeats) > 1]
    if not spreads:
        return f"{left_out}."
    return f"{left_out}; {counted(len(spreads), 'repeated layout')} differ by × {median(spreads):.2f} in the median."


def _repeated() -> list[list[float]]:
    """The speeds of each layout that ran."""
    groups: dict[Hashable, list[float]] = {}
    for run in usable():
        if reached := speed(run):
            groups.setdefault(_same(run, ()), []).append(reached)
    return [*groups.values()]


# ---- claims that published runs judge


@claim("fsdp-16", "From 16 GPUs on, FSDP is faster than DDP", "published")
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
        compared = f"published runs that differ in nothing else: FSDP / DDP {_spread(direct)}."
        verdict = _verdict(sum(ratio > 1 for ratio in direct) / len(direct))
    else:
        compared = "no two published runs differ in nothing but FSDP and DDP, so they do not decide it."
        verdict = OPEN
    if nearest:
        compared += (
            f" The nearest pairs are ZeRO-1 / DDP from {_FROM} GPUs on: {_spread(nearest)}; in"
            f" {counted(lost, 'more pair')} DDP failed and ZeRO-1 ran. Sharding decides first whether a layout fits."
        )
    evidence = f"Published, on H100 and A100: {compared} Modelled, not run: {words}. {_limits()}"
    return Ruling(verdict, evidence, {name: figure for name, figure in figures.items() if figure} | modelled)


_FROM = 16


@claim("tp-node", "Tensor parallelism should stay within a node", "published")
def tensor_in_node(trials: Trials) -> Ruling:
    """TP of a node and of two nodes with the same pipeline, sharding and micro-batch; the data-parallel ranks are half
    as many, and compute twice as many micro-batches."""
    groups = matched(usable(), lambda run: run.layout.tensor, "tensor", "data", "shards", "micro_batches")
    speeds = _speeds(groups)
    within, across = ratios(speeds, _NODE, _NODE // 2), ratios(speeds, 2 * _NODE, _NODE)
    if not across:
        return Ruling(OPEN, "No two published runs differ in nothing but TP within a node and across two.")
    slower = sum(ratio < 1 for ratio in across) / len(across)
    cases = _cases()
    fastest = [max(runs, key=lambda run: speed(run) or 0.0) for runs in cases.values()]
    crossing = sum(run.layout.tensor > _NODE for run in fastest)
    machines = ", ".join(sorted({run.training.machine.title for runs in cases.values() for run in runs}))
    return Ruling(
        _verdict(slower),
        f"Published, {machines}: speed of TP {2 * _NODE} relative to TP {_NODE} {_spread(across)}, slower in"
        f" {slower:.0%} of the pairs. Within a node, TP {_NODE} relative to TP {_NODE // 2}: {_spread(within)}."
        " Doubling TP costs speed within a node as well, but more across its border. Of the"
        f" {counted(len(cases), 'combination')} of model and GPUs in which TP across nodes ran, it was the fastest"
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


@claim("micro-batch", "Prefer the largest micro-batch that fits", "published")
def largest_micro_batch(trials: Trials) -> Ruling:
    """Layouts with several micro-batches: whether the largest one that ran is the fastest, and what doubling gains."""
    figures: dict[str, tuple[float, ...]] = {}
    said, wins, total = [], 0, 0
    for name, piped in (("without a pipeline", False), ("with a pipeline", True)):
        runs = [run for run in usable() if (run.layout.pipeline > 1) == piped]
        speeds = _speeds(matched(runs, lambda run: run.layout.micro_batch, "micro_batch", "micro_batches"))
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


@claim("pipeline-4x", "A pipeline needs four times as many micro-batches as stages", "published")
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


# ---- what torch does: tried in a process group of one rank; each of these judges what `in_torch.behaviour` has seen


tried = answered(lambda trials: trials.behaviour())


@claim("cpu-average", "DDP averages gradients on the CPU", "asked")
@tried
def gradients_on_cpu(seen: dict[str, Any]) -> Ruling:
    """Where the buckets are that DDP reduces."""
    return Ruling(
        FAILS,
        f"Run here: the buckets of a model on the CPU are on the {seen['bucket_device'].upper()}, because DDP"
        " creates them on the device of the parameters. Documented, not run here: with the backend nccl, tensors on"
        " GPUs are reduced by kernels on the GPUs (documentation of torch.distributed, Backends).",
    )


@claim("devices", "One DDP process can use several GPUs with device_ids=[0, 1]", "asked")
@tried
def devices_per_process(seen: dict[str, Any]) -> Ruling:
    """What DDP does with two devices in one process."""
    if not seen["two_devices"]:
        return Ruling(HOLDS, f"Run here: torch {seen['torch']} accepts DDP(model, device_ids=[0, 1]).")
    return Ruling(
        FAILS,
        f"Run here: DDP(model, device_ids=[0, 1]) raises “{seen['two_devices']}” One process drives one replica."
        " The replica itself may be split over several GPUs, with device_ids=None.",
    )


@claim("sum", "Summing gradients instead of averaging them scales the update with the number of GPUs", "asked")
@tried
def summed_gradients(seen: dict[str, Any]) -> Ruling:
    """The first update with a gradient that is twice as large, as the sum over two ranks is."""
    ratios = seen["update_ratios"]
    scaled = [round(ratio, 2) == 2 for ratio in ratios.values()]
    verdict = HOLDS if all(scaled) else PARTLY if any(scaled) else FAILS
    words = " and ".join(f"{ratio:.2f} times as large with {name}" for name, ratio in ratios.items())
    return Ruling(
        verdict,
        f"Run here: with the sum over 2 ranks instead of the mean, the first update is {words}. With SGD the sum"
        " multiplies the learning rate by the number of ranks; Adam divides the gradient by its own size. Raising"
        " the learning rate for a larger batch is a separate decision (Goyal et al. 2017 for SGD).",
        {name: (ratio,) for name, ratio in ratios.items()},
    )


@claim("wrap-1m", "FSDP with min_num_params=1M shards the MNIST CNN layer by layer", "asked")
@tried
def wrap_by_size(seen: dict[str, Any]) -> Ruling:
    """The units that the policy by size makes of the CNN."""
    counts = {int(smallest): count for smallest, count in seen["units"].items()}
    words = ", ".join(f"{smallest:,} makes {counted(count, 'unit')}" for smallest, count in counts.items())
    return Ruling(
        HOLDS if counts[1_000_000] > 1 else FAILS,
        f"Run here: min_num_params={words} of the CNN with 405,898 parameters. A single unit is gathered as a whole"
        " before forward: nothing overlaps, and the parameters take more memory than under DDP.",
        {f"units from {smallest:,}": (float(count),) for smallest, count in counts.items()},
    )


@claim("optimizer-order", "The optimizer must be created after the model is wrapped", "asked")
@tried
def optimizer_after_wrapping(seen: dict[str, Any]) -> Ruling:
    """Whether wrapping replaces the parameters that an optimizer would have."""
    kept = seen["parameters_kept"]
    verdict = FAILS if all(kept.values()) else PARTLY if any(kept.values()) else HOLDS
    kept_words = "keeps the parameters, so the order does not matter"
    replaced = "replaces them, so an optimizer that was created before updates tensors that are no longer used"
    words = "; ".join(f"{name} {kept_words if same else replaced}" for name, same in kept.items())
    return Ruling(verdict, f"Run here: {words}.")


@claim("evaluate-module", "Evaluate with model.module, not with the DDP wrapper", "asked")
@tried
def evaluation_without_wrapper(seen: dict[str, Any]) -> Ruling:
    """Whether a forward pass through DDP communicates in evaluation."""
    sends = seen["broadcasts_in_evaluation"]
    verdict = HOLDS if all(sends.values()) else PARTLY if any(sends.values()) else FAILS
    words = "; ".join(
        f"with {name}, a forward pass in evaluation {'broadcasts the buffers' if does else 'communicates nothing'}"
        for name, does in sends.items()
    )
    return Ruling(
        verdict,
        f"Run here: {words}. If all ranks evaluate, both forms give the same result. If only rank 0 does, the"
        " wrapper of a model with buffers waits for the other ranks, and model.module does not.",
    )


# ---- documented: the verdict names its source and says that it was not run


@claim("dp-copies", "DataParallel copies the model between CPU and GPUs in every step", "documented")
def dp_copies(trials: Trials) -> Ruling:
    """What nn.DataParallel moves between CPU and GPU."""
    return Ruling(
        PARTLY,
        "Documented, not run here: only inputs that are on the CPU are copied from it, once, to the GPUs. Parameters,"
        " outputs and gradients go from GPU to GPU (torch/nn/parallel/comm.py, with NCCL or peer copies). A driver"
        " without peer access passes such copies through host memory. To decide how much: a profile on two GPUs.",
    )


@claim("colab", "Colab has neither NCCL nor torchrun", "documented")
def colab(trials: Trials) -> Ruling:
    """What the Linux wheel of torch contains."""
    return Ruling(
        FAILS,
        "Documented, not run here: Colab installs the CUDA wheel of torch for Linux, which contains NCCL and torchrun"
        " (documentation of torch.distributed, Backends; entry points of the wheel). What Colab lacks is a second GPU:"
        " two ranks on one GPU fail with “Duplicate GPU detected”. Two CPU ranks with gloo work.",
    )


@claim("set-device", "torch.cuda.set_device is not needed if DDP gets device_ids", "documented")
def set_device(trials: Trials) -> Ruling:
    """Whether a rank needs set_device or device_id."""
    return Ruling(
        OPEN,
        "Documented, not run here: device_ids of DDP places only the model's work. Without torch.cuda.set_device or"
        " init_process_group(device_id=…), barrier() and collectives of objects use the current device, which is GPU 0"
        " on every rank (documentation of torch.distributed, barrier). Deciding what happens then needs two GPUs: run"
        " both forms and look at the memory of GPU 0.",
    )


@claim(
    "rank-0-download", "Rank 0 downloads the data, the others wait in a barrier, and then all can read them", "argued"
)
def rank_0_downloads(trials: Trials) -> Ruling:
    """Rank 0 downloads, and the other ranks wait in a barrier."""
    return Ruling(
        PARTLY,
        "By argument: on one machine, or with a shared file system, it works. On several machines with local"
        " disks, only the machine of rank 0 has the files: let local rank 0 of every machine download. The others wait"
        " in a collective, so a download that takes longer than its timeout (10 minutes with NCCL, 30 with gloo) ends"
        " the job.",
    )


@claim("rank-0-accuracy", "The training accuracy that rank 0 prints is that of the job", "computed")
def accuracy_of_rank_0(trials: Trials) -> Ruling:
    """How many samples the accuracy of one rank is computed from."""
    spec = Spec("ddp", nproc=8)
    own = spec.train_samples // spec.nproc
    return Ruling(
        FAILS,
        f"By the sampler: each of {spec.nproc} ranks trains on {own:,} of {spec.train_samples:,} samples per epoch, and"
        " rank 0 counts only its own. Sum the correct answers and the samples of all ranks with an all-reduce before"
        " you divide. (The mean of the ranks' accuracies is exact only if all have the same number of samples.)",
        {"samples of rank 0": (float(own),), "samples": (float(spec.train_samples),)},
    )
