"""Claims that can be computed: from the model's code, from batch sizes, from formulas, and about sizes and
platforms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from labkit.analysis.theory import theory
from labkit.analysis.theory.states import RECIPES
from labkit.common.units import size
from labkit.course.claims.measured import Trials, ask
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, PARTLY, Ruling
from labkit.plan.spec import Spec
from labkit.prediction.balance import Balance
from labkit.prediction.devices import DEVICES
from labkit.prediction.scale.advice import advice
from labkit.prediction.scale.asked import training

# ---- claims about sizes


_PER_PARAMETER = sum(RECIPES["mixed"].values())  # bytes; the same in 32 bits
_MACHINE = "a100x8"


def _states(parameters: float) -> float:
    return _PER_PARAMETER * parameters


def _gb(count: float) -> str:
    return f"{count / 1e9:,.0f} GB"


def sixty_five_billion(trials: Trials) -> Ruling:
    """The states of 65B parameters, and the memory of eight GPUs with 80 GB each."""
    states, there = _states(65e9), 8 * 80e9
    return Ruling(
        HOLDS if states <= there else FAILS,
        f"By formula: the states of Adam take 16 bytes per parameter, {_gb(states)} in total, and eight GPUs have"
        f" {_gb(there)}. It needs offloading, states in fewer bits, or an adapter (LoRA) that leaves the model frozen.",
        {"states, GB": (states / 1e9,), "memory, GB": (there / 1e9,)},
    )


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
            found = advice(training(parameters, machine=_MACHINE, devices=count))
            ddp, fsdp = found.of_kind("DDP"), found.of_kind("FSDP")
            if ddp and fsdp:
                figures[f"{parameters} on {count}"] = (ddp.seconds / fsdp.seconds,)
    ratios = ", ".join(f"{name} × {ratio:.2f}" for name, (ratio,) in figures.items())
    return figures, f"speed of FSDP relative to DDP ({DEVICES[_MACHINE].title}, `labkit advise`, bf16): {ratios}"


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


def to_other_dimension(trials: Trials) -> Ruling:
    """Asks torch which collective it calls on a mesh of 4 CPU ranks; nothing is sent."""
    seen, error = ask(_TO_OTHER_DIMENSION)
    if error:
        return Ruling(OPEN, f"torch could not be queried: {error}.")
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


def nccl_on_macos(trials: Trials) -> Ruling:
    """On macOS, torch on this machine decides; elsewhere the documentation decides, and the result here is added to
    it."""
    here, error = ask(_NCCL)
    if error:
        return Ruling(OPEN, f"torch could not be queried: {error}.")
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


def cnn_parameters(trials: Trials) -> Ruling:
    """Counts the parameters of the model that the workload builds. Any number that rounds to 120K counts as 120K."""
    blocks, error = ask(_COUNT)
    if error:
        return Ruling(OPEN, f"The model could not be built: {error}.")
    total, largest = sum(blocks), max(blocks)
    verdict = HOLDS if round(total, -4) == _CLAIMED else FAILS
    each = " + ".join(f"{block:,}" for block in blocks)
    evidence = f"The parameters of the model, by block: {each} = {total:,}. The largest block alone has {largest:,}."
    return Ruling(verdict, evidence, {"parameters": (float(total),)})


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
