"""Claims that can be computed: from the model's code, from the batch sizes of a Spec, and from the formulas for
traffic."""

from __future__ import annotations

import math
from dataclasses import replace

from labkit.analysis.theory import theory
from labkit.common.units import size
from labkit.course.claims.asked import ask
from labkit.course.claims.trials import Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, Ruling
from labkit.plan.spec import Spec

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
        f"{one['op']} {size(one['measured'])}" + (f" ({one['reason']})" if one["reason"] else "")
        for one in summary["ledger"]
        if math.isfinite(one["measured"])
    )
    return f"A step of the run {summary['run']} sent: {sent}."
