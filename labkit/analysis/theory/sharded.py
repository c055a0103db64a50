"""The expected traffic of sharded parameters: FSDP1's units and FSDP2's rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from labkit.analysis.theory.pieces import Case, Flow, flow_of, scalars, scattered
from labkit.training.shapes import Module


def rows(case: Case) -> Iterator[Flow]:
    """FSDP2: all-gather before forward, and before backward if resharded after forward; reduce-scatter of gradients."""
    shards, replicas, columns = case.shards, case.replicas, case.rows
    padded = 4 * sum(-shape[0] % shards * math.prod(shape[1:]) for shape in case.shapes)
    why, share = "FSDP2 pads the rows of every parameter to a multiple of the number of shards", 2 if case.half else 1
    times = case.parts * (2 if case.options.get("reshard_after_forward") else 1)
    what, more = f"{4 // share}{case.letter}", {why: padded / share}
    yield flow_of("all_gather", case.size / share, shards, what, replicas * columns, more, times)
    yield from reduced(case, shards, replicas, {why: padded}, columns)


def norms(case: Case) -> Iterator[Flow]:
    """The gradient norm of each sharded tensor."""
    if case.options["clip_norm"]:
        size = 4 * len(case.shapes)
        yield scalars("the norms of all gradients", size, case.shards, case.replicas * case.rows)


def reduced(case: Case, shards: int, replicas: int, padded: Mapping[str, float], columns: int = 1) -> Iterator[Flow]:
    """Gradients: reduce-scatter over the shards, then all-reduce of each shard over the replicas."""
    what = f"4{case.letter}"
    yield scattered(case, flow_of("reduce_scatter", case.size, shards, what, replicas * columns, padded, case.parts))
    if replicas > 1:
        smaller = {why: size / shards for why, size in padded.items()}
        flow = flow_of("all_reduce", case.size / shards, replicas, f"{what}/s", shards * columns, smaller, case.parts)
        yield replace(flow, formula=flow.formula.replace("(n−1)/n", "(r−1)/r"))


def units(case: Case) -> Iterator[Flow]:
    """FSDP1 (Zhao et al. 2023): each unit is a flat parameter; the root unit stays gathered from forward to
    backward."""
    replicas, found = case.options["replicas"], units_of(case)
    shards = case.n // replicas
    sizes = [4 * numbers for numbers in flats(case, shards)]
    padded = {
        "FSDP1 aligns tensors to 16 bytes and pads each unit to a multiple of the number of ranks": (
            sum(sizes) - case.size
        )
    }
    if case.options["sharding"] == "NO_SHARD":
        yield flow_of("all_reduce", case.size, case.n, "4P", more=padded, times=case.parts)
    elif case.options["sharding"] == "SHARD_GRAD_OP":
        yield flow_of("all_gather", case.size, shards, "4P", replicas, padded, case.parts)
        yield from reduced(case, shards, replicas, padded)
    else:
        more = padded | {"the root unit is gathered only once": -sizes[-1] / 2}
        if case.again:
            again = sum(size for unit, size in zip(found[:-1], sizes) if unit.again)
            more["units within a block are gathered again to recompute its activations"] = again / 2
        yield flow_of("all_gather", case.size, shards, "4P", replicas, more, 2 * case.parts)
        yield from reduced(case, shards, replicas, padded)
    if case.options["clip_norm"]:
        yield scalars("the norm of all gradients", 4, shards, replicas)


@dataclass(frozen=True)
class Unit:
    """One unit (flat parameter) of FSDP1. `again`: activation checkpointing of the block around it gathers it once
    more.
    """

    shapes: tuple[tuple[int, ...], ...]
    again: bool = False


def units_of(case: Case) -> list[Unit]:
    """The units of FSDP1's size-based policy, the root unit last.

    Recomputation of a block stops as soon as no activation is missing: a unit at the end of the block, as in gpt, is
    still gathered then. The outputs of experts are combined after the last of them.
    """
    least, units = case.options["min_parameters"], []

    def wrap(module: Module, inside: bool, ends: bool) -> tuple[tuple[int, ...], ...]:
        """Makes units of modules that are large enough; returns the shapes left to the enclosing unit."""
        if module.size < least:
            return module.parameters
        left = module.shapes
        for inner in module.inside:
            left += wrap(inner, True, ends and inner is module.inside[-1] and not inner.experts)
        if sum(map(math.prod, left)) < least:
            return left
        units.append(Unit(left, inside and not ends))
        return ()

    whole, ends = sum(block.size for block in case.blocks) >= least, case.spec.workload_row.ends_in_layer
    left = [wrap(block, False, ends) if whole else block.parameters for block in case.blocks]
    return [*units, Unit(tuple(shape for those in left for shape in those))]


def flats(case: Case, shards: int) -> list[int]:
    """Elements of FSDP1's flat parameters in `shards` shards, including padding; the root unit is last."""
    return [_flat(unit, shards) for unit in units_of(case)]


def _flat(unit: Unit, ranks: int) -> int:
    """Elements of a flat parameter: each tensor starts at a multiple of four, and the total is a multiple of
    `ranks`."""
    total = 0
    for shape in unit.shapes:
        total += -total % 4 + math.prod(shape)
    return total + -total % ranks
