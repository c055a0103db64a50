"""The table of faults: what can go wrong on purpose, so that a class can meet it. Light, as the tables of strategies and workloads are.

A fault is real: it stands in the script that is run, and `labkit diff` shows it. What it adds is a function in the module beside this
file that bears its name, which outranks strategy and base; what it leaves out is an `if FAULT …` at that place in the base.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.training.request import Request

STEP = 5  # the step at which those faults come that come once


@dataclass(frozen=True)
class Fault:
    """One way to go wrong. `shows` says what is seen of it, `finding` is the name of the diagnosis that names it.

    `limit` gives one sentence where a Spec cannot have it, with the way out, and None where it can.
    """

    name: str
    title: str
    shows: str
    finding: str
    limit: Callable[[Request], str | None]

    @property
    def module(self) -> str | None:
        """The module of what it adds to the script; None where it only leaves something out."""
        name = f"{__name__}.{self.name}"
        return name if importlib.util.find_spec(name) else None


def _several_ranks(spec: Request) -> str | None:
    if spec.nproc is None or spec.processes > 1:
        return None
    found = _nproc_for(spec, lambda grown: grown.processes > 1)
    ranks = f"{spec.strategy} with --nproc {spec.nproc} runs in one process"
    return f"the fault {spec.fault} shows between ranks, and {ranks}; use {f'--nproc {found}' if found else 'ddp with --nproc 2'}"


def _sampled(spec: Request) -> str | None:
    if spec.nproc is None or (spec.data_ranks > 1 and spec.processes > 1):
        return None
    if spec.data_ranks > 1:
        return _several_ranks(spec)
    found = _nproc_for(spec, lambda grown: grown.data_ranks > 1 and grown.processes > 1)
    same = f"{spec.strategy} with --nproc {spec.nproc} has one shard of the data set only"
    fix = f"--nproc {found}" if found else "ddp or fsdp2 with --nproc 2"
    return f"the fault {spec.fault} needs ranks that train on different samples, and {same}; use {fix}"


def _nproc_for(spec: Request, serves: Callable[[Request], bool]) -> int | None:
    """The smallest number of ranks with which the same strategy and settings serve a fault; None where there is none up to 16."""
    for nproc in (2, 4, 8, 16):
        try:
            grown = replace(spec, nproc=nproc, fault=None)
        except ValueError:  # a SpecError: the strategy cannot run on so many
            continue
        if serves(grown):
            return nproc
    return None


def _second_epoch(spec: Request) -> str | None:
    if spec.nproc is not None and spec.total_steps <= spec.steps_per_epoch:
        return f"{spec.fault} shows in the second epoch, and the run has one; use --epochs 2 --samples 2048 for two short ones"
    return _sampled(spec)


def _reducer(spec: Request) -> str | None:
    if spec.strategy_row.wrapper != "DDP" or "micro_batches" in spec.options:  # a pipeline has DDP look for what is unused
        return f"the fault {spec.fault} is one of DDP, and the strategy is {spec.strategy}; use ddp"
    return _several_ranks(spec)


def _whole_parameters(spec: Request) -> str | None:
    if spec.strategy_row.wrapper in ("FSDP", "DeepSpeed"):
        return f"the fault {spec.fault} is put into a whole parameter's gradient, and {spec.strategy} keeps shards; use ddp or tp"
    return None


def _anywhere(spec: Request) -> str | None:
    return None


FAULTS: dict[str, Fault] = {
    row.name: row
    for row in (
        Fault("slow_rank", "One rank is slow", "The others wait for it in backward.", "straggler", _sampled),
        Fault("slow_loader", "The data come slowly", "Every step begins with a wait.", "input_bound", _anywhere),
        Fault("killed_rank", "A rank is killed", "SIGKILL leaves no word; the others lose their peer.", "first_failure", _several_ranks),
        Fault(
            "skipped_collective",
            "A rank skips a collective",
            "The others wait in a barrier for a rank that is somewhere else.",
            "hang",
            _several_ranks,
        ),
        Fault("mismatched_shape", "Shapes differ in a collective", "One rank hands in one number more.", "mismatch", _several_ranks),
        Fault("no_sampler", "No DistributedSampler", "Every rank trains on the same samples.", "same_samples", _sampled),
        Fault("no_set_epoch", "set_epoch is forgotten", "Every epoch has the same order.", "no_set_epoch", _second_epoch),
        Fault(
            "shuffle_beside_sampler",
            "shuffle beside a sampler",
            "DataLoader refuses the pair.",
            "shuffle_beside_sampler",
            _sampled,
        ),
        Fault(
            "evaluation_on_rank_0",
            "Rank 0 evaluates alone",
            "It waits in a collective of the evaluation that no other rank comes to.",
            "evaluation_on_one_rank",
            _several_ranks,
        ),
        Fault("everyone_saves", "Every rank saves to one file", "The file is whoever wrote last, or broken.", "one_file", _several_ranks),
        Fault("out_of_memory", "A rank runs out of memory", "It fails, and the others lose their peer.", "out_of_memory", _anywhere),
        Fault("nan_gradient", "NaN in one gradient", "One rank's gradient spoils the weights of all.", "nan_loss", _whole_parameters),
        Fault(
            "unused_parameters", "Unused parameters under DDP", "DDP waits for gradients that do not come.", "unused_parameters", _reducer
        ),
        Fault("uneven_inputs", "A rank has fewer batches", "It is done while the others still train.", "uneven_inputs", _sampled),
    )
}
