"""Expected (analytical) bytes that a strategy sends per step, bytes of model states per rank (`states.py`), what
failures cost (`failures.py`), and how many steps a larger batch saves (`batch_size.py`).

The formulas are the textbook formulas of ring algorithms, as `sent` in probe/traffic.py: per rank an all-reduce sends
2(n−1)/n of its payload (Patarasuk and Yuan 2009), an all-gather, reduce-scatter or broadcast (n−1)/n, a send all of it.
Symbols: n ranks of a group, P parameters (P′ per rank under tensor parallelism), p ranks of a pipeline, s shards, B
samples per rank, T positions, d width, V entries of the vocabulary, L layers, M parameters of linear layers and
convolutions, E experts with C slots each per sample, D parameters outside of them; 4 and 2 are bytes per number.

Known additions, such as padding, the bookkeeping of an engine, or the all-reduce with which gloo implements a
reduce-scatter, are listed next to the formula with their own bytes: only the rest is unexplained. The formulas were
verified against runs with torch 2.13 and DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from labkit.analysis.theory import traffic
from labkit.analysis.theory.states import STATES, States, states
from labkit.analysis.theory.traffic import Case, Flow, bucket_numbers
from labkit.plan.spec import Spec

__all__ = ["STATES", "TRAFFIC", "Flow", "States", "bucket_numbers", "states", "theory"]

# The formulas by the names that the rows of the strategies use.
TRAFFIC: dict[str, Callable[[Case], Iterator[Flow]]] = {
    formula.__name__: formula
    for formula in (
        *(traffic.threads, traffic.gradients, traffic.updated_parameters, traffic.engine, traffic.pseudo_gradients),
        *(traffic.units, traffic.rows, traffic.norms),
        *(traffic.layers, traffic.norms_of_layers, traffic.stages, traffic.gradients_of_stages),
        *(traffic.agreements, traffic.keys_and_values),
        *(traffic.tokens, traffic.gradients_of_dense, traffic.norms_of_experts),
    )
}


def theory(spec: Spec, step: int = 3) -> tuple[Flow, ...] | None:
    """The expected traffic of step `step` of a Spec with a known number of ranks; the first two steps differ from later
    ones. None if there is no formula for its strategy.
    """
    names, case = spec.strategy_row.traffic, Case(spec, step)
    return None if names is None else tuple(flow for name in names for flow in TRAFFIC[name](case))
