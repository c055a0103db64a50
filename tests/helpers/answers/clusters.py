"""Answers to the exercises of lab 19; the numbers are those of the learner."""

from labkit.course.exercises import draw_number
from labkit.course.exercises import layouts as clusters


def drawn(name):
    """The question of this learner."""
    draws = {"bus": clusters._benchmark, "tokens": clusters._crossover, "rank": clusters._place}
    return draw_number(f"clusters.{name}", draws[name])


RIGHT = {
    "bus": lambda: drawn("bus").right,
    "tokens": lambda: drawn("tokens").right,
    "rank": lambda: drawn("rank").right,
    "published": "dp=32,tp=8,zero=0,micro_batch=8",
}
WRONG = {
    "bus": (lambda: drawn("bus").mistakes[0][0], "that is the algorithm bandwidth"),
    "tokens": (lambda: drawn("tokens").right / 2, "carries almost two times"),
    "rank": (lambda: drawn("rank").right + 1, "ranks are counted from 0"),
    "published": ("tp=16,zero=1,micro_batch=1", "16% of the fastest"),
}
