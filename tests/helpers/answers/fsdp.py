"""Answers to the exercises of lab 05."""

from labkit import run

GPT = {"nproc": 2, "device": "cpu", "workload": "gpt", "batch_size": 1, "steps": 3, "samples": 16}


def most_held(units, ranks, ahead):
    return sum(units) / ranks + max(sum(units[first : first + ahead + 1]) for first in range(len(units)))


def the_largest(units, ranks, ahead):
    return sum(units) / ranks + sum(sorted(units)[-ahead - 1 :])


RIGHT = {"held": most_held, "units": lambda: run("fsdp", **GPT, options={"min_parameters": 100_000}).wait()}
WRONG = {
    "held": (the_largest, "need not be neighbours"),
    "units": (lambda: run("fsdp", **GPT).wait(), "modules inside a layer became separate units"),
}
