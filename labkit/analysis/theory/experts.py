"""The expected traffic of expert parallelism: vectors that are sent to experts and back, and the gradients of all other
parameters."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.analysis.theory.pieces import Case, Flow, flow_of, scalars
from labkit.analysis.theory.replicas import gradients
from labkit.analysis.theory.sharded import norms, rows


def vectors(case: Case) -> Iterator[Flow]:
    """Expert parallelism (Lepikhin et al. 2020, section 3.3.2): each layer sends the slots of all experts to their
    ranks and the outputs back, and in backward the gradients of both."""
    model, wide = case.spec.workload_row.mixture(case.options), 2 if case.half else 4
    slots = wide * model.layers * case.batch * model.experts * model.slots * model.width
    again = {"recomputing a layer's activations sends its vectors again": 2 * slots if case.again else 0}
    yield flow_of("all_to_all", 4 * slots, case.n, f"4L · {wide}·B·E·C·d", more=again)


def gradients_of_dense(case: Case) -> Iterator[Flow]:
    """The parameters outside of the experts, D in number: replicated by DDP, or sharded by FSDP2."""
    yield from rows(case.without_experts()) if _sharded(case) else gradients(case.without_experts())


def norms_of_experts(case: Case) -> Iterator[Flow]:
    """The norm of the gradients of all experts, and of each sharded tensor."""
    if case.options["clip_norm"]:
        yield scalars("the norm of the gradients of all experts", 4, case.n)
    if _sharded(case):
        yield from norms(case.without_experts())


def _sharded(case: Case) -> bool:
    return bool(case.options["dense"] == "sharded")
