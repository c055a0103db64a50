"""Bytes of model states that each rank keeps from step to step, by formula: parameters, gradients and AdamW's moments.

All are numbers of 32 bits, since mixed precision is computed by autocast or on gathered copies: 4P + 4P + 8P bytes for
the P parameters that a rank holds (Rajbhandari et al. 2020, section 3.1, without its 16-bit copies). Activations,
gathered parameters, buffers of batch norm and communication buffers come on top. The formulas were held against runs
with torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from labkit.analysis.theory.pieces import Case
from labkit.analysis.theory.strategies import flats
from labkit.plan.spec import Spec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class States:
    """What one rank keeps, in bytes."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


def states(spec: Spec) -> tuple[States, ...] | None:
    """What each rank of a Spec, whose number of ranks is known, keeps on its device; None where there is no formula."""
    formula = STATES.get(spec.strategy)
    return None if formula is None else tuple(formula(Case(spec, step=1)))


def _of(numbers: float, stepped: float | None = None) -> States:
    """States of so many parameters, of which the rank steps all, or so many."""
    return States(4 * numbers, 4 * numbers, 8 * (numbers if stepped is None else stepped))


def _whole(case: Case) -> Iterator[States]:
    """Everything of the layers, or parts of layers, that a rank has."""
    for rank in range(case.spec.processes):
        yield _of(sum(map(math.prod, _shapes(case, rank))))


def _shapes(case: Case, rank: int) -> list[Shape]:
    """The parameters of a rank's stages of the pipeline; of all blocks where there is none."""
    if not case.stages:
        return list(case.shapes)
    place = rank // (case.n // case.pipes)
    mine = range(place, len(case.stages) - 1, case.pipes)
    blocks = [block for stage in mine for block in case.blocks[case.stages[stage] : case.stages[stage + 1]]]
    return [shape for block in blocks for shape in block.parameters]


def _zero1(case: Case) -> Iterator[States]:
    """ZeroRedundancyOptimizer gives each tensor, the largest first, to the rank that has the fewest numbers by then."""
    stepped = [0] * case.n
    for size in sorted(map(math.prod, case.shapes), reverse=True):
        stepped[stepped.index(min(stepped))] += size
    for numbers in stepped:
        yield _of(case.size / 4, numbers)


def _fsdp(case: Case) -> Iterator[States]:
    """FSDP1: of each flat parameter an equal shard, or all of it."""
    shards = case.n // case.options["replicas"]
    whole = sum(flats(case, shards))
    for _ in range(case.n):
        yield _of(whole if case.options["sharding"] == "NO_SHARD" else whole / shards)


def _fsdp2(case: Case) -> Iterator[States]:
    """FSDP2: rows of each parameter, as `torch.chunk` shares them; storages have the size of the largest share."""
    lanes = case.n // case.pipes
    shards = lanes // case.rows // case.options.get("replicas", 1)
    for rank in range(case.n):
        place = rank % lanes // case.rows % shards
        shapes = _shapes(case, rank)
        if case.options.get("cpu_offload"):
            yield _of(0)  # the shards, their gradients and the moments are in CPU memory
        else:
            yield _of(_rows(shapes, shards, 0), _rows(shapes, shards, place))


def _rows(shapes: Iterable[Shape], shards: int, place: int) -> int:
    """Numbers in the rows that the shard of this place has."""
    numbers = 0
    for rows, *others in shapes:
        each = -(-rows // shards)
        numbers += max(0, min(each, rows - place * each)) * math.prod(others)
    return numbers


STATES: dict[str, Callable[[Case], Iterator[States]]] = {
    **dict.fromkeys(("single", "dp", "ddp", "tp", "pp", "pp_ddp", "cp"), _whole),
    **dict.fromkeys(("fsdp2", "fsdp2_tp", "pp_fsdp2_tp"), _fsdp2),
    "zero1": _zero1,
    "fsdp": _fsdp,
}
