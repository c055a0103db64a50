"""Exercises of lab 18: FLOPs of a step, MFU, the roofline, and bytes per parameter by precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from labkit.analysis.theory.states import RECIPES
from labkit.course.exercises import Exercise, Wrong, require_function, require_number, result_of

_SHAPES = ((1024, 5, 128, 128, 256), (4096, 32, 4096, 2048, 32_000))  # tokens, layers, width, sequence, vocabulary


def _flops(answer: Any) -> str:
    require_function(answer, "flops(tokens, layers, width, sequence, vocabulary)")
    for shape in _SHAPES:
        call = f"flops{shape}"
        given = _called(answer, shape, call)
        tokens, layers, width, sequence, vocabulary = shape
        matrices, scores, head = 24 * layers * width**2, 4 * layers * sequence * width, 2 * vocabulary * width
        right = 3 * tokens * (matrices + scores + head)
        for wrong, words in (
            (3 * tokens * matrices, "that is 6ND: attention's scores and the head are missing"),
            (right / 3, "that is forward only; backward computes two products for each one of forward"),
            (right / 2, "a multiplication and an addition count as two operations"),
            (3 * tokens * (matrices + head), "the products of queries with keys, and of weights with values, miss"),
            (3 * tokens * (matrices + scores), "the head is missing: a matrix of width × vocabulary"),
        ):
            if math.isclose(given, wrong, rel_tol=1e-9):
                raise Wrong(f"{call}: {words}")
        if not math.isclose(given, right, rel_tol=1e-9):
            raise Wrong(f"{call} returned {given:.4g}: add up matrices, scores and head for one token of forward first")
    return "for the small model attention and head are a sixth of it, for the large one a tenth"


def _mfu(answer: Any) -> str:
    require_number(answer, "of percent")
    for near, words in (
        (0.4712, "that is a fraction; answer in percent"),
        (15.71, "that counts forward only; training computes three times as much"),
        (3.77, "3,500 tokens per second are already those of one GPU"),
    ):
        if math.isclose(answer, near, rel_tol=0.02):
            raise Wrong(words)
    if not 46.5 <= answer <= 47.7:
        raise Wrong("FLOP/s that the model needs are 6N times the tokens per second; divide them by the peak")
    return "6 · 7 · 10⁹ · 3,500 = 147 TFLOP/s of 312: a good value: PaLM reached 46 % (Chowdhery et al. 2022, table 3)"


def _least(answer: Any) -> str:
    require_function(answer, "least_seconds(flops, moved, peak, bandwidth)")
    for flops, moved, (peak, bandwidth) in product((1e9, 1e12), (1e6, 1e10), ((1e11, 1e10), (3e14, 2e12))):
        call = f"least_seconds({flops:g}, {moved:g}, {peak:g}, {bandwidth:g})"
        given = _called(answer, (flops, moved, peak, bandwidth), call)
        compute, memory = flops / peak, moved / bandwidth
        if math.isclose(given, compute + memory, rel_tol=1e-9):
            raise Wrong(f"{call}: computing and moving overlap at best, so they do not add up")
        if not math.isclose(given, max(compute, memory), rel_tol=1e-9):
            slower = "moving the bytes" if memory > compute else "computing"
            raise Wrong(f"{call} returned {given:g}: {slower} alone takes {max(compute, memory):g} s")
    return "whichever is slower decides; on the roofline it is the part left or right of the bend"


_PURE = 8  # parameters, gradients and both moments in 16 bits
_BYTES: Mapping[str, int] = {
    "fp32": sum(RECIPES["fp32"].values()),
    "tf32": sum(RECIPES["fp32"].values()),
    "bf16 autocast": sum(RECIPES["fp32"].values()),
    "fp16 autocast": sum(RECIPES["fp32"].values()),
    "bf16 with fp32 copy": sum(RECIPES["mixed"].values()),
    "bf16 states": _PURE,
}
_HINTS = {
    "tf32": "tf32 changes how a product is computed, not what is stored",
    "bf16 autocast": "autocast casts inputs of operations; what is stored from step to step keeps its type",
    "fp16 autocast": "the scaling factor is one number, and parameters stay in fp32",
    "bf16 with fp32 copy": "2 for the parameter, 2 for its gradient, and three numbers of 32 bits for the optimizer",
    "bf16 states": "four numbers of 16 bits",
}


def _bytes(answer: Any) -> str:
    if not isinstance(answer, Mapping) or set(answer) != set(_BYTES):
        raise Wrong(f"the answer must be a dict with the keys {', '.join(_BYTES)}")
    for name, right in _BYTES.items():
        require_number(answer[name], f"of bytes for {name}")
        if answer[name] != right:
            hint = _HINTS.get(name, "a parameter, its gradient, and two moments, each of 32 bits")
            raise Wrong(f"{name}: {answer[name]} is not the number of bytes per parameter; {hint}")
    return "autocast saves activations and time, not states; only states in 16 bits halve them"


def _called(answer: Callable[..., Any], arguments: tuple[Any, ...], call: str) -> float:
    given = result_of(call, answer, *arguments)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise Wrong(f"{call} must return a number, got {given!r:.80}")
    return float(given)


EXERCISES: dict[str, Exercise] = {
    "flops": Exercise(
        "FLOPs of a step",
        _flops,
        "`return 3 * tokens * (24 * layers * width**2 + 4 * layers * sequence * width + 2 * vocabulary * width)`",
    ),
    "mfu": Exercise(
        "MFU from tokens per second",
        _mfu,
        "6 · 7 · 10⁹ · 3,500 / (312 · 10¹²) = **47 %** (with attention's scores it is a few percent more).",
    ),
    "least": Exercise(
        "The roofline as a function",
        _least,
        "`return max(flops / peak, moved / bandwidth)`",
    ),
    "bytes": Exercise(
        "Bytes per parameter by precision",
        _bytes,
        "16 for all but `bf16 states`, which is 8: autocast changes the type of computations, not of what is stored.",
    ),
}
