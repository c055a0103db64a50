"""Exercises of lab 18: FLOPs of a step, MFU, the roofline, and bytes per parameter. The figures of all but the first
are drawn for each learner."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from labkit.course.exercises import Exercise, Question, Wrong, drawn_exercise, explained, number_of, require_function

# ---- the FLOPs of a Llama


_SHAPES = (  # tokens, layers, width, inner, groups, sequence, vocabulary
    (1024, 5, 128, 384, 2, 128, 256),
    (4096, 32, 4096, 14_336, 4, 2048, 128_256),
    (512, 80, 8192, 28_672, 8, 8192, 32_000),
)


def _flops(answer: Any) -> str:
    require_function(answer, "flops(tokens, layers, width, inner, groups, sequence, vocabulary)")
    for shape in _SHAPES:
        call = f"flops{shape}"
        given = number_of(call, "of operations", answer, *shape)
        tokens, layers, width, inner, groups, sequence, vocabulary = shape
        attention, mlp = 2 * width**2 * (2 + 2 / groups), 6 * width * inner
        scores, head = 4 * sequence * width, 2 * vocabulary * width
        right = 3 * tokens * (layers * (attention + mlp + scores) + head)
        mistakes = (
            (right / 3, "that is forward only; backward computes two products for each one of forward"),
            (right / 2, "a multiplication and an addition count as two operations"),
            (right - 3 * tokens * (layers * scores + head), "that is 6ND: attention's scores and the head are missing"),
            (
                right - 3 * tokens * layers * scores,
                "the products of queries with keys, and of weights with values, miss",
            ),
            (right - 3 * tokens * head, "the head is missing: a matrix of width × vocabulary"),
            (
                right + 3 * tokens * layers * 4 * width**2 * (1 - 1 / groups),
                "keys and values are not as wide as queries: `groups` heads of queries share one of each",
            ),
            (
                right - 3 * tokens * layers * scores * (1 - 1 / groups),
                "each head of the queries multiplies with keys, shared or not: the scores do not become fewer",
            ),
            (right - 3 * tokens * layers * mlp / 3, "the MLP has three matrices: gate, up and down"),
        )
        if not math.isclose(given, right, rel_tol=1e-9):
            otherwise = "add up matrices, scores and head for one token of forward first"
            raise Wrong(f"{call} returned {given:.4g}: {explained(given, mistakes, otherwise, 1e-9)}")
    return "shared keys and values make two of the seven matrices smaller, and the scores no cheaper"


# ---- figures of this learner


_GPUS = (("A100", 312, 2.0), ("H100", 989, 3.35), ("B200", 2250, 8.0))  # TFLOP/s in bf16 and TB/s, by data sheet


def _training(random: Random) -> Question:
    gpu, peak, _ = random.choice(_GPUS)
    billions, gpus = random.choice((3, 7, 8, 13, 34, 70)), random.choice((4, 16, 32, 128))
    second = round(random.uniform(0.25, 0.55) * peak * 1e12 / (6e9 * billions) * gpus, -2)  # tokens
    percent = 100 * 6e9 * billions * second / gpus / (peak * 1e12)
    return Question(
        f"You train {billions} · 10⁹ parameters with {second:,.0f} tokens per second on {gpus} {gpu} ({peak} TFLOP/s"
        " in bf16 each)",
        percent,
        (
            (percent / 100, "that is a fraction; answer in percent"),
            (percent / 3, "that counts forward only; training computes three times as much"),
            (percent * gpus, "the tokens are those of all GPUs, and the peak is that of one"),
            (percent * gpus / 100, "the tokens are those of all GPUs, and the peak is that of one"),
        ),
        what="of percent",
        hint="FLOP/s that the model needs are 6N times the tokens per second; divide them by the peak",
        why=f"{percent:.0f} % of the peak; PaLM reached 46 % on TPUs (Chowdhery et al. 2022, table 3)",
    )


def _product(random: Random) -> Question:
    """Half of the products are limited by the memory: with few columns."""
    gpu, peak, bandwidth = random.choice(_GPUS)
    rows, inner = 1024 * random.randint(2, 16), 1024 * random.randint(2, 16)
    columns = random.choice((8 * random.randint(1, 8), 1024 * random.randint(2, 16)))
    flops, numbers = 2 * rows * inner * columns, rows * inner + inner * columns + rows * columns
    compute, memory = flops / (peak * 1e6), 2 * numbers / (bandwidth * 1e6)  # µs
    right = max(compute, memory)
    twice = "a multiplication and an addition are two operations, and a number in bf16 has two bytes"
    return Question(
        f"Your {gpu} ({peak} TFLOP/s in bf16, {bandwidth:g} TB/s) multiplies a matrix of {rows:,} × {inner:,} by one of"
        f" {inner:,} × {columns:,}; all are in bf16, and each is read or written once",
        right,
        (
            (compute + memory, "computing and moving overlap at best, so they do not add up"),
            (min(compute, memory), "that is one limit; which of the two is larger?"),
            (right / 2, twice),
            (right * 2, twice),
            (right / 1e6, "that is in seconds; answer in µs"),
        ),
        what="of µs",
        hint="FLOPs by the peak, and bytes of all three matrices by the bandwidth: which is longer?",
        why=f"{right:,.1f} µs: whichever is slower decides, left or right of the bend of the roofline",
    )


_OPTIMIZERS = (("SGD with momentum", 1), ("AdamW", 2), ("AdaBelief", 2), ("Lion", 1))  # states per parameter
_FORMATS = (("fp32", 4), ("bf16", 2), ("8 bits", 1))


def _recipe(random: Random) -> Question:
    name, count = random.choice(_OPTIMIZERS)
    (moments, wide), (gradients, sent) = random.choice(_FORMATS), random.choice(_FORMATS[:2])
    copied = random.random() < 0.5
    stored = 2 if copied else 4
    right = stored + sent + 4 * copied + wide * count
    words = "bf16, with a copy in fp32 that the optimizer updates" if copied else "fp32, computed under bf16 autocast"
    cast = "autocast casts inputs of operations; what is stored from step to step keeps its type"
    mistakes = [
        (16, "that is fp32 with two moments in fp32; yours is another recipe"),
        (right - 4, "the copy in fp32 is stored as well") if copied else (right - 2, cast),
        (right - sent, "gradients are stored, too, while they are accumulated"),
        (right + wide * (3 - 2 * count), f"how many numbers per parameter does {name} store?"),
    ]
    if sent != stored:
        mistakes.append((right - sent + stored, "gradients need not have the type of the parameters"))
    if wide < 4:
        mistakes.append((right + (4 - wide) * count, f"the states of {name} are not in fp32 here"))
    return Question(
        f"Parameters are in {words}; gradients are accumulated in {gradients}; the states of {name} are in {moments}",
        right,
        tuple(mistakes),
        what="of bytes",
        hint="add up parameters, gradients, a copy if there is one, and the optimizer's states",
        why=f"{right} bytes: autocast saves activations and time, not states",
    )


EXERCISES: dict[str, Exercise] = {
    "one_device.flops": Exercise(
        "FLOPs of a Llama",
        _flops,
        "Per token of forward, `matrices = 2 * width**2 * (2 + 2 / groups) + 6 * width * inner`, `scores = 4 * sequence"
        " * width` and `head = 2 * vocabulary * width`: `return 3 * tokens * (layers * (matrices + scores) + head)`",
    ),
    "one_device.mfu": drawn_exercise(
        "one_device.mfu",
        "MFU from tokens per second",
        _training,
        "`100 * 6 * parameters * tokens_per_second / gpus / peak`. With the scores of attention it is a few percent"
        " more.",
    ),
    "one_device.least": drawn_exercise(
        "one_device.least",
        "The shortest time of a product",
        _product,
        "For m × k by k × n in bf16, `max(2 * m * k * n / peak, 2 * (m * k + k * n + m * n) / bandwidth)`.",
    ),
    "one_device.bytes": drawn_exercise(
        "one_device.bytes",
        "Bytes per parameter of a recipe",
        _recipe,
        "The sum of parameters (bf16 2, fp32 4, also under autocast), gradients, the copy in fp32 (4) if there is one,"
        " and one number per state of the optimizer: AdamW and AdaBelief have two, Lion and momentum one.",
    ),
}
