"""Exercises of lab 19: bus bandwidth, the crossover of DDP, and ranks on several nodes."""

from __future__ import annotations

import math
from typing import Any

from labkit.analysis.theory.collectives import bus_factor
from labkit.course.exercises import Exercise, Wrong, require_function, require_number, result_of
from labkit.course.exercises.published import pick_a_layout

_CASES = ((1e9, 0.01, 8), (25e6, 0.004, 2), (1e6, 1e-4, 64))  # bytes, seconds, ranks


def _bus(answer: Any) -> str:
    require_function(answer, "bus_bandwidth(size, seconds, ranks)")
    for size, seconds, ranks in _CASES:
        call = f"bus_bandwidth({size:g}, {seconds:g}, {ranks})"
        given = result_of(call, answer, size, seconds, ranks)
        require_number(given, f"of bytes per second, from {call}")
        algorithm = size / seconds
        if math.isclose(given, algorithm, rel_tol=1e-9) and ranks != 2:
            raise Wrong(f"{call}: that is the algorithm bandwidth; how much of a message crosses each link?")
        if math.isclose(given, algorithm * (ranks - 1) / ranks, rel_tol=1e-9):
            raise Wrong(f"{call}: that holds for an all-gather; an all-reduce is a reduce-scatter and an all-gather")
        if not math.isclose(given, algorithm * bus_factor("all_reduce", ranks), rel_tol=1e-9):
            raise Wrong(f"{call} returned {given:g}: multiply size / seconds by what each link carries per byte")
    return "it can be compared with the bandwidth of the link, for any number of ranks"


def _tokens(answer: Any) -> str:
    require_number(answer, "of tokens per GPU")
    for near, words in (
        (2667, "only backward overlaps with the all-reduce, not forward"),
        (2000, "each link carries almost two times the gradients in an all-reduce"),
        (8000, "the gradients have 2 bytes per parameter here, not 4"),
        (4e6, "check the units: tera is 10¹², giga is 10⁹"),
    ):
        if math.isclose(answer, near, rel_tol=0.01):
            raise Wrong(words)
    if not 3960 <= answer <= 4040:
        raise Wrong("backward takes 4·N·D / rate, the all-reduce 2 · 2N / bandwidth; for which D are they equal?")
    return "rate / bandwidth, whatever the number of parameters: small models have the same crossover as large ones"


def _rank(answer: Any) -> str:
    require_number(answer, "from 0 to 31")
    for near, words in (
        (11, "nodes are counted from 0: there are two nodes before this one"),
        (3, "that is the local rank; the rank counts across all nodes"),
        (20, "ranks are counted from 0"),
    ):
        if answer == near:
            raise Wrong(words)
    if answer != 19:
        raise Wrong("count the ranks on the nodes before this one, and add the local rank")
    return "2 · 8 + 3: the ranks of a node have consecutive numbers, so a TP group of 8 stays within a node"


EXERCISES: dict[str, Exercise] = {
    "bus": Exercise(
        "Bus bandwidth of an all-reduce", _bus, "`return 2 * (ranks - 1) / ranks * size / seconds`, as in nccl-tests."
    ),
    "tokens": Exercise(
        "Tokens per GPU with which backward hides the all-reduce",
        _tokens,
        "4·N·D / (400 · 10¹²) = 4·N / (100 · 10⁹), so D = **4,000** tokens per GPU and step, for any N.",
    ),
    "rank": Exercise("The rank of a process", _rank, "2 · 8 + 3 = **19**: two nodes before it, with eight ranks each."),
    "published": pick_a_layout(
        "A layout for 8B on 256 H100",
        "nanotron Llama 8B",
        256,
        "`'dp=32,tp=8,zero=0,micro_batch=8'`: TP within the node, so that each GPU reduces an eighth of the gradients"
        " between nodes, in one large micro-batch. With 256 samples for 256 GPUs, DP 256 has no backward to hide it"
        " behind.",
    ),
}
