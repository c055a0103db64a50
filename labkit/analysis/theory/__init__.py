"""Bytes that a strategy sends in a step, and that its ranks keep from step to step (`states.py`), by formula.

The formulas count what textbooks count, in a ring, as `sent` in probe/traffic.py has it: an all-reduce sends 2(n−1)/n of its payload
(Patarasuk and Yuan 2009), an all-gather, reduce-scatter or broadcast (n−1)/n, a send all of it. Their letters: n ranks of a group,
P parameters (P′ what tensor parallelism leaves a rank of them), p ranks of a pipeline, s shards, B samples of a rank, T places, d width,
V bytes of the vocabulary, L layers, M parameters of linear layers and convolutions; 4 and 2 are the bytes of a number.

What is known to come on top, such as padding, an engine's bookkeeping, or what gloo makes of a reduce-scatter, stands beside the formula
with a number of its own: only the rest is unexplained. Formulas and the rest were held against runs with torch 2.13 and DeepSpeed 0.19.
"""

from __future__ import annotations

from labkit.analysis.theory.models import MODELS, Module, borders
from labkit.analysis.theory.pieces import Case, Flow
from labkit.analysis.theory.states import STATES, States, states
from labkit.analysis.theory.strategies import THEORY
from labkit.plan.spec import Spec

__all__ = ["MODELS", "STATES", "THEORY", "Flow", "Module", "States", "borders", "states", "theory"]


def theory(spec: Spec, step: int = 3) -> tuple[Flow, ...]:
    """What the strategy of a Spec, whose ranks are known, sends by formula in a step (the first ones differ from the rest)."""
    return tuple(THEORY[spec.strategy](Case(spec, step)))
