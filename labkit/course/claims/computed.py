"""Claims that arithmetic decides: the model's own code, the Spec's batches, the formulas of what is sent."""

from __future__ import annotations

import math
from dataclasses import replace

from labkit.analysis.theory import theory
from labkit.common.units import size
from labkit.course.claims.asked import ask
from labkit.course.claims.trials import Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, Ruling
from labkit.plan.spec import Spec

_SAID = 120_000
_COUNT = """
import json
from labkit.training.workloads.cnn import build_model
print(json.dumps([sum(parameter.numel() for parameter in block.parameters()) for block in build_model()]))
"""


def cnn_parameters(trials: Trials) -> Ruling:
    """Counted in the model that the workload builds; about 120K is anything that would be rounded to it."""
    blocks, error = ask(_COUNT)
    if error:
        return Ruling(OPEN, f"The model could not be built: {error}.")
    total, largest = sum(blocks), max(blocks)
    verdict = HOLDS if round(total, -4) == _SAID else FAILS
    each = " + ".join(f"{block:,}" for block in blocks)
    evidence = f"Counted in the model itself, block by block: {each} = {total:,}. Its largest block alone has {largest:,}."
    return Ruling(verdict, evidence, {"parameters": (float(total),)})


def batch_of_two(trials: Trials) -> Ruling:
    """DDP has a loader in every process, and nn.DataParallel one for all."""
    ddp = Spec("ddp", nproc=2, batch_size=128)
    shared = replace(ddp, scaling="strong")
    verdict = HOLDS if ddp.batch_per_rank == 64 else FAILS
    evidence = (
        f"Under DDP every process has a loader of its own, so a batch size of 128 is each rank's: {ddp.batch_sentence}. 64 each, from 128 "
        f"in all, would make {shared.steps_per_epoch:,} steps. What splits a batch is nn.DataParallel: its one loader gives 128, and each "
        "device gets 64."
    )
    figures = {"samples of a rank": (float(ddp.batch_per_rank),), "steps of an epoch": (float(ddp.steps_per_epoch),)}
    return Ruling(verdict, evidence, figures)


def fsdp_gradients(trials: Trials) -> Ruling:
    """By the formulas that the ledger is held against, and by the ledger of a run where one was made for another claim."""
    sends = {flow.op: flow for flow in theory(Spec("fsdp2", nproc=2, device="cuda"))}
    ddp = next(iter(theory(Spec("ddp", nproc=2, device="cuda"))))
    if "reduce_scatter" not in sends or "all_reduce" in sends:
        return Ruling(HOLDS, f"By formula FSDP sends {', '.join(sends)}.")
    evidence = (
        f"By formula gradients go by {sends['reduce_scatter'].formula}: each rank gets the sum of its own shard alone. Before that, "
        f"parameters come by all-gather, {sends['all_gather'].formula}. DDP is what sends an all-reduce, {ddp.formula}."
    )
    return Ruling(FAILS, f"{evidence} {_ledger(trials)}".rstrip(), {op: (flow.theory,) for op, flow in sends.items()})


def _ledger(trials: Trials) -> str:
    """What a run of FSDP2 sent; gloo does its reduce-scatter as an all-reduce, and the ledger says so."""
    summary = trials.summary("fsdp2")
    if not summary or not summary["ledger"]:
        return "(On CPU ranks gloo does a reduce-scatter as an all-reduce of the whole.)"
    sent = "; ".join(
        f"{one['op']} {size(one['measured'])}" + (f" ({one['reason']})" if one["reason"] else "")
        for one in summary["ledger"]
        if math.isfinite(one["measured"])
    )
    return f"A step of the run {summary['run']} sent: {sent}."
