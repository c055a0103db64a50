"""The table of faults for fault injection. Like the tables of strategies and workloads, it does not import torch.

A fault is part of the generated script, and `labkit diff` shows it. What it adds is in its block of
`code.py`, which takes precedence over strategy and base; what it omits is an `if FAULT …` in the base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from labkit.training.rows import Fault

if TYPE_CHECKING:
    from labkit.plan.spec import Spec

STEP = 5  # the step at which faults occur that occur once


def _several_ranks(spec: Spec) -> str | None:
    if spec.nproc is None or spec.processes > 1:
        return None
    found = _nproc_for(spec, lambda grown: grown.processes > 1)
    fix = f"--nproc {found}" if found else "ddp with --nproc 2"
    return (
        f"the fault {spec.fault} needs several processes, and {spec.strategy} with --nproc {spec.nproc} runs in one;"
        f" use {fix}"
    )


def _sampled(spec: Spec) -> str | None:
    if spec.nproc is None or (spec.data_ranks > 1 and spec.processes > 1):
        return None
    if spec.data_ranks > 1:
        return _several_ranks(spec)
    found = _nproc_for(spec, lambda grown: grown.data_ranks > 1 and grown.processes > 1)
    same = f"with {spec.strategy} and --nproc {spec.nproc} all train on the same"
    fix = f"--nproc {found}" if found else "ddp or fsdp2 with --nproc 2"
    return f"the fault {spec.fault} needs ranks that train on different samples, and {same}; use {fix}"


def _nproc_for(spec: Spec, suits: Callable[[Spec], bool]) -> int | None:
    """The smallest number of ranks, up to 16, with which the same strategy and settings suit a fault; None if there is
    none."""
    for nproc in (2, 4, 8, 16):
        try:
            grown = replace(spec, nproc=nproc, fault=None)
        except ValueError:  # a SpecError: the strategy cannot run on this number of ranks
            continue
        if suits(grown):
            return nproc
    return None


def _second_epoch(spec: Spec) -> str | None:
    if spec.nproc is not None and spec.total_steps <= spec.steps_per_epoch:
        return (
            f"the fault {spec.fault} appears in the second epoch, and the run has only one; use --epochs 2 --samples"
            " 2048"
        )
    return _sampled(spec)


def _reducer(spec: Spec) -> str | None:
    if spec.strategy_row.wrapper != "DDP" or "micro_batches" in spec.options:  # pipelines set find_unused_parameters
        return f"the fault {spec.fault} affects only DDP, and the strategy is {spec.strategy}; use ddp"
    return _several_ranks(spec)


def _whole_parameters(spec: Spec) -> str | None:
    if spec.strategy_row.wrapper in ("FSDP", "DeepSpeed"):
        return f"the fault {spec.fault} needs unsharded gradients, and {spec.strategy} shards them; use ddp or tp"
    return None


def _anywhere(spec: Spec) -> str | None:
    return None


FAULTS: dict[str, Fault] = {
    row.name: row
    for row in (
        Fault("slow_rank", "One rank is slow", "The other ranks wait for it in backward.", "straggler", _sampled),
        Fault(
            "slow_loader", "Slow data loading", "Every step starts with a wait for its batch.", "input_bound", _anywhere
        ),
        Fault(
            "killed_rank",
            "A rank is killed",
            "SIGKILL leaves no error message; the others lose their peer.",
            "first_failure",
            _several_ranks,
        ),
        Fault(
            "skipped_collective",
            "A rank skips a collective",
            "The other ranks wait in a barrier that this rank never calls.",
            "hang",
            _several_ranks,
        ),
        Fault(
            "mismatched_shape",
            "Shapes differ in a collective",
            "One rank passes a larger tensor than the others.",
            "mismatch",
            _several_ranks,
        ),
        Fault(
            "no_sampler", "No DistributedSampler", "Every rank trains on the same samples.", "same_samples", _sampled
        ),
        Fault(
            "no_set_epoch",
            "set_epoch is never called",
            "Every epoch has the same order of samples.",
            "no_set_epoch",
            _second_epoch,
        ),
        Fault(
            "shuffle_beside_sampler",
            "shuffle=True with a sampler",
            "DataLoader does not accept both.",
            "shuffle_beside_sampler",
            _sampled,
        ),
        Fault(
            "evaluation_on_rank_0",
            "Only rank 0 evaluates",
            "It waits in a collective of the evaluation that no other rank calls.",
            "evaluation_on_one_rank",
            _several_ranks,
        ),
        Fault(
            "everyone_saves",
            "Every rank saves to one file",
            "The last writer wins, or the file is corrupt.",
            "one_file",
            _several_ranks,
        ),
        Fault(
            "out_of_memory",
            "A rank runs out of memory",
            "It fails, and the others lose their peer.",
            "out_of_memory",
            _anywhere,
        ),
        Fault(
            "nan_gradient",
            "NaN in one gradient",
            "One rank's gradient turns the weights of all ranks into NaN.",
            "nan_loss",
            _whole_parameters,
        ),
        Fault(
            "unused_parameters",
            "Unused parameters under DDP",
            "DDP waits for gradients that are never computed.",
            "unused_parameters",
            _reducer,
        ),
        Fault(
            "uneven_inputs",
            "A rank has fewer batches",
            "It finishes while the others still train.",
            "uneven_inputs",
            _sampled,
        ),
    )
}
