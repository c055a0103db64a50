"""The textbook estimate of a transformer's floating-point operations, next to which a count can be put."""

from __future__ import annotations

from labkit.plan.spec import Spec

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
