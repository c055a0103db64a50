"""The table of strategies: light, so that asking what there is loads no torch.

A row says what a strategy is called, what it splits and sends, and where it cannot run. The module beside this file that bears
its name holds the real training code, which `labkit.script` reads as text and the tests import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.options import Option

if TYPE_CHECKING:
    from labkit.machine import Machine
    from labkit.spec import Spec


@dataclass(frozen=True)
class Strategy:
    """One way to train on several devices.

    `data_ranks` gives the number of different shares that a step's batch is split into: with tensor parallelism, for
    example, all ranks see the same samples and it is 1. `limit` gives one sentence where the strategy cannot run a Spec,
    with the nearest choice that works, and None where it can; `unmet` does the same for what this machine lacks. `processes` is how
    many torchrun starts for the Spec's devices. `lacks` names the common options that it has not, each with the reason;
    `constants` gives settings of its script that follow from the Spec, by name.
    """

    name: str
    title: str
    splits: str
    sends: str
    data_ranks: Callable[[Spec], int]
    limit: Callable[[Spec], str | None] = lambda spec: None
    unmet: Callable[[Spec, Machine], str | None] = lambda spec, machine: None
    processes: Callable[[Spec], int] = lambda spec: spec.nproc
    default_nproc: int | None = None
    options: tuple[Option, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    constants: Callable[[Spec], dict[str, Any]] = lambda spec: {}

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options, then those that it shares with the others."""
        return self.options + tuple(option for option in COMMON if option.name not in self.lacks)

    @property
    def module(self) -> str:
        """The module of the training code."""
        return f"{__name__}.{self.name}"


COMMON: tuple[Option, ...] = (
    Option("accumulate", 1, "parts that a step's batch is taken in, one after the other: less memory, the same step", minimum=1),
    Option("clip_norm", 0.0, "largest norm of all gradients together; 0 leaves them as they are", minimum=0),
    Option("checkpoint_activations", False, "keep no activations inside a block: compute them again in backward"),
    Option("compile", False, "each block through torch.compile"),
)


def _one_process(spec: Spec) -> str | None:
    if spec.nproc is not None and spec.nproc > 1:
        return f"single trains on one device, and {spec.nproc} were asked for; use --nproc 1, or the strategy ddp"
    return None


def _fully_shard_on_cpu(spec: Spec, machine: Machine) -> str | None:
    if spec.device == "cpu" and () < machine.torch < (2, 7):
        version = ".".join(map(str, machine.torch))
        return f"fsdp2 on CPU ranks needs torch 2.7, and torch {version} is installed; use a newer torch, a GPU, or the strategy ddp"
    return None


STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            name="single",
            title="Single",
            splits="Nothing: one device holds the model and sees every sample.",
            sends="Nothing.",
            data_ranks=lambda spec: 1,
            limit=_one_process,
            default_nproc=1,
        ),
        Strategy(
            name="ddp",
            title="DDP",
            splits="The batch: every rank holds the whole model and trains on samples of its own.",
            sends="Gradients: one all-reduce per bucket, while backward still runs.",
            data_ranks=lambda spec: spec.nproc,
            options=(Option("bucket_mb", 25, "size of a gradient bucket in MiB; smaller ones start earlier", minimum=1),),
        ),
        Strategy(
            name="fsdp2",
            title="FSDP2",
            splits="The batch, and parameters, gradients and optimizer state: a shard on each rank.",
            sends="Parameters: all-gather before forward and backward. Gradients: reduce-scatter.",
            data_ranks=lambda spec: spec.nproc,
            unmet=_fully_shard_on_cpu,
            options=(Option("reshard_after_forward", True, "drop the gathered parameters after forward, gather again in backward"),),
        ),
    )
}
