"""What formulas are made of: a Spec as they ask for it, and a collective in a ring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from labkit.analysis.theory.models import MODELS
from labkit.plan.spec import Spec


@dataclass(frozen=True)
class Flow:
    """What is sent for one purpose in a step: `op` as it is recorded, `theory` in bytes over all ranks, and `formula`.

    `beside` are bytes that are sent on top of the formula (below zero: that are saved), each with why.
    """

    op: str
    theory: float
    formula: str
    beside: tuple[tuple[float, str], ...] = ()


class Case:
    """A Spec as the formulas ask for it. Sizes are in bytes, and `blocks` are what one rank has of every block of the model."""

    def __init__(self, spec: Spec, step: int):
        self.spec, self.step, self.options, self.n = spec, step, spec.options, spec.nproc
        self.gloo = spec.device != "cuda"
        self.half = spec.precision in ("bf16", "fp16")
        self.cast = self.half and "fsdp2" not in spec.strategy  # by autocast, and not by FSDP2's policy
        self.again = self.options.get("checkpoint_activations", False)  # forward runs a second time, block by block
        self.rows = spec.strategy_row.one_loss(spec)  # ranks that split a layer
        self.stages = spec.strategy_row.constants(spec).get("STAGES", ())
        self.pipes = self.options.get("pp_size", self.n if self.stages else 1)  # ranks that a batch goes through
        self.blocks = tuple(block.part(self.rows) for block in MODELS[spec.workload](self.options))
        self.shapes = tuple(shape for block in self.blocks for shape in block.parameters)
        self.size = 4 * sum(map(math.prod, self.shapes))
        leaves = [module for block in self.blocks for module in block.leaves if module.shapes]
        self.cut = sum(len(module.shapes) for module in leaves if module.cut is not None)  # tensors that are split, or of a split layer
        self.norms = [module.shapes[0][0] for module in leaves if len(module.shapes[0]) == 1] if spec.workload_row.batch_norm else []
        letters = "P′" if self.rows > 1 else "P"
        self.letter = f"{letters}/p" if self.pipes > 1 else letters

    @property
    def batch(self) -> int:
        """Samples of a rank in this step: fewer in an epoch's last one, which a pipeline fills up."""
        if self.stages:
            return self.spec.batch_per_rank
        before = (self.step - 1) % self.spec.steps_per_epoch * self.spec.batch_per_rank
        return min(self.spec.batch_per_rank, math.ceil(self.spec.train_samples / self.spec.data_ranks) - before)

    @property
    def parts(self) -> int:
        """Parts that a batch is taken in."""
        return math.ceil(self.batch / math.ceil(self.batch / self.options.get("accumulate", 1)))


def flow_of(
    op: str, payload: float, ranks: int, what: str, groups: int = 1, more: Mapping[str, float] | None = None, times: int = 1
) -> Flow:
    """A collective in a ring, in so many groups of ranks and so many times over.

    `payload` is in bytes, `what` the formula of it, and `more` payload beside it, by why.
    """
    share = (2 if op == "all_reduce" else 1) * times
    sent = share * groups * (ranks - 1)  # all ranks of all groups, each (ranks − 1) / ranks of it
    formula = f"{'' if share == 1 else share}(n−1)/n · {what} per rank"
    return Flow(op, sent * payload, formula, tuple((sent * size, why) for why, size in (more or {}).items() if size))


def scattered(case: Case, flow: Flow) -> Flow:
    """A reduce-scatter as the backend does it."""
    told = replace(flow, formula=f"reduce-scatter {flow.formula}")
    if not case.gloo:
        return told
    twice = flow.theory + sum(size for size, _ in flow.beside)
    return replace(told, op="all_reduce", beside=(*flow.beside, (twice, "gloo does a reduce-scatter as an all-reduce of the whole")))


def scalars(why: str, size: float, ranks: int, groups: int = 1) -> Flow:
    """An all-reduce of a few numbers, which no textbook counts."""
    return flow_of("all_reduce", 0, ranks, "", groups, {why: size})
