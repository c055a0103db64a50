"""Building blocks of the formulas: the quantities of a Spec, and collectives on a ring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace

from labkit.plan.spec import Spec
from labkit.training.strategies.pipelines import holder


@dataclass(frozen=True)
class Flow:
    """Traffic for one purpose in a step: `op` as it is recorded, `theory` in bytes over all ranks, and `formula`.

    `extra` are bytes in addition to the formula (negative: fewer bytes), each with its reason.
    """

    op: str
    theory: float
    formula: str
    extra: tuple[tuple[float, str], ...] = ()


class Case:
    """The quantities of a Spec that the formulas use. Sizes are in bytes; `blocks` are one rank's parts of all blocks
    of the model.
    """

    def __init__(self, spec: Spec, step: int):
        self.spec, self.step, self.options, self.n = spec, step, spec.options, spec.nproc
        self.gloo = spec.device != "cuda"
        self.half = spec.precision in ("bf16", "fp16")
        self.cast = self.half and spec.strategy_row.autocast
        self.again = self.options.get("checkpoint_activations", False)  # backward recomputes forward, block by block
        self.rows = spec.strategy_row.one_loss(spec)  # ranks that split a layer
        self.replicas = self.options.get("replicas", 1)  # groups of ranks that each hold all shards
        self.stages = spec.strategy_row.constants(spec).get("STAGES", ())
        self.pipes = self.options.get("pp_size", self.n if self.stages else 1)  # ranks of one pipeline
        self.blocks = tuple(block.part(self.rows) for block in spec.workload_row.blocks(self.options))
        self.outputs = spec.workload_row.outputs(self.options)
        leaves = [module for block in self.blocks for module in block.leaves if module.shapes]
        self.cut = sum(len(module.shapes) for module in leaves if module.cut is not None)  # tensors of split layers
        self.norms = (
            [module.shapes[0][0] for module in leaves if len(module.shapes[0]) == 1]
            if spec.workload_row.batch_norm
            else []
        )
        letters = "P′" if self.rows > 1 else "P"
        self.letter = f"{letters}/p" if self.pipes > 1 else letters

    def holder(self, stage: int) -> int:
        """The rank of a pipeline that holds a stage."""
        return holder(stage, self.pipes, self.options["schedule"])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all parameters of the blocks."""
        return tuple(shape for block in self.blocks for shape in block.parameters)

    @property
    def size(self) -> int:
        """Bytes of all parameters of the blocks, in fp32."""
        return 4 * sum(map(math.prod, self.shapes))

    def without_experts(self) -> Case:
        """The case of the parameters outside of the experts, which are gathered and reduced in fp32."""
        dense = copy(self)
        dense.blocks, dense.letter, dense.half = tuple(block.dense for block in self.blocks), "D", False
        dense.options = {**self.options, "reshard_after_forward": True}
        return dense

    @property
    def shards(self) -> int:
        """The number of ranks among which parameters are sharded, if they are."""
        groups: int = self.pipes * self.rows * self.replicas
        return self.n // groups

    @property
    def batch(self) -> int:
        """Samples per rank in this step: fewer in the last step of an epoch, unless a pipeline fills it up."""
        if self.stages:
            return self.spec.batch_per_rank
        before = (self.step - 1) % self.spec.steps_per_epoch * self.spec.batch_per_rank
        return min(self.spec.batch_per_rank, math.ceil(self.spec.train_samples / self.spec.data_ranks) - before)

    @property
    def parts(self) -> int:
        """The number of micro-batches per batch."""
        wanted: int = self.options.get("accumulate", 1)
        return math.ceil(self.batch / math.ceil(self.batch / wanted))


def flow_of(
    op: str,
    payload: float,
    ranks: int,
    what: str,
    groups: int = 1,
    more: Mapping[str, float] | None = None,
    times: int = 1,
) -> Flow:
    """A collective on a ring of `ranks`, in each of `groups` groups, `times` times.

    `payload` is in bytes, `what` is its formula, and `more` is additional payload by reason.
    """
    share = (2 if op == "all_reduce" else 1) * times
    sent = share * groups * (ranks - 1)  # by all ranks of all groups, each (ranks − 1) / ranks of the payload
    formula = f"{'' if share == 1 else share}(n−1)/n · {what} per rank"
    return Flow(op, sent * payload, formula, tuple((sent * size, why) for why, size in (more or {}).items() if size))


def scattered(case: Case, flow: Flow) -> Flow:
    """A reduce-scatter as the backend implements it."""
    named = replace(flow, formula=f"reduce-scatter {flow.formula}")
    if not case.gloo:
        return named
    twice = flow.theory + sum(size for size, _ in flow.extra)
    return replace(
        named, op="all_reduce", extra=(*flow.extra, (twice, "gloo implements reduce-scatter as an all-reduce"))
    )


def scalars(why: str, size: float, ranks: int, groups: int = 1) -> Flow:
    """An all-reduce of a few numbers, which the textbook formulas do not count."""
    return flow_of("all_reduce", 0, ranks, "", groups, {why: size})
