"""Expected (analytical) bytes of model states per rank, and the textbook estimate of a transformer's FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from labkit.analysis.theory.traffic import Case, flats
from labkit.plan.spec import Spec

# ---- the textbook estimate of a transformer's floating-point operations, next to which a count can be put


SIX_ND = "6·N·D for N parameters in the layers, without embeddings and head, and D tokens (Kaplan et al. 2020, table 1)"


def six_nd(spec: Spec) -> int | None:
    """FLOPs of forward and backward of a step as `SIX_ND` says, which omits attention's scores and the head; None for
    a model that is not a dense transformer."""
    tokens = tokens_of_a_sample(spec)
    if tokens is None or spec.workload_row.mixture:
        return None
    _, *layers, _ = spec.workload_row.blocks(spec.options)
    return 6 * sum(layer.size for layer in layers) * tokens * spec.global_batch


def tokens_of_a_sample(spec: Spec) -> int | None:
    """The positions of a sequence; None if the samples of a Spec are no sequences, or not known."""
    row = spec.workload_row if spec.strategy else None
    return row.transformer(spec.options).positions if row and row.transformer else None


# ---- expected (analytical) bytes of model states per rank


Shape = tuple[int, ...]

# Bytes per parameter of each owner: in 32 bits, and in mixed precision, where the optimizer also has a 32-bit copy of
# the parameters (Rajbhandari et al. 2020, section 3.1). Both add up to 16.
RECIPES = {
    "fp32": {"parameters": 4, "gradients": 4, "optimizer": 8},
    "mixed": {"parameters": 2, "gradients": 2, "optimizer": 12},
}


@dataclass(frozen=True)
class States:
    """The model states of one rank, in bytes."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.parameters + self.gradients + self.optimizer


def states(spec: Spec) -> tuple[States, ...] | None:
    """The model states of each rank of a Spec with a known number of ranks, on its device; None without a formula."""
    name = spec.strategy_row.states
    return None if name is None else tuple(STATES[name](Case(spec, step=1)))


def _of(numbers: float, stepped: float | None = None) -> States:
    """The states of `numbers` parameters, of which the rank updates `stepped` (default: all)."""
    each = RECIPES["fp32"]
    updated = numbers if stepped is None else stepped
    return States(each["parameters"] * numbers, each["gradients"] * numbers, each["optimizer"] * updated)


def _whole(case: Case) -> Iterator[States]:
    """All states of the layers, or parts of layers, of each rank."""
    for rank in range(case.spec.processes):
        yield _of(sum(map(math.prod, _shapes(case, rank))))


def _shapes(case: Case, rank: int) -> list[Shape]:
    """The parameter shapes of a rank's pipeline stages; of all blocks without a pipeline."""
    if not case.stages:
        return list(case.shapes)
    place = rank // (case.n // case.pipes)
    own = (stage for stage in range(len(case.stages) - 1) if case.holder(stage) == place)
    blocks = [block for stage in own for block in case.blocks[case.stages[stage] : case.stages[stage + 1]]]
    return [shape for block in blocks for shape in block.parameters]


def _outer(case: Case) -> Iterator[States]:
    """DiLoCo: a replica, and as large as it the point that all replicas have in common, its pseudo-gradient, and the
    momentum of the outer optimizer; all three exist from the first synchronization on."""
    for whole in _whole(case):
        yield States(2 * whole.parameters, 2 * whole.gradients, whole.optimizer + whole.parameters)


def _by_tensor(case: Case) -> Iterator[States]:
    """ZeroRedundancyOptimizer assigns each tensor, the largest first, to the rank with the fewest numbers so far."""
    stepped = [0] * case.n
    for size in sorted(map(math.prod, case.shapes), reverse=True):
        stepped[stepped.index(min(stepped))] += size
    for numbers in stepped:
        yield _of(case.size / 4, numbers)


def _units(case: Case) -> Iterator[States]:
    """FSDP1: an equal shard of each flat parameter, or all of it with NO_SHARD."""
    shards, whole = case.shards, sum(flats(case, case.shards))
    for _ in range(case.n):
        yield _of(whole if case.options["sharding"] == "NO_SHARD" else whole / shards)


def _rows(case: Case) -> Iterator[States]:
    """FSDP2: rows of each parameter as `torch.chunk` splits them; every storage has the size of the largest chunk."""
    lanes, shards = case.n // case.pipes, case.shards
    stages = [Counter(_shapes(case, first)) for first in range(0, case.n, lanes)]

    @cache
    def stored(stage: int, place: int) -> States:
        if case.options.get("cpu_offload"):
            return _of(0)  # the shards, their gradients and the moments are in CPU memory
        return _of(_in_rows(stages[stage], shards, 0), _in_rows(stages[stage], shards, place))

    for rank in range(case.n):
        yield stored(rank // lanes, rank % lanes // case.rows % shards)


def _experts(case: Case) -> Iterator[States]:
    """Expert parallelism: an equal part of the experts, and all other parameters, or their rows if FSDP2 shards
    them."""
    dense = case.without_experts()
    own, shapes = (case.size - dense.size) // 4 // case.n, Counter(dense.shapes)
    for rank in range(case.n):
        if case.options["dense"] == "sharded":
            yield _of(own + _in_rows(shapes, case.n, 0), own + _in_rows(shapes, case.n, rank))
        else:
            yield _of(own + dense.size / 4)


def _in_rows(shapes: Mapping[Shape, int], shards: int, place: int) -> int:
    """The number of elements in the rows of shard `place`, of as many parameters of each shape."""
    numbers = 0
    for (rows, *others), count in shapes.items():
        each = -(-rows // shards)
        numbers += count * max(0, min(each, rows - place * each)) * math.prod(others)
    return numbers


STATES: dict[str, Callable[[Case], Iterator[States]]] = {
    "whole": _whole,
    "by_tensor": _by_tensor,
    "units": _units,
    "rows": _rows,
    "experts": _experts,
    "outer": _outer,
}
