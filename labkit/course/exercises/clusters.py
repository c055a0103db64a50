"""Exercises of lab 19: bus bandwidth, the crossover of DDP, and ranks on several nodes, with figures that are drawn for
each learner; and a layout that was published."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from labkit.course.exercises import Drawn, Exercise, draw_number
from labkit.course.exercises.published import pick_a_layout

_OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def _benchmark(random: Random) -> Drawn:
    """A collective that took some time; three of the four pass each byte once."""
    name, ranks = random.choice(_OPERATIONS), random.choice((4, 8, 16))
    gigabytes, seconds = random.choice((1, 2, 4, 8)), round(random.uniform(0.008, 0.04), 4)
    algorithm, part = gigabytes / seconds, (ranks - 1) / ranks
    if name == "all-reduce":
        right, twice = 2 * algorithm * part, (algorithm * part, "an all-reduce is a reduce-scatter and an all-gather")
    else:
        words = "that holds for an all-reduce, in which each byte crosses a link twice"
        right, twice = algorithm * part, (2 * algorithm * part, words)
    whole = {"all-gather": "the result of a rank has", "reduce-scatter": "the input of a rank has"}
    return Drawn(
        f"On {ranks} ranks, the operation {name}, in which {whole.get(name, 'a rank has')} {gigabytes} GB, takes"
        f" {1e3 * seconds:.1f} ms",
        right,
        (
            (algorithm, "that is the algorithm bandwidth; how much of a message crosses each link?"),
            twice,
            (algorithm * (ranks - 1), "the GB are those of all ranks together, not one rank's chunk"),
        ),
    )


def _bus(answer: Any) -> str:
    question = _question("bus", _benchmark)
    question.judge(answer, "of GB/s", "multiply size / seconds by what each link carries per byte of the message")
    return "it can be compared with the bandwidth of the link, for any collective and number of ranks"


def _crossover(random: Random) -> Drawn:
    """All but bf16 gradients without recomputation, which the lab has computed."""
    reached, bandwidth = 10 * random.randint(20, 60), random.choice((25, 50, 100, 200))  # TFLOP/s, GB/s
    (kind, wide), again = random.choice(((("fp32", 4), False), (("fp32", 4), True), (("bf16", 2), True)))
    operations, ratio = 6 if again else 4, 1e3 * reached / bandwidth
    right = 2 * wide * ratio / operations
    how = "backward recomputes the forward of every layer" if again else "nothing is recomputed"
    twice = f"a gradient in {kind} has {wide} bytes, and each link carries almost two times the gradients"
    mistakes = [
        (right / 2, twice),
        (2 * right, twice),
        (ratio, "that is for gradients in bf16 and a backward without recomputation"),
        (2 * wide * ratio / (operations + 2), "only backward overlaps with the all-reduce, not forward"),
        (1e3 * right, "check the units: tera is 10¹², giga is 10⁹"),
    ]
    if again:
        mistakes.append((2 * wide * ratio / 4, "recomputation makes backward longer: a forward more"))
    return Drawn(
        f"GPUs reach {reached} TFLOP/s, the bus bandwidth is {bandwidth} GB/s, gradients are reduced in {kind}, and"
        f" {how}",
        right,
        tuple(mistakes),
    )


def _tokens(answer: Any) -> str:
    question = _question("tokens", _crossover)
    question.judge(
        answer,
        "of tokens per GPU",
        "how long does backward take with D tokens, and how long the all-reduce of N gradients? For which D are they"
        " equal?",
    )
    return (
        f"{question.right:,.0f} tokens, whatever the number of parameters: small models have the same crossover as"
        " large ones"
    )


def _place(random: Random) -> Drawn:
    per_node, nodes = random.choice((4, 8)), random.randint(4, 9)
    node, local = random.randint(1, nodes - 1), random.randint(1, per_node - 1)
    right = node * per_node + local
    return Drawn(
        f"{nodes} nodes have {per_node} GPUs each and were started with `--node-rank` 0 to {nodes - 1}. You look for"
        f" local rank {local} of node {node}",
        right,
        (
            (right - per_node, f"nodes are counted from 0: there are {node} nodes before this one"),
            (local, "that is the local rank; the rank counts across all nodes"),
            (right + 1, "ranks are counted from 0"),
            (local * nodes + node, "the ranks of a node have consecutive numbers"),
        ),
    )


def _rank(answer: Any) -> str:
    question = _question("rank", _place)
    question.judge(answer, "of a rank", "count the ranks on the nodes before this one, and add the local rank")
    return f"{question.right}: the ranks of a node have consecutive numbers, so a TP group of a node's size stays in it"


def _question(short: str, draw: Callable[[Random], Drawn]) -> Drawn:
    return draw_number(f"clusters.{short}", draw)


EXERCISES: dict[str, Exercise] = {
    "bus": Exercise(
        "The bus bandwidth of a collective",
        _bus,
        "`size / seconds`, times `(ranks - 1) / ranks`, and twice that for an all-reduce, as in nccl-tests; which"
        " collective it is differs between learners.",
        task=lambda: _question("bus", _benchmark).task,
    ),
    "tokens": Exercise(
        "Tokens per GPU with which backward hides the all-reduce",
        _tokens,
        "c·N·D / rate = 2 · b·N / bandwidth, with c = 4 (6 if forward is recomputed) and b bytes per gradient, so D ="
        " 2 · b · rate / (c · bandwidth) for any N; the figures differ between learners.",
        task=lambda: _question("tokens", _crossover).task,
    ),
    "rank": Exercise(
        "The rank of a process",
        _rank,
        "node · GPUs per node + local rank; the numbers differ between learners.",
        task=lambda: _question("rank", _place).task,
    ),
    "published": pick_a_layout(
        "A layout for 8B on 256 H100",
        "nanotron Llama 8B",
        256,
        "`'dp=32,tp=8,zero=0,micro_batch=8'`: TP within the node, so that each GPU reduces an eighth of the gradients"
        " between nodes, in one large micro-batch. With 256 samples for 256 GPUs, DP 256 has no backward to hide it"
        " behind.",
    ),
}
