"""Answers to the exercises of lab 04."""

from labkit import run

GPT = {"device": "cpu", "workload": "gpt", "batch_size": 1, "steps": 3, "samples": 16}


def lowest_stage(parameters, ranks, memory):
    for stage in range(4):
        sizes = {3: 2, 2: 2, 1: 12}
        if sum(size * parameters / (ranks if stage >= first else 1) for first, size in sizes.items()) <= memory:
            return stage
    return None


def in_32_bits(parameters, ranks, memory):
    for stage, size in enumerate((16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks)):
        if size * parameters <= memory:
            return stage
    return None


RIGHT = {"stage": lowest_stage, "quarter": lambda: run("zero1", nproc=4, **GPT).wait()}
WRONG = {
    "stage": (in_32_bits, "a lower stage fits too"),
    "quarter": (lambda: run("zero1", nproc=2, **GPT).wait(), "on 2 ranks, one rank stores"),
}
